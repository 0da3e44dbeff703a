"""The page's requests: what it shows, searches and pictures. labels.py has those that change it.

    GET  /                     the page; its scripts and styles
    GET  /api/about            run, scores, number of items, classes
    GET  /api/some             random items to start from
    GET  /api/search           neighbours of item=KEY, or of vector=… of an address
    POST /api/search           neighbours of the picture in the body; class=, where=: only these
    GET  /api/map              items and proxies on a plane; the first takes some seconds
    GET  /pictures/KEY         an item's picture, small, encoded again

A handler reads the page's state once. An upload is the raw body, limited in size, and decoded in a
process with limits; nothing is stored. Whatever fails is one line of JSON.
"""

import asyncio
import base64
import logging
import re
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import anyio
import torch
from anyio.to_thread import run_sync
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from nofuss.config import Preprocessing
from nofuss.data.collection import printable
from nofuss.data.columns import Type, shown
from nofuss.data.decode import MAX_FILE, PictureError, data_uri, encoded
from nofuss.data.decode_pool import PROCESSES, Decoded, DecodePool
from nofuss.data.items import read_item
from nofuss.errors import EngineError, NofussError
from nofuss.files import digest, parse_json
from nofuss.geometry import normalize
from nofuss.model.encoder import Encoded, Encoder
from nofuss.search.feedback import PICTURE
from nofuss.search.filter import LABEL, Compare, Condition, FilterError, Join, parse_filter
from nofuss.search.folder import FolderIndex
from nofuss.search.index import Item, key_of
from nofuss.search.page.guard import CLOSE, Json
from nofuss.search.page.state import SIDE, State
from nofuss.search.search import Hit
from nofuss.search.verdict import Query, queries_of

log = logging.getLogger("nofuss")
MAX_UPLOAD, MAX_CONTENT = 24 * 2**20, 64 * 2**10
"""Most bytes of an uploaded picture and of a JSON object; more are not read."""
MAX_UPLOADS = 8 * MAX_UPLOAD
"""Most bytes of all bodies in memory; further ones are asked to be sent again."""
PATIENCE = 30.0
"""Seconds for a whole body."""
SEARCHES, SEARCH_SECONDS = 4, 9.0
"""Threads that search, and how long a database may take: one that hangs costs no others."""
SOME = 12
"""Items to start from."""
MOST = 500
"""Most neighbours of one search."""
_ADDRESS = re.compile(r"([0-9a-f]{16})\.([A-Za-z0-9_-]+)\.([0-9]{0,4})")
_Result = TypeVar("_Result")
Asked = Mapping[str, str]
"""The options of an address."""
Handler = Callable[[Request], Awaitable[Response]]

_here = Path(__file__).parent
FILES = [
    Route("/look.css", lambda _: FileResponse(_here.parents[1] / "report" / "look.css")),
    Mount("/", StaticFiles(directory=_here / "static", html=True)),
]


