"""Answer the requests of the page; routes are in server.py.

An upload is the raw body, limited in size, and decoded in a process with limits while its sender
waits; nothing is stored.
"""

import asyncio
import secrets
import time
from collections.abc import Coroutine, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from torch import Tensor

from nofuss.data.collection import printable
from nofuss.data.columns import shown
from nofuss.data.decode import FORMATS, PictureError
from nofuss.data.thumbnail import encoded
from nofuss.report.thumbnails import data_uri
from nofuss.search.columns import LABEL
from nofuss.search.decoders import Decoders, Seen
from nofuss.search.refusals import Refused
from nofuss.search.searchable import SIDE
from nofuss.search.shelf import Found, Shelf, as_text
from nofuss.search.where import Condition, FilterError, parse_filter

MAX_UPLOAD = 24 * 2**20
"""Most bytes of an uploaded picture; more are not read."""
MAX_UPLOADS = 8 * MAX_UPLOAD
"""Most bytes of all uploads in memory; further ones are asked to be sent again."""
PATIENCE, FIRST_SECONDS, RATE = 30.0, 5.0, 100_000
"""Seconds for a whole body, seconds before its speed counts, and then the least bytes a second."""
MOST = 100
"""Most neighbours of one search."""
MEDIA = {"page.html": "text/html", "page.js": "text/javascript", "page.css": "text/css"}


