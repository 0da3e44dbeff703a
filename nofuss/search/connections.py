"""Time-outs and limits for connections, so that idle clients can't keep others out.

A client has some seconds for the head of a request, and minutes for all of it. Where there are too
many connections, of one client or in all, the one that has been idle longest is closed.
"""

import asyncio
import os
import resource
import socket
import threading
from types import FrameType
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_SECONDS = 10.0
"""From the first byte, or from the connection, to the end of a request's head."""
IDLE_SECONDS = 30
"""Between an answer and the next request."""
REQUEST_SECONDS = 300.0
"""For a request and its answer, whatever the client does with it."""
A_CLIENT = 64
"""Most connections of one address."""
STOP_SECONDS = 1.0
"""After Ctrl-C, for requests under way."""
_MOST, _QUEUE, _RESERVE = 200, 64, 40
_BACKLOG = 256  # connections that the system queues until they are accepted


def room() -> tuple[int, int]:
    """Return how many connections, and how many accepted at a time, the descriptors allow."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < 1024:
        soft = 1024 if hard == resource.RLIM_INFINITY else min(1024, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    used = len(os.listdir("/dev/fd")) if os.path.isdir("/dev/fd") else 64
    free = max(0, soft - used - _RESERVE)
    queue = max(2, min(_QUEUE, free // 3))
    return max(2, min(_MOST, free - queue)), queue


class Server(uvicorn.Server):
    """Queues clients when it has no descriptor for them, and ends soon after Ctrl-C."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, with a long queue: waiting connections need no descriptors."""
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(_BACKLOG)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """End in any case, even if a thread waits for a disk that does not answer."""
        end = threading.Timer(STOP_SECONDS, os._exit, (130,))
        end.daemon = True
        end.start()
        super().handle_exit(sig, frame)


class Connection(H11Protocol):
    """One client's connection; `most` is the limit for all clients together."""

    most = _MOST

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._timer: asyncio.TimerHandle | None = None
        self._since, self._begun = 0.0, False

    @property
    def idle(self) -> bool:
        """Whether no request is being answered."""
        return self.cycle is None or self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Close another connection if there are too many, then wait for a request's head."""
        super().connection_made(transport)
        self._since = self.loop.time()
        self._wait(HEAD_SECONDS)
        everyone = [c for c in self.connections if isinstance(c, Connection)]
        same = [c for c in everyone if c._host() == self._host()]
        crowd = same if len(same) > A_CLIENT else everyone if len(everyone) > self.most else []
        if crowd:
            candidates = (c for c in crowd if c.idle and c is not self)
            min(candidates, key=lambda c: c._since, default=self)._drop()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the timer."""
        if self._timer is not None:
            self._timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Start a head's time-out at its first byte; later bytes do not extend it."""
        was_idle = self.idle
        super().data_received(data)
        if was_idle and not self.idle:
            self._wait(REQUEST_SECONDS)
        elif was_idle and not self._begun:
            self._begun = True
            self._wait(HEAD_SECONDS)

    def on_response_complete(self) -> None:
        """Wait for the next request, unless it has arrived already."""
        super().on_response_complete()
        self._begun, self._since = False, self.loop.time()
        # A little longer than uvicorn's own time-out, which waits until the client has read.
        self._wait(IDLE_SECONDS + 5 if self.idle else REQUEST_SECONDS)

    def _host(self) -> str:
        return self.client[0] if self.client else ""

    def _wait(self, seconds: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self.loop.call_later(seconds, self._drop)

    def _drop(self) -> None:
        """Close the connection; what the client has not read is lost."""
        if self.transport is not None:
            self.transport.abort()