class Page:
    """The state of the page, which is replaced as a whole, and who works for it."""

    def __init__(self, state: State) -> None:
        self.state = state
        self.writing = asyncio.Lock()  # held by who makes the next state
        self.held = 0  # bytes of bodies in memory
        self.pool = DecodePool()
        self.decoding = anyio.CapacityLimiter(PROCESSES)
        self.embedding = anyio.CapacityLimiter(1)  # one picture at a time takes all processors
        self.searching = anyio.CapacityLimiter(SEARCHES)
        self.studying = anyio.CapacityLimiter(1)  # who waits finds what the first has made

    def routes(self) -> list[Route]:
        """Return the requests that change nothing."""
        return [
            Route("/api/about", self._reads(about)),
            Route("/api/some", self._reads(some)),
            Route("/api/search", self._reads(neighbours), methods=["GET"]),
            Route("/api/search", self.upload, methods=["POST"]),
            Route("/api/map", self.studies(lambda state: state.map)),
            Route("/pictures/{key}", self.picture),
        ]

    def _reads(self, answer: Callable[[State, Asked], dict[str, Any]]) -> Handler:
        """Return a handler that answers what a function says of the state."""

        async def handler(request: Request) -> Response:
            state, asked = self.state, request.query_params
            return Json(await self.ask(state, lambda: answer(state, asked)))

        return handler

    def studies(self, answer: Callable[[State], dict[str, Any]]) -> Handler:
        """Return a handler that answers what takes seconds, for one after the other."""

        async def handler(_: Request) -> Response:
            return Json(await run_sync(answer, self.state, limiter=self.studying))

        return handler

    async def upload(self, request: Request) -> Response:
        """Return the neighbours of the picture in the body."""
        state = self.state
        if not (fits := state.encoder.preprocessing):
            words = "this run embeds vectors, not pictures; search from one of its items"
            raise HTTPException(400, words)
        options = await self.ask(state, lambda: read_options(request.query_params, state))
        async with self.body(request, MAX_UPLOAD) as body:
            began = time.perf_counter()
            seen = await self._decode(request, body, fits)
        encoded = await run_sync(_embed, state, seen, limiter=self.embedding)
        [embedded] = await self.ask(state, lambda: queries_of(state.index, encoded))
        address = address_of(embedded, state.encoder)
        spent = 1000 * (time.perf_counter() - began)
        query = query_of(address, state.encoder)  # as opened again
        found = await self.ask(state, lambda: _answer(state, query, options, name_of(address)))
        sent = {"picture": data_uri(seen.content, seen.media), "vector": address}
        return Json(found | {"query": sent, "embedding_ms": spent})

    async def picture(self, request: Request) -> Response:
        """Return an item's picture by its key; pictures are never named in any other way."""
        state, key = self.state, request.path_params["key"]
        image = await self.ask(state, lambda: state.picture(by_key(state, key)))
        try:
            if isinstance(image, Path):
                _, content, media = await self._decode(request, image)
            elif image is not None:
                content, media = await run_sync(encoded, image)
        except (PictureError, OSError):
            image = None
        if image is None:
            raise HTTPException(404, "no picture of this item")
        return Response(content, media_type=media, headers={"Content-Disposition": "inline"})

    # ---- who works for it

    async def ask(self, state: State, work: Callable[[], _Result]) -> _Result:
        """Return what work on the index gives; a database that does not answer is given up."""
        seconds = None if state.url is None else SEARCH_SECONDS
        try:
            with anyio.fail_after(seconds):
                return await run_sync(work, limiter=self.searching, abandon_on_cancel=True)
        except TimeoutError:
            raise EngineError(f"no answer within {SEARCH_SECONDS:.0f} s") from None

    async def content(self, request: Request) -> dict[str, Any]:
        """Return the JSON object in the body."""
        if request.headers.get("content-type") != "application/json":
            raise HTTPException(415, "expected application/json")
        async with self.body(request, MAX_CONTENT) as body:
            try:
                content = parse_json(bytes(body))
            except ValueError:
                content = None
        if not isinstance(content, dict):
            raise HTTPException(400, "the body is not a JSON object")
        return content

    @asynccontextmanager
    async def body(self, request: Request, limit: int) -> AsyncIterator[bytearray]:
        """Yield the whole body; refuse it as soon as it is too large or too slow."""
        size = f"{limit // 2**20} MB" if limit >= 2**20 else f"{limit // 1024} KB"
        too_large = HTTPException(413, f"what was sent is over {size}; send a smaller one")
        announced, body = request.headers.get("content-length", "0"), bytearray()
        if not announced.isdecimal() or int(announced) > limit:
            raise too_large
        try:
            with anyio.move_on_after(PATIENCE) as reading:
                async for chunk in request.stream():
                    body += chunk
                    self.held += len(chunk)
                    if len(body) > limit:
                        raise too_large
                    if self.held > MAX_UPLOADS:
                        raise HTTPException(503, "too many pictures at once; send it again")
            if reading.cancelled_caught:
                raise HTTPException(408, "the body took too long to arrive; send it again")
            if not body:
                raise HTTPException(400, "the body is empty; send it again")
            yield body
        finally:
            self.held -= len(body)

    async def _decode(
        self, request: Request, source: Path | bytearray, fits: Sequence[Preprocessing] = ()
    ) -> Decoded:
        def work() -> Decoded:
            content = read_item(source, limit=MAX_FILE) if isinstance(source, Path) else source
            return self.pool.decode(content, side=SIDE, fits=fits)

        async with self.decoding:
            if await request.is_disconnected():  # while it waited for others
                raise HTTPException(400, "nobody waits for this picture any more")
            return await run_sync(work)


def _embed(state: State, seen: Decoded) -> Encoded:
    with torch.inference_mode():
        return state.encoder.encode([seen.pixels])