class Page:
    """The handlers of one shelf."""

    def __init__(self, shelf: Shelf) -> None:
        self.shelf = shelf
        self.held = 0  # bytes of uploads in memory
        self.decoders = Decoders()
        self.busy = asyncio.Lock()  # pictures are embedded one at a time

    def static(self, name: str) -> Any:
        """Return a handler for a file of the package."""
        content = files("nofuss.search").joinpath(name).read_bytes()

        async def handler(request: Request) -> Response:
            return Response(content, media_type=f"{MEDIA[name]}; charset=utf-8")

        return handler

    async def about(self, request: Request) -> Response:
        """Return what the page says at its top, and the classes of its filter."""
        shelf = self.shelf
        types = await run_in_threadpool(lambda: shelf.index.types)
        size = await run_in_threadpool(lambda: shelf.size)
        return JSONResponse(
            {
                "title": shelf.title,
                "items": size,
                "columns": {name: kind for name, kind in types.items() if name != LABEL},
                "classes": shelf.classes,
                "dim": shelf.index.dim,
                "pictures": shelf.pictures is not None,
                "threshold": shelf.threshold,
                "formats": FORMATS,
                "max_upload": MAX_UPLOAD,
            }
        )

    async def some(self, request: Request) -> Response:
        """Return some items, others each time."""
        count, seed = self._count(request, "12"), secrets.randbits(32)
        rows = await run_in_threadpool(self.shelf.index.sample, count, seed=seed)
        return JSONResponse(await self._describe(rows))

    async def item(self, request: Request) -> Response:
        """Return the name, label and columns of an item."""
        [item] = await self._describe([self._row(request.path_params["number"])])
        return JSONResponse(item)

    async def neighbours(self, request: Request) -> Response:
        """Return the neighbours of an item of the index."""
        row = self._row(request.query_params.get("item", ""))
        k, only, where = await self._options(request)
        [item] = await self._describe([row])
        [query] = await run_in_threadpool(self.shelf.index.vectors_of, [row])
        found = await run_in_threadpool(
            self.shelf.search, query, k, only=only, where=where, without=row
        )
        return JSONResponse(await self._answer(found, query) | {"query": item})

    async def upload(self, request: Request) -> Response:
        """Return the neighbours of the picture in the body."""
        if self.shelf.pictures is None:
            raise Refused(
                400, "this run embeds vectors, not pictures; search from one of its items"
            )
        k, only, where = await self._options(request)
        body = bytearray()
        try:
            await self._read(request, body)
            began = time.perf_counter()
            fit = self.shelf.encoder.preprocessing
            seen = await _while_there(request, self.decoders.decode(body, side=SIDE, fit=fit))
        finally:
            self.held -= len(body)
        async with self.busy:
            query = await run_in_threadpool(self._embed, seen)
        spent = 1000 * (time.perf_counter() - began)
        picture = data_uri(seen.content, seen.media)
        found = await run_in_threadpool(self.shelf.search, query, k, only=only, where=where)
        answer = await self._answer(found, query)
        return JSONResponse(answer | {"query": {"picture": picture}, "embedding_ms": spent})

    async def map(self, request: Request) -> Response:
        """Return the map; the first call takes some seconds."""
        return JSONResponse(await run_in_threadpool(lambda: self.shelf.map))

    async def picture(self, request: Request) -> Response:
        """Return an item's picture by its number."""
        row = self._row(request.path_params["number"])
        try:
            image = await run_in_threadpool(self.shelf.picture, row)
        except LookupError:
            raise self._no_item() from None
        try:
            if isinstance(image, Path):
                decoding = self.decoders.decode(image, side=SIDE)
                _, content, media = await _while_there(request, decoding)
            elif image is not None:
                content, media = await run_in_threadpool(encoded, image)
        except PictureError:
            image = None
        if image is None:
            raise Refused(404, "no picture of this item")
        return Response(content, media_type=media, headers={"Content-Disposition": "inline"})

    async def _read(self, request: Request, body: bytearray) -> None:
        """Read the whole body into `body`, or refuse it as soon as it is too large or too slow."""
        too_large = Refused(
            413, f"the picture is over {MAX_UPLOAD // 2**20} MB; send a smaller one"
        )
        announced = request.headers.get("content-length", "0")
        if not announced.isdigit() or len(announced) > 12 or int(announced) > MAX_UPLOAD:
            raise too_large
        began = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(FIRST_SECONDS) as deadline:
                async for chunk in request.stream():
                    body += chunk
                    self.held += len(chunk)
                    if len(body) > MAX_UPLOAD:
                        raise too_large
                    if self.held > MAX_UPLOADS:
                        raise Refused(503, "too many pictures at once; send it again")
                    deadline.reschedule(began + min(PATIENCE, FIRST_SECONDS + len(body) / RATE))
        except TimeoutError:
            raise Refused(408, "the picture took too long to arrive; send it again") from None
        if not body:
            raise Refused(400, "no picture was sent")

    def _embed(self, seen: Seen) -> Tensor:
        with torch.inference_mode():
            return self.shelf.encoder.embed([seen.pixels])[0].clone()

    async def _answer(self, found: Found, query: Tensor) -> dict[str, Any]:
        pairs = zip(found.rows, found.distances, strict=True)
        items = await self._describe(found.rows)
        results = [
            item | {"rank": rank, "distance": round(distance, 4)}
            for rank, (item, (_, distance)) in enumerate(zip(items, pairs, strict=True), start=1)
        ]
        answer = {
            "results": results,
            "searching_ms": found.milliseconds,
            "items": await run_in_threadpool(lambda: self.shelf.size),
            "nothing": found.nothing,
            "place": None,
        }
        if self.shelf.drawn:
            vectors = await run_in_threadpool(self.shelf.index.vectors_of, found.rows)
            places = await run_in_threadpool(self.shelf.place, torch.cat([query[None], vectors]))
            answer["place"] = places[0].tolist()
            for result, place in zip(results, places[1:], strict=True):
                result["place"] = place.tolist()
        return answer

    async def _describe(self, rows: Sequence[int]) -> list[dict[str, Any]]:
        """Return what the page shows of some items."""
        try:
            items = await run_in_threadpool(self.shelf.index.items, rows)
        except LookupError:
            raise self._no_item() from None
        types = await run_in_threadpool(lambda: self.shelf.index.types)
        return [
            {
                "item": as_text(row),
                "name": printable("/".join(name.replace("\\", "/").split("/")[-2:])),
                "label": label,
                "columns": {n: shown(value, types.get(n, "text")) for n, value in cells.items()},
            }  # the last two parts of a path: the rest is nobody's business
            for row, (name, label, cells) in zip(rows, items, strict=True)
        ]

    def _row(self, text: str) -> int:
        """Return the number that a text gives; pictures are never named in any other way."""
        if text.isascii() and text.isdigit() and len(text) < 20 and int(text) < 2**63:
            return int(text)
        raise self._no_item()

    def _no_item(self) -> Refused:
        return Refused(404, f"no such item among the {self.shelf.size:,} of this index")

    def _count(self, request: Request, default: str) -> int:
        k = request.query_params.get("k", default)
        if not (k.isascii() and k.isdigit() and len(k) < 4 and 1 <= int(k) <= MOST):
            raise Refused(400, f"k must be a whole number from 1 to {MOST}")
        return int(k)

    async def _options(self, request: Request) -> tuple[int, int | None, Condition | None]:
        """Return k, the class to search in, and the filter."""
        k, only = self._count(request, "24"), request.query_params.get("class", "")
        if only and only not in self.shelf.classes:
            raise Refused(400, "no such class")
        text, where = request.query_params.get("where", ""), None
        if text.strip():
            types = await run_in_threadpool(lambda: self.shelf.index.types)
            try:
                where = parse_filter(text, types)
            except FilterError as error:
                raise Refused(400, f"the filter can't be read: {error}") from None
        return k, self.shelf.classes.index(only) if only else None, where


async def _while_there(request: Request, work: Coroutine[Any, Any, Seen]) -> Seen:
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
