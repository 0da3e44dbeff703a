"""What a request of the page asks for besides its query: how many, which classes and filter."""

import asyncio
from collections.abc import Coroutine
from typing import Any, NamedTuple

from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request

from nofuss.data.collection import printable
from nofuss.data.decode_pool import Decoded
from nofuss.search.filter import Condition, FilterError, parse_filter
from nofuss.search.refusals import Refused
from nofuss.search.shelf import Shelf

MOST = 500
"""Most neighbours of one search."""


class SearchOptions(NamedTuple):
    """The options of a search."""

    k: int
    only: list[int] | None
    where: Condition | None


async def read_options(request: Request, shelf: Shelf) -> SearchOptions:
    """Return what the address of a request says, or refuse it."""
    k, words = request.query_params.get("k", "24"), request.query_params.get("class", "")
    if not (k.isascii() and k.isdigit() and len(k) < 4 and 1 <= int(k) <= MOST):
        raise Refused(400, f"k must be a whole number from 1 to {MOST}")
    only = shelf.matching(words) if words.strip() else None
    if only == []:
        raise Refused(400, f"there is no class like “{printable(words[:80])}”; try a part")
    text, where = request.query_params.get("where", ""), None
    if text.strip():
        types = await run_in_threadpool(lambda: shelf.index.about.types)
        try:
            where = parse_filter(text, types)
        except FilterError as error:
            raise Refused(400, f"the filter can't be read: {error}") from None
    return SearchOptions(int(k), only, where)


async def while_there(request: Request, work: Coroutine[Any, Any, Decoded]) -> Decoded:
    """Return the result of the work; cancel it if the client disconnects."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    tasks = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not tasks[0].done():
            raise ClientDisconnect
        return tasks[0].result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
