"""Connections that can't be kept for nothing: time-outs, and room for whoever really asks.

A client has some seconds for the head of a request, and minutes for all of it. Where there are too
many connections, of one client or in all, the one that has been silent longest goes.
"""

import asyncio
import os
import socket
import sys
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
"""Connections of one address."""
STOP_SECONDS = 1.5
"""After Ctrl-C, for what is under way."""
_MOST, _QUEUE, _RESERVE = 200, 64, 40
_IN_LINE = 256  # connections that the system keeps until they are accepted


def room() -> tuple[int, int]:
    """Connections, and how many of them to accept at a time, that there are descriptors for."""
    if sys.platform == "win32":
        return _MOST, _QUEUE
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < 1024:
        soft = 1024 if hard == resource.RLIM_INFINITY else min(1024, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    used = len(os.listdir("/dev/fd")) if os.path.isdir("/dev/fd") else 64
    free = max(0, soft - used - _RESERVE)
    queue = max(2, min(_QUEUE, free // 3))
    return max(2, min(_MOST, free - queue)), queue


class Server(uvicorn.Server):
    """Keeps clients in line when it has no descriptor for them, and ends soon after Ctrl-C."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, with a queue that costs no descriptors and so may be long."""
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(_IN_LINE)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """End in any case: a thread may wait for a disk that does not answer."""
        end = threading.Timer(STOP_SECONDS, os._exit, (130,))
        end.daemon = True
        end.start()
        super().handle_exit(sig, frame)


class Connection(H11Protocol):
    """One client's connection; `most` is how many there may be."""

    most = _MOST

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._timer: asyncio.TimerHandle | None = None
        self._since, self._begun = 0.0, False

    @property
    def silent(self) -> bool:
        """Whether no request is at work."""
        return self.cycle is None or self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Make room, then wait for a request's head."""
        super().connection_made(transport)
        self._since = self.loop.time()
        self._wait(HEAD_SECONDS)
        everyone = [c for c in self.connections if isinstance(c, Connection)]
        same = [c for c in everyone if c._host() == self._host()]
        crowd = same if len(same) > A_CLIENT else everyone if len(everyone) > self.most else []
        if crowd:
            others = (c for c in crowd if c.silent and c is not self)
            min(others, key=lambda c: c._since, default=self)._drop()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the timer."""
        if self._timer is not None:
            self._timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Give a head that has begun its seconds once, however slowly it comes."""
        was_silent = self.silent
        super().data_received(data)
        if was_silent and not self.silent:
            self._wait(REQUEST_SECONDS)
        elif was_silent and not self._begun:
            self._begun = True
            self._wait(HEAD_SECONDS)

    def on_response_complete(self) -> None:
        """Wait for the next request, unless it is there already."""
        super().on_response_complete()
        self._begun, self._since = False, self.loop.time()
        # A little more than uvicorn's own patience, whose farewell waits for the client to read.
        self._wait(IDLE_SECONDS + 5 if self.silent else REQUEST_SECONDS)

    def _host(self) -> str:
        return self.client[0] if self.client else ""

    def _wait(self, seconds: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self.loop.call_later(seconds, self._drop)

    def _drop(self) -> None:
        """Hang up; what the client has not read is forgotten."""
        if self.transport is not None:
            self.transport.abort()