# ---- what is asked for


class Options(NamedTuple):
    """What a search asks for besides its query."""

    k: int
    only: list[int] | None
    """Codes of classes."""
    where: Condition | None
    """What items must pass, with the classes."""


def read_options(asked: Asked, state: State) -> Options:
    """Return what an address asks for, or refuse it."""
    k, words, text = asked.get("k", "24"), asked.get("class", ""), asked.get("where", "")
    if not (k.isascii() and k.isdigit() and len(k) < 4 and 1 <= int(k) <= MOST):
        raise HTTPException(400, f"k must be a whole number from 1 to {MOST}")
    parts, only = list[Condition](), None
    if words.strip():
        only = state.base.matching(words)
        if not only and state.url is None:
            words = printable(words[:80])
            raise HTTPException(400, f"there is no class like “{words}”; try a part")
        # A database may have classes that its sample has not.
        names = [state.base.classes[code] for code in only] or [words.strip()]
        parts.append(Compare(LABEL, "in", tuple(names)))
    if text.strip():
        try:
            parts.append(parse_filter(text, state.index.about.types))
        except FilterError as error:
            raise HTTPException(400, f"the filter can't be read: {error}") from None
    return Options(int(k), only or None, Join(True, tuple(parts)) if parts else None)


def by_key(state: State, key: Any) -> str:
    """Return the name of the item with a key."""
    name = state.index.find(key) if isinstance(key, str) else None
    if name is None:
        raise HTTPException(404, "this item is not in the index; search from another one")
    return name


def read_query(asked: Mapping[str, Any], state: State) -> tuple[Query, str]:
    """Return what is searched for, and what feedback calls it."""
    if (address := asked.get("vector")) is not None:
        return query_of(str(address), state.encoder), name_of(str(address))
    name = by_key(state, asked.get("item"))
    [vector] = state.base.vectors_of([name])
    return Query(vector), name


def address_of(query: Query, encoder: Encoder) -> str:
    """Return what is searched for as text, as a picture is not kept.

    MODEL.VECTOR.FAR: the vector in half precision, and how far it is in thousandths.
    """
    text = base64.urlsafe_b64encode(query.vector.half().numpy().tobytes()).decode()
    far = "" if query.far is None else f"{1000 * max(0.0, query.far):.0f}"
    return f"{encoder.digest[:16]}.{text.rstrip('=')}.{far}"


def query_of(address: str, encoder: Encoder) -> Query:
    """Return what is searched for by an address, which anybody may have written."""
    found = _ADDRESS.fullmatch(address)
    if found is not None and found[1] == encoder.digest[:16]:
        content = base64.urlsafe_b64decode(found[2] + "=" * (-len(found[2]) % 4))
        if len(content) == 2 * encoder.dim:
            vector = torch.frombuffer(bytearray(content), dtype=torch.float16).float()
            if vector.isfinite().all() and vector.norm() > 0:
                far = int(found[3]) / 1000 if found[3] else None
                return Query(normalize(vector[None])[0], far)
    raise HTTPException(400, "this address was made by another model; send the picture again")


def name_of(address: str) -> str:
    """Return what feedback calls a picture that somebody sent, whatever it is compared with."""
    return PICTURE + digest(address.rpartition(".")[0].encode())[:16]


# ---- what is answered


def about(state: State, asked: Asked) -> dict[str, Any]:
    """Return what the page says at its top, and the classes of its filter."""
    index = state.index
    learned = index.manifest.feedback if isinstance(index, FolderIndex) else 0
    return {
        "version": state.version,
        "run": printable(state.run.path.absolute().name),
        "title": state.title,
        "scores": state.scores,
        "learned": len(state.feedback.first(learned).marks),
        "items": index.count(),
        "columns": {name: kind for name, kind in index.about.types.items() if name != LABEL},
        "own_index": isinstance(index, FolderIndex),
        "classes": state.base.classes,
        "pictures": bool(state.encoder.preprocessing),
        "max_upload": MAX_UPLOAD,
        "most": MOST,
    }


def some(state: State, asked: Asked) -> dict[str, Any]:
    """Return random items to start from, and the classes that the filter leaves."""
    _, only, where = read_options(asked, state)
    names = state.index.sample(1 if where else SOME, seed=secrets.randbits(32))
    if where and names:
        [vector] = state.base.vectors_of(names)  # near any item will do
        names = [hit.name for hit in state.search(Query(vector), SOME, where).hits]
    return {"results": described(state, names), "classes": only}


