"""Answer the requests of the page; routes are in server.py.

An upload is the raw body, limited in size, and decoded in a process with limits while its sender
waits; nothing is stored.
"""

import asyncio
import time
from collections.abc import Coroutine
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from torch import Tensor

from nofuss.data.collection import printable
from nofuss.data.decode import PictureError
from nofuss.data.formats import FORMATS
from nofuss.data.thumbnail import encoded
from nofuss.report.thumbnails import data_uri
from nofuss.search.decoders import Decoders, Seen
from nofuss.search.ranking import Found
from nofuss.search.searchable import SIDE
from nofuss.search.shelf import Shelf

MAX_UPLOAD = 24 * 2**20
"""Most bytes of an uploaded picture; more are not read."""
MAX_UPLOADS = 8 * MAX_UPLOAD
"""Most bytes of all uploads in memory; further ones are asked to be sent again."""
PATIENCE, FIRST_SECONDS, RATE = 30.0, 5.0, 100_000
"""Seconds for a whole body, seconds before its speed counts, and then the least bytes a second."""
MOST = 100
"""Most neighbours of one search."""
MEDIA = {"page.html": "text/html", "page.js": "text/javascript", "page.css": "text/css"}


class Refused(Exception):
    """A request that is answered with an error status and one line."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status, self.message = status, message


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
        return JSONResponse(
            {
                "title": shelf.title,
                "items": len(shelf.index),
                "classes": shelf.classes,
                "dim": shelf.index.dim,
                "pictures": shelf.pictures is not None,
                "threshold": shelf.threshold,
                "formats": FORMATS,
                "max_upload": MAX_UPLOAD,
            }
        )

    async def item(self, request: Request) -> Response:
        """Return the name and label of an item."""
        return JSONResponse(self._describe(self._row(request.path_params["number"])))

    async def neighbours(self, request: Request) -> Response:
        """Return the neighbours of an item of the index."""
        row = self._row(request.query_params.get("item", ""))
        k, only = self._options(request)
        shelf = self.shelf
        query = shelf.index.vectors[row]
        began = time.perf_counter()
        found = await run_in_threadpool(shelf.search, query, k, only=only, without=row)
        answer = await self._answer(found, query, began)
        return JSONResponse(answer | {"query": self._describe(row)})

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
        began = time.perf_counter()
        found = await run_in_threadpool(self.shelf.search, query, k, only=only)
        answer = await self._answer(found, query, began)
        return JSONResponse(answer | {"query": {"picture": shown}, "embedding_ms": spent})

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

    async def _answer(self, found: Found, query: Tensor, began: float) -> dict[str, Any]:
        """Return what was found by a search that began then."""
        spent = 1000 * (time.perf_counter() - began)
        pairs = zip(found.rows, found.distances, strict=True)
        results = [
            self._describe(row) | {"rank": rank, "distance": round(distance, 4)}
            for rank, (row, distance) in enumerate(pairs, start=1)
        ]
        answer = {
            "results": results,
            "searching_ms": spent,
            "items": len(self.shelf.index),
            "nothing": found.confidence == "nothing",
            "confidence": found.confidence,
            "verdict": found.verdict,
            "place": None,
        }
        if self.shelf.drawn:
            rows = [query, *(self.shelf.index.vectors[row] for row in found.rows)]
            places = await run_in_threadpool(self.shelf.place, torch.stack(rows))
            answer["place"] = places[0].tolist()
            for result, place in zip(results, places[1:], strict=True):
                result["place"] = place.tolist()
        return answer

    def _describe(self, row: int) -> dict[str, Any]:
        index = self.shelf.index
        name = "/".join(index.names[row].replace("\\", "/").split("/")[-2:])  # no path of this disk
        return {"item": row, "name": printable(name), "label": index.labels[row]}

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

    def _options(self, request: Request) -> tuple[int, int | None]:
        """Return k and the class to search in."""
        k, only = request.query_params.get("k", "24"), request.query_params.get("class", "")
        if not (k.isascii() and k.isdigit() and len(k) < 4 and 1 <= int(k) <= MOST):
            raise Refused(400, f"k must be a whole number from 1 to {MOST}")
        if not only:
            return int(k), None
        if only not in self.shelf.classes:
            raise Refused(400, "no such class")
        return int(k), self.shelf.classes.index(only)


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


async def refuse(request: Request, error: Exception) -> Response:
    """Answer with the status and message of a `Refused`."""
    assert isinstance(error, Refused)
    # Close: the unread rest of a body must not be taken for the next request.
    return JSONResponse({"error": error.message}, error.status, {"Connection": "close"})


async def refuse_picture(request: Request, error: Exception) -> Response:
    """Say what is wrong with an uploaded picture."""
    assert isinstance(error, PictureError)
    formats = "JPEG, PNG, WebP, BMP, GIF or TIFF"
    words = {
        "not a picture": f"this is not a picture of a known format; send {formats}",
        "oversized": f"the picture has too many pixels ({error.detail}); send a smaller one",
        "truncated": "the picture is cut off; send the whole file",
        "too narrow": f"the picture is nearly a line ({error.detail}); send a part of it",
        "too complex": f"the picture takes too long to decode ({error.detail}); save it anew",
        "too slow": f"the picture takes too long to decode ({error.detail}); save it anew",
    }
    message = words.get(error.reason, f"the picture can't be read; send {formats}")
    return JSONResponse({"error": message}, 415 if error.reason == "not a picture" else 422)


async def refuse_http(request: Request, error: Exception) -> Response:
    """Refuse an unknown address or method."""
    assert isinstance(error, HTTPException)
    return JSONResponse({"error": error.detail}, error.status_code, error.headers)
