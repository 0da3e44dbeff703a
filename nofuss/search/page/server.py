"""`nofuss serve`: the page and its requests; by default for this machine only.

routes.py and labels.py have the requests and their answers, guard.py who may ask.
"""

import asyncio
import logging
import os
import resource
import secrets
import socket
import threading
from contextlib import asynccontextmanager
from math import inf
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn
from anyio.to_thread import run_sync
from starlette.applications import Starlette
from uvicorn.protocols.http.h11_impl import H11Protocol

from nofuss.errors import UsageError
from nofuss.run.directory import Run
from nofuss.search.page.guard import Guard, is_loopback, read_origin
from nofuss.search.page.labels import Labels
from nofuss.search.page.routes import REFUSALS, Page
from nofuss.search.page.state import State, open_state

log = logging.getLogger("nofuss")
CONNECTIONS = 200
"""Most at a time; where there are more, the one that has been idle longest is closed."""
HEAD_SECONDS = 10.0
"""From the connection, or the answer before, to the end of a request's head."""
REQUEST_SECONDS = 300.0
"""For a request and its answer, whatever the client does with it."""
STOP_SECONDS = 1.0
"""After Ctrl-C, for requests under way."""


def build_app(
    state: State, *, host: str, port: int, token: str | None, origin: str | None = None
) -> Guard:
    """Return the application behind its guard."""
    page = Page(state)

    @asynccontextmanager
    async def draw_ahead(app: Starlette) -> Any:
        asyncio.get_running_loop().set_exception_handler(_print_error)
        drawing = asyncio.create_task(run_sync(lambda: state.map))
        page.pool.start()
        yield
        drawing.cancel()
        page.close()

    app = Starlette(
        routes=[*page.routes(), *Labels(page).routes()],
        exception_handlers=REFUSALS,
        lifespan=draw_ahead,
    )
    return Guard(app, host=host, port=port, token=token, origin=origin)


def serve(
    run: Path,
    *,
    host: str,
    port: int,
    token: bool = True,
    origin: str | None = None,
    index: str | None = None,
    rerank: bool = True,
) -> None:
    """Run `nofuss serve` until interrupted."""
    if not token and (origin or not is_loopback(host)):
        flag = f"--origin {origin}" if origin else f"--host {host}"
        raise UsageError(
            f"{flag} can be reached from other machines, so a token is needed; drop --no-token"
        )
    origin = origin and read_origin(origin)
    if not 0 <= port < 65536:
        raise UsageError(f"--port is {port}; expected 0 (any free one) to 65535")
    state = open_state(Run.open(run), index, rerank=rerank)
    listener = _listen(host, port)
    port = listener.getsockname()[1]
    secret = secrets.token_urlsafe(24) if token else None
    shown = "localhost" if host in ("0.0.0.0", "::") else f"[{host}]" if ":" in host else host
    shown = f"http://{shown}:{port}"
    log.info(f"{state.title}: {state.index.count():,} items")
    if origin:
        log.info(f"waiting for requests of the proxy at {shown}")
    log.info(f"open {origin or shown}/" + (f"?token={secret}" if secret else ""))
    log.info("stop with Ctrl-C")
    _allow_descriptors()
    config = uvicorn.Config(
        build_app(state, host=host, port=port, token=secret, origin=origin),
        log_level="critical",  # clients' errors are not logged; guard.py prints our own
        access_log=False,  # it would contain the token
        server_header=False,
        ws="none",
        http=Connection,
        backlog=128,
        proxy_headers=origin is not None,  # anyone could write them
        forwarded_allow_ips=["127.0.0.1", "::1"],
        timeout_graceful_shutdown=1,
    )
    with listener:
        Server(config).run(sockets=[listener])


class Server(uvicorn.Server):
    """Closes connections that take too long, and ends soon after Ctrl-C."""

    async def on_tick(self, counter: int) -> bool:
        """Close what is late, ten times a second; an idle client may still read its answer."""
        now = asyncio.get_running_loop().time()
        for connection in list(self.server_state.connections):
            assert isinstance(connection, Connection)
            unread = connection.transport.get_write_buffer_size()
            if now > connection.until + (REQUEST_SECONDS if unread else 0):
                connection.transport.abort()
        return await super().on_tick(counter)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """End in any case, even if a thread waits for a disk that does not answer."""
        end = threading.Timer(STOP_SECONDS, os._exit, (130,))
        end.daemon = True
        end.start()
        super().handle_exit(sig, frame)


class Connection(H11Protocol):
    """A client's connection, and until when it may wait for a head or an answer."""

    until = inf

    @property
    def idle(self) -> bool:
        """Whether no request is being answered."""
        return self.cycle is None or self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for a request's head; close another connection if there are too many."""
        super().connection_made(transport)
        self._wait()
        if len(self.connections) > CONNECTIONS:
            others = [c for c in self.connections if isinstance(c, Connection) and c.idle]
            oldest = min((c for c in others if c is not self), key=lambda c: c.until, default=self)
            oldest.transport.abort()

    def data_received(self, data: bytes) -> None:
        """Notice the end of a head; bytes before it do not extend its time."""
        was_idle = self.idle
        super().data_received(data)
        if was_idle and not self.idle:
            self._wait()

    def on_response_complete(self) -> None:
        """Wait for the next request, unless it has arrived already."""
        super().on_response_complete()
        self._wait()

    def _wait(self) -> None:
        self.until = self.loop.time() + (HEAD_SECONDS if self.idle else REQUEST_SECONDS)


def _allow_descriptors() -> None:
    """Let this process open enough files for all connections; macOS allows 256."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < 1024:
        most = 1024 if hard == resource.RLIM_INFINITY else min(1024, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def _print_error(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Print errors outside of requests in one line; not lost clients or missing descriptors."""
    error = context.get("exception")
    if not isinstance(error, OSError):
        log.error(f"{context['message']}: {error}")


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(100)  # early connections wait instead of being refused
    except (OSError, OverflowError) as error:
        listener.close()
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"can't listen on {host}:{port}: {reason}; give another --port") from None
    return listener