def neighbours(state: State, asked: Asked) -> dict[str, Any]:
    """Return the neighbours of an item of the index, or of a picture that was sent before."""
    options, (query, name) = read_options(asked, state), read_query(asked, state)
    [shown] = described(state, [name]) or [{}]
    return _answer(state, query, options, name) | {"query": shown}


def _answer(state: State, query: Query, options: Options, name: str) -> dict[str, Any]:
    """Search; name: what feedback calls the query, which does not find itself."""
    found = state.search(query, options.k, options.where, without=name)
    types = state.index.about.types
    results = [
        _described(hit, types) | {"rank": rank, "distance": round(hit.distance, 4)}
        for rank, hit in enumerate(found.hits, 1)
    ]
    place = None
    if state.base.is_drawn:
        vectors = state.base.vectors_of([hit.name for hit in found.hits])
        place, *places = state.base.plane.place(torch.cat([found.vector[None], vectors])).tolist()
        if len(places) == len(results):  # none has left the index a moment ago
            results = [each | {"place": at} for each, at in zip(results, places, strict=True)]
    return {
        "version": state.version,
        "results": results,
        "searching_ms": found.milliseconds,
        "match": found.match,
        "sentence": found.sentence,
        "open_set": found.numbers,
        "likely": asdict(found.likely) if found.likely and options.only is None else None,
        "classes": options.only,
        "place": place,
        "feedback": feedback_on(state, name),
    }


def feedback_on(state: State, query: str) -> dict[str, Any] | None:
    """Return the marks of a query, how many there are in all, and how often one can undo."""
    if not isinstance(state.stored, FolderIndex):
        return None
    stored, marks = state.stored, state.feedback.marks
    pairs = (({*pair} - {query}, same) for pair, same in marks.items() if query in pair)
    return {
        "said": {key_of(item): same for two, same in pairs for item in two if item in stored},
        "count": len(marks),
        "history": len(stored.manifest.history),
    }


def described(state: State, names: Sequence[str]) -> list[dict[str, Any]]:
    """Return the keys, names, labels and columns of those items that are there."""
    types = state.index.about.types
    return [_described(item, types) for item in state.index.get(names)]


def _described(item: Item | Hit, types: Mapping[str, Type]) -> dict[str, Any]:
    columns = {n: shown(value, types.get(n, "text")) for n, value in item.columns.items()}
    # No path of this disk.
    name = printable("/".join(item.name.replace("\\", "/").split("/")[-2:]))
    return {"item": key_of(item.name), "name": name, "label": item.label, "columns": columns}


# ---- what is refused

_PICTURES = {
    "not a picture": "this is not a picture of a known format; send {formats}",
    "oversized": "the picture has too many pixels ({detail}); send a smaller one",
    "truncated": "the picture is cut off; send the whole file",
    "too narrow": "the picture is nearly a line ({detail}); send a part of it",
    "out of memory": "the picture takes too much memory to decode; send a smaller one",
    "too slow": "the picture takes too long to decode ({detail}); save it again",
}


async def refuse(request: Request, error: Exception) -> Response:
    """Answer with a status and one line of JSON, whatever the error is."""
    headers: Mapping[str, str] | None = None
    match error:
        case HTTPException():
            status, message, headers = error.status_code, error.detail, error.headers
        case PictureError():
            status = 415 if error.reason == "not a picture" else 422
            words = _PICTURES.get(error.reason, "the picture can't be read; send {formats}")
            formats = "JPEG, PNG, WebP, BMP, GIF, TIFF or AVIF"
            message = words.format(detail=error.detail, formats=formats)
        case EngineError():  # why, which may name machines, is for the terminal only
            log.error(f"{request.url.path} failed: {error}")
            status, message = 503, "the database does not answer; try again later"
        case NofussError():
            status, message = 409, str(error)
        case OSError():
            reason = error.strerror or error
            status, message = 507, f"files of the run can't be used ({reason})"
        case _:
            status, message = 500, "the server failed; its terminal says how"
    # Close: the unread rest of a body must not be taken for the next request.
    return Json({"error": message}, status, {**(headers or {}), **CLOSE})


KINDS = (HTTPException, PictureError, NofussError, OSError, Exception)
REFUSALS = dict.fromkeys(KINDS, refuse)
