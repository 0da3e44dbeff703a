"""Teach the model on the page: marks of results, learning from them, undoing it.

Marks are kept at once (run/marks.py). A lesson turns all marks in force into a map of embeddings
(model/taught.py), which the index puts in force (model/manifest.py), and says what it did to the
classes without a mark: whether it helps elsewhere is not for the marked items to say.
"""

import asyncio
import os
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from torch import Tensor

from nofuss.errors import NofussError
from nofuss.evaluate.intervals import paired_difference
from nofuss.evaluate.protocol import per_query, scorable
from nofuss.files import locked
from nofuss.model.manifest import read_manifest
from nofuss.model.taught import MarkedPairs, taught_map
from nofuss.ranking.neighbours import nearest
from nofuss.run.marks import PICTURE, Marks, append_marks, read_marks
from nofuss.run.proxies import sample_by_class
from nofuss.search.folder import FolderIndex
from nofuss.search.handlers import Page
from nofuss.search.index import key_of
from nofuss.search.json_response import Json
from nofuss.search.refusals import Refused
from nofuss.search.search import calibrated
from nofuss.search.sent import Sent
from nofuss.search.shelf import Shelf

MOST_PAIRS = 2000
"""Pairs to learn from, the last ones: a lesson takes seconds."""
MOST_AT_ONCE = 500
SCORED = 5000
"""Items of classes without a mark that a lesson is scored on."""
SAMPLE = 1000


@dataclass(frozen=True)
class Lesson:
    """What a lesson is about to change."""

    matrix: Tensor
    """Of embeddings by the model as it was trained, (D, D)."""
    pairs: int
    marks: int
    marked_rows: list[int]


class Teaching:
    """The handlers of marks and lessons."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.busy = asyncio.Lock()  # one lesson or mark at a time

    @property
    def run(self) -> Path:
        """The run directory."""
        return self.page.shelf.run.path

    async def marks(self, request: Request) -> Response:
        """Return the marks of a query, by key, and how many there are in all."""
        query = self._query(request.query_params)
        return Json(await run_in_threadpool(_on_disk, lambda: self._state(query)))

    async def mark(self, request: Request) -> Response:
        """Keep marks: {query: {like} or {vector}, marks: [{item, same: true, false or null}]}."""
        content = await self.page.content(request)
        query, given = self._query(content.get("query")), content.get("marks")
        if not isinstance(given, list) or not 0 < len(given) <= MOST_AT_ONCE:
            raise Refused(400, f"expected a list of 1 to {MOST_AT_ONCE} marks")
        marks = []
        for mark in given:
            same = mark.get("same", "") if isinstance(mark, dict) else ""
            if same is not None and not isinstance(same, bool):
                raise Refused(400, "a mark is an item and same: true, false or null")
            name = self._own_item(mark.get("item"))
            if name == query:
                raise Refused(400, "an item is the same as itself")
            marks.append((name, same))
        async with self.busy:
            await run_in_threadpool(_on_disk, lambda: append_marks(self.run, query, marks))
        return Json(await run_in_threadpool(_on_disk, lambda: self._state(query)))

    async def as_csv(self, request: Request) -> Response:
        """Return all marks as a table; names are relative to the folder of all items."""
        marks = await run_in_threadpool(_on_disk, lambda: read_marks(self.run))
        names = self.page.shelf.own.names
        home = os.path.commonpath(names) if all(map(os.path.isabs, names)) else ""
        short = {name: os.path.relpath(name, home) if home else name for name in names}
        headers = {"Content-Disposition": 'attachment; filename="marks.csv"'}
        return Response(marks.as_csv(short), media_type="text/csv; charset=utf-8", headers=headers)

    async def learn(self, request: Request) -> Response:
        """Learn from all marks: {query} → what it did to the classes without a mark."""
        content = await self.page.content(request)
        sent = self._sent(content.get("query"))
        async with self.busy:
            began = time.perf_counter()
            answer = await run_in_threadpool(_on_disk, lambda: self._learn(sent))
        return Json(answer | {"seconds": time.perf_counter() - began})

    async def undo(self, request: Request) -> Response:
        """Return to the model before the last lesson."""
        content = await self.page.content(request)
        sent = self._sent(content.get("query"))
        async with self.busy:
            return Json(await run_in_threadpool(_on_disk, lambda: self._undo(sent)))

    # ---- what is asked for

    def _sent(self, query: Any) -> Sent | None:
        """Return the uploaded picture that a query is about, if it is."""
        text = query.get("vector") if isinstance(query, dict) else None
        return self.page.sent(text) if isinstance(text, str) else None

    def _query(self, query: Any) -> str:
        """Return what marks call the query: the item's name, or that of an uploaded picture."""
        if not hasattr(query, "get"):
            raise Refused(400, "expected a query: like or vector")
        if (text := query.get("vector")) is not None:
            return PICTURE + self.page.sent(str(text)).name
        return self._own_item(query.get("like"))

    def _own_item(self, key: Any) -> str:
        """Return the name of an item of the run's own index."""
        _ = self.page.shelf.own
        return self.page.by_key(key)

    def _state(self, query: str) -> dict[str, Any]:
        marks, shelf = read_marks(self.run), self.page.shelf
        given = marks.by_query.get(query, {}).items()
        known = {key_of(name): same for name, same in given if name in shelf.own}
        return {"marks": known, "count": len(marks), "lessons": len(shelf.own.manifest.history)}

    # ---- lessons

    def _learn(self, sent: Sent | None) -> dict[str, Any]:
        with locked(self.run):
            before = self._current()
            marks = read_marks(self.run)
            lesson = plan_lesson(self.page.shelf, marks)
            history = (*before.manifest.history, before.manifest.feedback)
            after = self._put(before, lesson.matrix, marks.lines, history)
        scores = _compared(self.page.shelf, before, after, lesson)
        self.page.shelf = self.page.shelf.of(after)
        about = {"pairs": lesson.pairs, "marks": lesson.marks, "scores": scores}
        return about | self._sent_again(sent)

    def _undo(self, sent: Sent | None) -> dict[str, Any]:
        with locked(self.run):
            before = self._current()
            if not before.manifest.history:
                raise Refused(409, "there is no lesson to undo")
            *history, count = before.manifest.history
            matrix = None
            if count:
                matrix = plan_lesson(self.page.shelf, read_marks(self.run, count)).matrix
            after = self._put(before, matrix, count, tuple(history))
        self.page.shelf = self.page.shelf.of(after)
        return self._sent_again(sent)

    def _put(
        self, before: FolderIndex, matrix: Tensor | None, marks: int, history: tuple[int, ...]
    ) -> FolderIndex:
        after = before.with_map(matrix)
        after.manifest = replace(before.manifest, feedback=marks, history=history)
        after.commit(calibrated(after, self.page.shelf.encoder))
        return after

    def _current(self) -> FolderIndex:
        """Return the index that the page shows; refused if another command has changed it."""
        own = self.page.shelf.own
        now = read_manifest(self.page.shelf.run.index, self.page.shelf.model)
        if now is None or now.version != own.manifest.version:
            raise Refused(409, "another command has changed this model; start nofuss serve again")
        return own

    def _sent_again(self, sent: Sent | None) -> dict[str, Any]:
        """Return the uploaded picture's address, which stays the same."""
        return {} if sent is None else {"vector": sent.as_text(self.page.shelf.model)}


