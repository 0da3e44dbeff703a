"""`nofuss serve`: the page and its requests; by default for this machine only.

routes.py and labels.py have the requests and their answers, guard.py who may ask.
"""

import asyncio
import logging
import os
import secrets
import socket
import threading
import time
from contextlib import asynccontextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn
from anyio.to_thread import run_sync
from starlette.applications import Starlette

from nofuss.errors import UsageError
from nofuss.run.directory import Run
from nofuss.search.page import labels
from nofuss.search.page.guard import Guard, is_loopback, read_origin
from nofuss.search.page.routes import FILES, REFUSALS, Page
from nofuss.search.page.state import State, open_state

log = logging.getLogger("nofuss")
CONNECTIONS = 200
"""Most at a time; further ones are closed at once."""
HEAD_SECONDS = 10.0
"""From the connection, or the answer before, to the end of a request's head."""
REQUEST_SECONDS = 300.0
"""For a request and its answer, whatever the client does with it."""
STOP_SECONDS = 1
"""After Ctrl-C, for requests under way."""


def build_app(
    state: State, *, host: str, port: int, token: str | None, origin: str | None = None
) -> Guard:
    """Return the application behind its guard."""
    page = Page(state)

    @asynccontextmanager
    async def draw_ahead(app: Starlette) -> Any:
        drawing = asyncio.create_task(run_sync(lambda: state.map, limiter=page.studying))
        page.pool.start()
        yield
        drawing.cancel()
        page.pool.close()

    app = Starlette(
        routes=[*page.routes(), *labels.routes(page), *FILES],
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
    state = open_state(Run.open(run), index, rerank=rerank)
    listener = _listen(host, port)
    port = listener.getsockname()[1]
    secret = secrets.token_urlsafe(24) if token else None
    everywhere = host in ("0.0.0.0", "::")
    shown = socket.gethostname() if everywhere else f"[{host}]" if ":" in host else host
    shown = f"http://{shown}:{port}"
    log.info(f"{state.title}: {state.index.count():,} items")
    if origin:
        log.info(f"waiting for requests of the proxy at {shown}")
    log.info(f"open {origin or shown}/" + (f"?token={secret}" if secret else ""))
    log.info("stop with Ctrl-C")
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)  # lost clients, missing descriptors
    config = uvicorn.Config(
        build_app(state, host=host, port=port, token=secret, origin=origin),
        log_level="critical",  # clients' errors are not logged; guard.py prints our own
        access_log=False,  # it would contain the token
        server_header=False,
        ws="none",
        http="h11",
        proxy_headers=origin is not None,  # anyone could write them
        forwarded_allow_ips=["127.0.0.1", "::1"],
        timeout_graceful_shutdown=STOP_SECONDS,
    )
    with listener:
        Server(config).run(sockets=[listener])


class Server(uvicorn.Server):
    """Closes connections that are too many or too slow, and ends soon after Ctrl-C."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.phases = dict[Any, tuple[Any, float]]()  # of each connection, and since when it lasts

    async def on_tick(self, counter: int) -> bool:
        """Look at all connections, ten times a second."""
        now, before, self.phases = time.monotonic(), self.phases, {}
        for connection in sorted(self.server_state.connections, key=before.__contains__)[::-1]:
            cycle: Any = connection.cycle  # type: ignore[union-attr]
            is_answered = cycle is None or cycle.response_complete
            is_read = not connection.transport.get_write_buffer_size()
            phase = cycle, is_answered and is_read
            was, since = before.get(connection, (phase, now))
            self.phases[connection] = phase, since if was == phase else now
            late = HEAD_SECONDS if phase[1] else REQUEST_SECONDS
            if now - self.phases[connection][1] > late or len(self.phases) > CONNECTIONS:
                connection.transport.abort()
        return await super().on_tick(counter)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Give requests under way their time, even if a thread waits for a disk in vain."""
        end = threading.Timer(STOP_SECONDS, os._exit, (130,))
        end.daemon = True
        end.start()
        super().handle_exit(sig, frame)


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=128)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"can't listen on {host}:{port}: {reason}; give another --port") from None
