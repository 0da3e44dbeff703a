"""Answer the requests of the page; routes are in server.py.

An upload is the raw body, limited in size, and decoded in a process with limits while its sender
waits; nothing is stored.
"""

import asyncio
import time
from collections.abc import Coroutine
from dataclasses import asdict
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import torch
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from torch import Tensor

from nofuss.data.collection import printable
from nofuss.data.decode import PictureError
from nofuss.data.formats import FORMATS
from nofuss.data.thumbnail import encoded
from nofuss.files.atomic import parse_json
from nofuss.report.thumbnails import data_uri
from nofuss.search.decoders import Decoders, Seen
from nofuss.search.ranking import Found
from nofuss.search.refusals import Refused
from nofuss.search.searchable import SIDE
from nofuss.search.sent import Sent
from nofuss.search.shelf import Shelf

MAX_UPLOAD = 24 * 2**20
"""Most bytes of an uploaded picture; more are not read."""
MAX_CONTENT = 64 * 2**10
"""Most bytes of a JSON object."""
MAX_UPLOADS = 8 * MAX_UPLOAD
"""Most bytes of all uploads in memory; further ones are asked to be sent again."""
PATIENCE, FIRST_SECONDS, RATE = 30.0, 5.0, 100_000
"""Seconds for a whole body, seconds before its speed counts, and then the least bytes a second."""
MOST = 500
"""Most neighbours of one search."""
SOME = 12
"""Items to start from."""
MEDIA = {".html": "text/html", ".js": "text/javascript", ".css": "text/css"}


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
        media = MEDIA[Path(name).suffix]

        async def handler(request: Request) -> Response:
            return Response(content, media_type=f"{media}; charset=utf-8")

        return handler

    async def about(self, request: Request) -> Response:
        """Return what the page says at its top, and the classes of its filter."""
        shelf = self.shelf
        return JSONResponse(
            {
                "run": printable(shelf.run.path.absolute().name),
                "title": shelf.title,
                "scores": shelf.scores,
                "taught": shelf.taught,
                "items": len(shelf.index),
                "classes": shelf.classes,
                "dim": shelf.index.dim,
                "pictures": shelf.pictures is not None,
                "threshold": shelf.threshold,
                "formats": FORMATS,
                "max_upload": MAX_UPLOAD,
                "most": MOST,
            }
        )

    async def item(self, request: Request) -> Response:
        """Return the name and label of an item."""
        return JSONResponse(self.describe(self._row(request.path_params["number"])))

    async def some(self, request: Request) -> Response:
        """Return random items to start from, and the classes that the filter leaves."""
        shelf, (_, only) = self.shelf, self._options(request)
        rows = np.arange(len(shelf.index))
        if only is not None:
            rows = rows[np.isin(shelf.codes, only)]
        chosen = np.random.default_rng().permutation(rows)[:SOME]
        return JSONResponse({"results": [self.describe(int(r)) for r in chosen], "classes": only})

    async def neighbours(self, request: Request) -> Response:
        """Return the neighbours of an item of the index, or of a vector of `upload`."""
        options, shelf = request.query_params, self.shelf
        row, shown = None, dict[str, Any]()
        if "vector" in options:
            query = self.sent(options["vector"]).vector
        else:
            row = self.by_key(options["like"]) if "like" in options else None
            row = self._row(options.get("item", "")) if row is None else row
            query, shown = shelf.index.vectors[row], self.describe(row)
        k, only = self._options(request)
        found = await run_in_threadpool(shelf.search, query, k, only=only, without=row)
        return JSONResponse(await self._answer(found, query, only) | {"query": shown})

    async def upload(self, request: Request) -> Response:
        """Return the neighbours of the picture in the body."""
        if self.shelf.pictures is None:
            raise Refused(
                400, "this run embeds vectors, not pictures; search from one of its items"
            )
        k, only = self._options(request)
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
        shown = data_uri(seen.content, seen.media)
        found = await run_in_threadpool(self.shelf.search, query, k, only=only)
        answer = await self._answer(found, query, only)
        about = {"picture": shown, "vector": Sent.new(query).as_text(self.shelf.model)}
        return JSONResponse(answer | {"query": about, "embedding_ms": spent})

    async def map(self, request: Request) -> Response:
        """Return the map; the first call takes some seconds."""
        return JSONResponse(await run_in_threadpool(lambda: self.shelf.map))

    async def picture(self, request: Request) -> Response:
        """Return an item's picture by its number."""
        row = self._row(request.path_params["number"])
        image = await run_in_threadpool(self.shelf.picture, row)
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

    async def content(self, request: Request) -> dict[str, Any]:
        """Return the JSON object in the body."""
        if request.headers.get("content-type") != "application/json":
            raise Refused(415, "expected application/json")
        body = bytearray()
        try:
            await self._read(request, body, limit=MAX_CONTENT, what="the body")
            content = parse_json(bytes(body))
        except ValueError:
            raise Refused(400, "the body is not JSON") from None
        finally:
            self.held -= len(body)
        if not isinstance(content, dict):
            raise Refused(400, "the body is not a JSON object")
        return content

    async def _read(
        self,
        request: Request,
        body: bytearray,
        *,
        limit: int = MAX_UPLOAD,
        what: str = "the picture",
    ) -> None:
        """Read the whole body into `body`, or refuse it as soon as it is too large or too slow."""
        size = f"{limit // 2**20} MB" if limit >= 2**20 else f"{limit // 1024} KB"
        too_large = Refused(413, f"{what} is over {size}; send a smaller one")
        announced = request.headers.get("content-length", "0")
        if not announced.isdigit() or len(announced) > 12 or int(announced) > limit:
            raise too_large
        began = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(FIRST_SECONDS) as deadline:
                async for chunk in request.stream():
                    body += chunk
                    self.held += len(chunk)
                    if len(body) > limit:
                        raise too_large
                    if self.held > MAX_UPLOADS:
                        raise Refused(503, "too many pictures at once; send it again")
                    deadline.reschedule(began + min(PATIENCE, FIRST_SECONDS + len(body) / RATE))
        except TimeoutError:
            raise Refused(408, f"{what} took too long to arrive; send it again") from None
        if not body:
            raise Refused(400, f"{what} is empty; send it again")

    def _embed(self, seen: Seen) -> Tensor:
        with torch.inference_mode():
            return self.shelf.encoder.embed([seen.pixels])[0].clone()

    async def _answer(self, found: Found, query: Tensor, only: list[int] | None) -> dict[str, Any]:
        likely = None if found.nothing or only is not None else self.shelf.likely(found)
        pairs = zip(found.rows, found.distances, strict=True)
        results = [
            self.describe(row) | {"rank": rank, "distance": round(distance, 4)}
            for rank, (row, distance) in enumerate(pairs, start=1)
        ]
        answer = {
            "results": results,
            "searching_ms": found.milliseconds,
            "items": len(self.shelf.index),
            "nothing": found.nothing,
            "confidence": found.confidence,
            "verdict": found.verdict,
            "likely": likely and asdict(likely),
            "classes": only,
            "place": None,
        }
        if self.shelf.drawn:
            rows = [query, *(self.shelf.index.vectors[row] for row in found.rows)]
            places = await run_in_threadpool(self.shelf.place, torch.stack(rows))
            answer["place"] = places[0].tolist()
            for result, place in zip(results, places[1:], strict=True):
                result["place"] = place.tolist()
        return answer

    def describe(self, row: int) -> dict[str, Any]:
        """Return what the page shows of an item: its row, key, name and label."""
        index = self.shelf.index
        name = "/".join(index.names[row].replace("\\", "/").split("/")[-2:])  # no path of this disk
        key = self.shelf.key(index.names[row])
        return {"item": row, "key": key, "name": printable(name), "label": index.labels[row]}

    def by_key(self, key: Any) -> int:
        """Return the row of an item's key."""
        if not isinstance(key, str) or key not in self.shelf.keys:
            raise Refused(404, "this item is no longer in the index; search from another one")
        return self.shelf.keys[key]

    def sent(self, text: str) -> Sent:
        """Return the uploaded picture of an address."""
        try:
            return Sent.from_text(text, model=self.shelf.model, dim=self.shelf.index.dim)
        except ValueError:
            raise Refused(
                400, "this address was made by another model; send the picture again"
            ) from None

    def _row(self, text: str) -> int:
        """Return the row that a text gives; pictures are never named in any other way."""
        if (
            text.isascii()
            and text.isdigit()
            and len(text) < 12
            and int(text) < len(self.shelf.index)
        ):
            return int(text)
        raise Refused(404, f"no such item; items are numbered 0 to {len(self.shelf.index) - 1}")

    def _options(self, request: Request) -> tuple[int, list[int] | None]:
        """Return k and the classes to search in."""
        k, words = request.query_params.get("k", "24"), request.query_params.get("class", "")
        if not (k.isascii() and k.isdigit() and len(k) < 4 and 1 <= int(k) <= MOST):
            raise Refused(400, f"k must be a whole number from 1 to {MOST}")
        if not words.strip():
            return int(k), None
        if not (only := self.shelf.matching(words)):
            raise Refused(400, f"there is no class like “{printable(words[:80])}”; try a part")
        return int(k), only


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
