"""`nofuss serve`: the page and its requests; by default for this machine only.

    GET  /                     the page; its scripts and styles
    GET  /api/about            run, scores, number of items, classes
    GET  /api/items/N          name, label and columns of an item
    GET  /api/some             random items to start from
    GET  /api/search?item=N    neighbours of an item; like=KEY, vector=…: of an address
    POST /api/search           neighbours of the picture in the body; class=, where=: only these
    GET  /api/map              items and proxies on a plane
    GET  /api/marks?like=KEY   marks of a query's results; POST adds some; /api/marks.csv has all
    POST /api/learn            learn from all marks; /api/undo returns to the model before
    GET  /api/suspects         doubtful labels with their evidence
    POST /api/suspects         what somebody says of one: {item, label}
    GET  /pictures/N           an item's picture, small, encoded again

See handlers.py for the answers, guard.py for who may ask.
"""

import asyncio
import logging
import secrets
import socket
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.routing import Route

from nofuss.errors import UsageError
from nofuss.progress import Progress, silent
from nofuss.search.handlers import Page
from nofuss.search.lessons import finish_lesson
from nofuss.search.page.guard import Guard, is_loopback
from nofuss.search.refusals import REFUSALS
from nofuss.search.repair import Repair
from nofuss.search.shelf import Shelf, open_shelf
from nofuss.search.teaching import Teaching

log = logging.getLogger("nofuss")

STATIC = ("page.css", "page.js", "page.map.js", "page.marks.js", "page.suspects.js")


def build_app(shelf: Shelf, *, host: str, port: int, token: str | None) -> Guard:
    """Return the application behind its guard."""
    page = Page(shelf)
    repair, teaching = Repair(page), Teaching(page)

    @asynccontextmanager
    async def draw_ahead(app: Starlette) -> Any:
        asyncio.get_running_loop().set_exception_handler(_print_error)
        drawing = asyncio.create_task(run_in_threadpool(lambda: shelf.map))
        page.pool.start()
        yield
        drawing.cancel()
        page.close()

    app = Starlette(
        routes=[
            Route("/", page.static("page.html")),
            Route("/look.css", page.static("look.css", "nofuss.report")),
            *(Route(f"/{name}", page.static(name)) for name in STATIC),
            Route("/api/about", page.about),
            Route("/api/items/{key}", page.item),
            Route("/api/some", page.some),
            Route("/api/search", page.neighbours, methods=["GET"]),
            Route("/api/search", page.upload, methods=["POST"]),
            Route("/api/map", page.map),
            Route("/api/marks", teaching.marks, methods=["GET"]),
            Route("/api/marks", teaching.mark, methods=["POST"]),
            Route("/api/marks.csv", teaching.as_csv),
            Route("/api/learn", teaching.learn, methods=["POST"]),
            Route("/api/undo", teaching.undo, methods=["POST"]),
            Route("/api/suspects", repair.suspects, methods=["GET"]),
            Route("/api/suspects", repair.judge, methods=["POST"]),
            Route("/pictures/{key}", page.picture),
        ],
        exception_handlers=REFUSALS,
        lifespan=draw_ahead,
    )
    return Guard(app, host=host, port=port, token=token)


def serve(
    run: Path,
    *,
    host: str,
    port: int,
    token: bool = True,
    index: str | None = None,
    rerank: bool = True,
    progress: Progress = silent,
) -> None:
    """Run `nofuss serve` until interrupted."""
    import uvicorn

    from nofuss.search.connections import IDLE_SECONDS, Connection, Server, room

    if not token and not is_loopback(host):
        raise UsageError(
            f"--host {host} can be reached from other machines, so a token is needed; "
            "drop --no-token or --host"
        )
    if not 0 <= port < 65536:
        raise UsageError(f"--port is {port}; expected 0 (any free one) to 65535")
    finish_lesson(run)
    shelf = open_shelf(run, index, rerank=rerank, progress=progress)
    listener = _listen(host, port)
    port = listener.getsockname()[1]
    secret = secrets.token_urlsafe(24) if token else None
    shown = "localhost" if host in ("0.0.0.0", "::") else f"[{host}]" if ":" in host else host
    log.info(f"{shelf.title}: {shelf.size:,} items")
    log.info(f"open http://{shown}:{port}/" + (f"?token={secret}" if secret else ""))
    log.info("stop with Ctrl-C")
    Connection.most, queue = room()
    config = uvicorn.Config(
        build_app(shelf, host=host, port=port, token=secret),
        log_level="critical",  # clients' errors are not logged; guard.py prints our own
        access_log=False,  # it would contain the token
        server_header=False,
        ws="none",
        http=Connection,
        backlog=queue,
        timeout_keep_alive=IDLE_SECONDS,
        timeout_graceful_shutdown=1,
    )
    with listener:
        Server(config).run(sockets=[listener])


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
