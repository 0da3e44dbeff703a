"""Answer the requests of the page; routes are in server.py.

An upload is the raw body, limited in size, and decoded in a process with limits while its sender
waits; nothing is stored.
"""

import asyncio
import secrets
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from torch import Tensor

from nofuss.config import Preprocessing
from nofuss.data.collection import printable
from nofuss.data.columns import Type, shown
from nofuss.data.decode import FORMATS, MAX_FILE, PictureError, data_uri, encoded
from nofuss.data.decode_pool import PROCESSES, Decoded, DecodePool
from nofuss.data.items import read_item
from nofuss.files import parse_json
from nofuss.search.filter import LABEL, Condition
from nofuss.search.folder import FolderIndex
from nofuss.search.index import Item, key_of
from nofuss.search.json_response import Json
from nofuss.search.options import MOST, read_options, while_there
from nofuss.search.refusals import Refused
from nofuss.search.search import Answer, Hit
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
SOME = 12
"""Items to start from."""
MEDIA = {".html": "text/html", ".js": "text/javascript", ".css": "text/css"}


class Page:
    """The handlers of one shelf."""

    def __init__(self, shelf: Shelf) -> None:
        self.shelf = shelf
        self.held = 0  # bytes of uploads in memory
        self.pool = DecodePool()
        self.decoding = ThreadPoolExecutor(PROCESSES)  # not the threads that all requests share
        self.busy = asyncio.Lock()  # pictures are embedded one at a time

    def static(self, name: str, room: str = "nofuss.search") -> Any:
        """Return a handler for a file of a room of the package."""
        content = files(room).joinpath(name).read_bytes()
        media = MEDIA[Path(name).suffix]

        async def handler(request: Request) -> Response:
            return Response(content, media_type=f"{media}; charset=utf-8")

        return handler

    def close(self) -> None:
        """End the processes that decode."""
        self.decoding.shutdown(wait=False, cancel_futures=True)
        self.pool.close()

    async def about(self, request: Request) -> Response:
        """Return what the page says at its top, and the classes of its filter."""
        shelf = self.shelf
        about, size = await run_in_threadpool(lambda: (shelf.index.about, shelf.size))
        return Json(
            {
                "run": printable(shelf.run.path.absolute().name),
                "title": shelf.title,
                "scores": shelf.scores,
                "taught": shelf.taught,
                "items": size,
                "columns": {name: kind for name, kind in about.types.items() if name != LABEL},
                "own_index": isinstance(shelf.index, FolderIndex),
                "classes": shelf.classes,
                "dim": about.dim,
                "pictures": shelf.pictures is not None,
                "threshold": shelf.threshold,
                "formats": FORMATS,
                "max_upload": MAX_UPLOAD,
                "most": MOST,
            }
        )

    async def item(self, request: Request) -> Response:
        """Return the name, label and columns of an item."""
        key = request.path_params["key"]
        return Json(await run_in_threadpool(lambda: self.describe(self.by_key(key))))

    async def some(self, request: Request) -> Response:
        """Return random items to start from, and the classes that the filter leaves."""
        _, only, where = await read_options(request, self.shelf)
        items = await run_in_threadpool(self._some, only, where)
        return Json({"results": items, "classes": only})

    def _some(self, only: list[int] | None, where: Condition | None) -> list[dict[str, Any]]:
        index, seed = self.shelf.index, secrets.randbits(32)
        if only is None and where is None:
            return self.describe_all(index.sample(SOME, seed=seed))
        [query] = self.shelf.vectors_of(index.sample(1, seed=seed))  # near any item will do
        found = self.shelf.search(query, SOME, only=only, where=where)
        return self.describe_all([hit.name for hit in found.hits])

    async def neighbours(self, request: Request) -> Response:
        """Return the neighbours of an item of the index, or of a vector of `upload`."""
        options, shelf = request.query_params, self.shelf
        name, asked = None, dict[str, Any]()
        if "vector" in options:
            query = self.sent(options["vector"]).vector
        else:
            key = options.get("like", options.get("item", ""))
            name = await run_in_threadpool(self.by_key, key)
            asked = await run_in_threadpool(self.describe, name)
            [query] = await run_in_threadpool(shelf.vectors_of, [name])
        k, only, where = await read_options(request, self.shelf)
        found = await run_in_threadpool(
            shelf.search, query, k, only=only, where=where, without=name
        )
        return Json(await self._answer(found, only) | {"query": asked})

    async def upload(self, request: Request) -> Response:
        """Return the neighbours of the picture in the body."""
        if self.shelf.pictures is None:
            raise Refused(
                400, "this run embeds vectors, not pictures; search from one of its items"
            )
        k, only, where = await read_options(request, self.shelf)
        body = bytearray()
        try:
            await self._read(request, body)
            began = time.perf_counter()
            fit = self.shelf.encoder.preprocessing
            seen = await while_there(request, self._decode(body, fit))
        finally:
            self.held -= len(body)
        async with self.busy:
            query = await run_in_threadpool(self._embed, seen)
        spent = 1000 * (time.perf_counter() - began)
        picture = data_uri(seen.content, seen.media)
        found = await run_in_threadpool(self.shelf.search, query, k, only=only, where=where)
        answer = await self._answer(found, only)
        about = {"picture": picture, "vector": Sent.new(query).as_text(self.shelf.model)}
        return Json(answer | {"query": about, "embedding_ms": spent})

    async def map(self, request: Request) -> Response:
        """Return the map; the first call takes some seconds."""
        return Json(await run_in_threadpool(lambda: self.shelf.map))

    async def picture(self, request: Request) -> Response:
        """Return an item's picture by its key; pictures are never named in any other way."""
        key = request.path_params["key"]
        image = await run_in_threadpool(lambda: self.shelf.picture(self.by_key(key)))
        try:
            if isinstance(image, Path):
                _, content, media = await while_there(request, self._decode(image))
            elif image is not None:
                content, media = await run_in_threadpool(encoded, image)
        except (PictureError, OSError):
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

    async def _decode(self, source: Path | bytearray, fit: Preprocessing | None = None) -> Decoded:
        def work() -> Decoded:
            content = read_item(source, limit=MAX_FILE) if isinstance(source, Path) else source
            return self.pool.decode(content, side=SIDE, fit=fit)

        # Cancelled while it waits for a thread, it is never begun.
        return await asyncio.get_running_loop().run_in_executor(self.decoding, work)

    def _embed(self, seen: Decoded) -> Tensor:
        with torch.inference_mode():
            return self.shelf.encoder.embed([seen.pixels])[0].clone()

    async def _answer(self, found: Answer, only: list[int] | None) -> dict[str, Any]:
        names = [hit.name for hit in found.hits]
        types = await run_in_threadpool(lambda: self.shelf.index.about.types)
        results = [
            _described(hit, types) | {"rank": rank, "distance": round(hit.distance, 4)}
            for rank, hit in enumerate(found.hits, 1)
        ]
        answer = {
            "results": results,
            "searching_ms": found.milliseconds,
            "items": await run_in_threadpool(lambda: self.shelf.size),
            "match": found.match,
            "sentence": found.sentence,
            "likely": asdict(found.likely) if found.likely and only is None else None,
            "classes": only,
            "place": None,
        }
        if self.shelf.drawn:
            vectors = await run_in_threadpool(self.shelf.vectors_of, names)
            query = found.vector[None]
            places = await run_in_threadpool(self.shelf.place, torch.cat([query, vectors]))
            answer["place"] = places[0].tolist()
            if len(vectors) == len(results):  # none has left the index a moment ago
                for result, place in zip(results, places[1:], strict=True):
                    result["place"] = place.tolist()
        return answer

    def describe(self, name: str) -> dict[str, Any]:
        """Return what the page shows of an item."""
        for described in self.describe_all([name]):
            return described
        raise self._no_item()

    def describe_all(self, names: Sequence[str]) -> list[dict[str, Any]]:
        """Return the keys, names, labels and columns of those items that are there."""
        types = self.shelf.index.about.types
        return [_described(item, types) for item in self.shelf.index.get(names)]

    def by_key(self, key: Any) -> str:
        """Return the name of the item with a key."""
        name = self.shelf.index.find(key) if isinstance(key, str) else None
        if name is None:
            raise self._no_item()
        return name

    def sent(self, text: str) -> Sent:
        """Return the uploaded picture of an address."""
        try:
            return Sent.from_text(text, model=self.shelf.model, dim=self.shelf.encoder.dim)
        except ValueError:
            raise Refused(
                400, "this address was made by another model; send the picture again"
            ) from None

    def _no_item(self) -> Refused:
        return Refused(404, "this item is not in the index; search from another one")


def _described(item: Item | Hit, types: Mapping[str, Type]) -> dict[str, Any]:
    key = key_of(item.name)
    columns = {n: shown(value, types.get(n, "text")) for n, value in item.columns.items()}
    # No path of this disk.
    name = printable("/".join(item.name.replace("\\", "/").split("/")[-2:]))
    return {"item": key, "key": key, "name": name, "label": item.label, "columns": columns}