def plan_lesson(shelf: Shelf, marks: Marks) -> Lesson:
    """Return the map that the marks teach."""
    index = shelf.own
    usable = [p for p in marks.pairs() if p[0] in index and p[1] in index][-MOST_PAIRS:]
    if not usable:
        raise Refused(
            400, "there is nothing to learn yet: mark one result, or two for an uploaded picture"
        )
    base = index.base
    rows = {name: row for row, name in enumerate(index.names)}
    first = torch.tensor([rows[a] for a, _, _ in usable])
    second = torch.tensor([rows[b] for _, b, _ in usable])
    pairs = MarkedPairs(first, second, torch.tensor([same for _, _, same in usable]))
    near, far = usual_distances(base)
    matrix = taught_map(base, pairs, near=near, far=far)
    marked = sorted({*first.tolist(), *second.tolist()})
    return Lesson(matrix, len(usable), len(marks), marked)


def usual_distances(vectors: Tensor) -> tuple[float, float]:
    """Return the median distance of nearest neighbours, and of any two items."""
    random = np.random.default_rng(0)
    some = vectors[torch.from_numpy(random.permutation(len(vectors))[:SAMPLE])]
    closest = nearest(some, vectors, 2)[0][:, -1]
    others = (some - some.roll(1, 0)).norm(dim=1)
    near = max(float(closest.median()), 1e-3)  # 0 where every item has a copy
    return near, max(float(others.median()), near)


def _compared(
    shelf: Shelf, old: FolderIndex, new: FolderIndex, lesson: Lesson
) -> dict[str, Any] | None:
    """Return Recall@1 and MAP@R before and after on the classes without a mark, paired."""
    marked = np.unique(shelf.codes[lesson.marked_rows])
    rows = np.flatnonzero((shelf.codes >= 0) & ~np.isin(shelf.codes, marked))
    rows = rows[sample_by_class(shelf.codes[rows], items=SCORED)]
    labels = shelf.codes[rows]
    if not len(rows) or not scorable(labels):
        return None
    before, after = (per_query(index.vectors[rows], labels) for index in (old, new))
    gain = paired_difference(after.map_at_r, before.map_at_r, torch.as_tensor(before.labels))
    return {
        "classes": len(np.unique(labels)),
        "items": len(rows),
        "recall@1": [float(s.recall1.mean()) for s in (before, after)],
        "map@r": [float(s.map_at_r.mean()) for s in (before, after)],
        "gain": [float(gain.mean), float(gain.low), float(gain.high)],
    }


def _on_disk(action: Any) -> Any:
    """Call what reads or writes files of the run; answer with one line where it can't."""
    try:
        return action()
    except NofussError as error:
        raise Refused(409, str(error)) from None
    except OSError as error:
        reason = error.strerror or error
        raise Refused(507, f"files of the run can't be used ({reason}); nothing changed") from None
