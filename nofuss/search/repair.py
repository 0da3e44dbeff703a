"""Doubtful labels on the page: shown with their evidence, judged by a click, kept as a CSV.

The rule is that of the report and of `nofuss doctor`, applied to the items that the page shows.
Judgements go to RUN/corrections.csv (data/corrections.py), which `nofuss train --corrections`
applies; neither the data nor the index change here.
"""

import asyncio
from collections import Counter
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from nofuss.data.corrections import FILE, Correction, read_corrections, write_corrections
from nofuss.errors import DataError, RunError
from nofuss.evaluate.findings import copies, doubtful_labels
from nofuss.files import locked
from nofuss.ranking.neighbours import neighbours
from nofuss.search.handlers import Page
from nofuss.search.index import key_of
from nofuss.search.json_response import Json
from nofuss.search.refusals import Refused
from nofuss.search.shelf import Shelf

WITHIN = 0.02
"""Distance up to which two items with different labels are shown as copies: people look at them."""

MOST_QUERIES, FEWEST_QUERIES, COMPARED = 5000, 200, 10**9
"""Items that are compared with all others: all of a small index, some of a large one, since the
page must not keep the processor busy for minutes."""


class Repair:
    """The handlers of doubtful labels."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.file = page.shelf.run.path / FILE
        self.writing = asyncio.Lock()  # of the CSV, by this process
        self._looking = Lock()

    @property
    def shelf(self) -> Shelf:
        """What the page shows now: a lesson replaces it."""
        return self.page.shelf

    async def suspects(self, request: Request) -> Response:
        """Return the doubtful labels, the clearest first; the first call may take seconds."""
        found = await run_in_threadpool(self._look)
        judged = await run_in_threadpool(lambda: self._fresh(self._read()))
        names = {key_of(name): name for name in self.shelf.own.names}
        said = [s | self._judgement(names[s["key"]], judged) for s in found]
        return Json({"suspects": said})

    async def judge(self, request: Request) -> Response:
        """Keep what somebody says of a label: {item: key, label: the right one, or null}."""
        content, own = await self.page.content(request), self.shelf.own
        name, label = self.page.by_key(content.get("item")), content.get("label")
        if label is not None and label not in self.shelf.classes:
            raise Refused(400, "no such class; choose one of the list")
        [item] = own.get([name])
        if item.label is None:
            raise Refused(400, "this item has no label that could be wrong")
        async with self.writing:
            judged = await run_in_threadpool(self._write, name, item.label, label)
            fresh = await run_in_threadpool(self._fresh, judged)
        return Json(self._judgement(name, fresh) | {"count": len(judged)})

    def _look(self) -> list[dict[str, Any]]:
        with self._looking:
            return self._suspects

    @cached_property
    def _suspects(self) -> list[dict[str, Any]]:
        rows = np.flatnonzero(self.shelf.codes >= 0)
        if len(rows) < 3:
            return []
        _, labels = np.unique(self.shelf.codes[rows], return_inverse=True)
        queries = min(MOST_QUERIES, max(FEWEST_QUERIES, COMPARED // len(rows)))
        nearest = neighbours(self.shelf.own.vectors[rows].numpy(), queries=queries)
        position = {int(query): i for i, query in enumerate(nearest.queries)}
        found = [
            self._described(
                "label", rows[d.item], rows[nearest.items[position[d.item], : d.places]]
            )
            for d in doubtful_labels(nearest, labels)
        ]
        conflicts = [
            c for c in copies(nearest, within=WITHIN) if labels[c.first] != labels[c.second]
        ]
        return found + [self._described("copy", rows[c.first], rows[[c.second]]) for c in conflicts]

    def _described(self, kind: str, row: int, evidence: NDArray[np.int64]) -> dict[str, Any]:
        """Return a suspect with the neighbours that speak against its label."""
        names = self.shelf.own.names
        near = [self.page.describe(names[other]) for other in evidence]
        suggested, votes = Counter(other["label"] for other in near).most_common(1)[0]
        about = {"kind": kind, "suggested": suggested, "votes": votes, "neighbours": near}
        return self.page.describe(names[row]) | about

    def _judgement(self, name: str, judged: dict[str, Correction]) -> dict[str, Any]:
        said = judged.get(name)
        return {"judged": None if said is None else said.corrected}

    def _read(self) -> dict[str, Correction]:
        """Return item → correction, with those that the run was trained with: they add up."""
        return self._learned() | _corrections(self.file)

    def _learned(self) -> dict[str, Correction]:
        """Return the corrections that the run was trained with."""
        file = self.shelf.run.corrections
        return {} if file is None else _corrections(file)

    def _fresh(self, judged: dict[str, Correction]) -> dict[str, Correction]:
        """Return what was said since training."""
        learned = self._learned()
        return {item: said for item, said in judged.items() if said != learned.get(item)}

    def _write(self, name: str, was: str, label: str | None) -> dict[str, Correction]:
        """Replace the file with one that has this judgement, or without it."""
        try:
            with locked(self.shelf.run.path):
                judged, learned = self._read(), self._learned()
                if label is not None:  # the data say what was corrected before training
                    before = learned[name].label if name in learned else was
                    judged[name] = Correction(name, before, label)
                elif name in learned:
                    judged[name] = learned[name]
                else:
                    judged.pop(name, None)
                write_corrections(self.file, list(judged.values()))
        except RunError as error:
            raise Refused(409, str(error)) from None
        except OSError as error:
            raise Refused(507, f"can't write {FILE} ({error.strerror}); nothing changed") from None
        return judged


def _corrections(file: Path) -> dict[str, Correction]:
    """Return what a CSV says, item → correction; nothing where there is none."""
    try:
        return {said.item: said for said in read_corrections(file)} if file.exists() else {}
    except DataError as error:
        raise Refused(409, f"{error}; delete or restore the file in the run") from None
