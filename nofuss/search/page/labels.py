"""The page's requests that change it: feedback on results, and what is right of doubtful labels.

    POST /api/feedback       keep marks: {query: {item} or {vector}, said: [{item, same}]}
    GET  /api/feedback.csv   all marks as a table
    POST /api/learn          learn from all marks; POST /api/undo from those before
    GET  /api/labels         doubtful labels with their evidence
    POST /api/labels         what is right: {item, label}, or null to take it back

What was said is on disk when it is answered. Each act makes a new state from the one that is shown,
unless the disk has another by now: then the page shows that one, and says so.
"""

import os
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from anyio.to_thread import run_sync
from numpy.typing import NDArray
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from nofuss.data.corrections import Correction, read_corrections
from nofuss.evaluate.findings import copies, doubtful_labels
from nofuss.files import locked
from nofuss.model.manifest import read_manifest
from nofuss.model.saved import model_digest
from nofuss.ranking.neighbours import neighbours
from nofuss.search.feedback import (
    Mark,
    Pairs,
    Said,
    append,
    compared,
    corrected,
    label_in_data,
    learned,
    read_feedback,
)
from nofuss.search.folder import FolderIndex
from nofuss.search.page.guard import Json
from nofuss.search.page.routes import (
    Page,
    Refused,
    by_key,
    described,
    feedback_on,
    name_of,
    query_of,
)
from nofuss.search.page.state import State, reopened
from nofuss.search.search import codes_of
from nofuss.search.verdict import calibrated

MOST_AT_ONCE = 500
"""Marks of one request."""
WITHIN = 0.02
"""Distance up to which two items with different labels are shown as copies: people look at them."""
MOST_QUERIES, FEWEST_QUERIES, COMPARED = 5000, 200, 10**9
"""Items that are compared with all others: all of a small index, some of a large one, since the
page must not keep the processor busy for minutes."""
SHOWN = 5
"""Neighbours that are shown of an item whose label was corrected."""


class OtherOnDiskError(Exception):
    """Another command has put something else in force than the page shows."""


class Done(NamedTuple):
    """What an act gives: the state from now on, and the answer."""

    state: State
    answer: dict[str, Any]


class Labels:
    """The handlers of feedback and labels."""

    def __init__(self, page: Page) -> None:
        self.page = page

    def routes(self) -> list[Route]:
        """Return the requests that change something, and what they show."""
        return [
            Route("/api/feedback", self.say, methods=["POST"]),
            Route("/api/feedback.csv", self.as_csv),
            Route("/api/learn", self.learn, methods=["POST"]),
            Route("/api/undo", self.undo, methods=["POST"]),
            Route("/api/labels", self.doubts, methods=["GET"]),
            Route("/api/labels", self.judge, methods=["POST"]),
        ]

    async def say(self, request: Request) -> Response:
        """Keep marks of a query's results, and return all that there are."""
        content = await self.page.content(request)

        def act(state: State) -> Done:
            query = _query(content.get("query"), state)
            append(state.run.path, _marks(content.get("said"), query, state))
            now = replace(state, feedback=read_feedback(state.run.path))
            return Done(now, feedback_on(now, query) or {})

        return Json(await self._do(act))

    async def as_csv(self, request: Request) -> Response:
        """Return all marks as a table; names are relative to the folder of all items."""
        state = self.page.state
        names = own(state).names
        home = os.path.commonpath(names) if all(map(os.path.isabs, names)) else ""
        short = {name: os.path.relpath(name, home) if home else name for name in names}
        headers = {"Content-Disposition": 'attachment; filename="feedback.csv"'}
        table = state.feedback.as_csv(short)
        return Response(table, media_type="text/csv; charset=utf-8", headers=headers)

    async def learn(self, request: Request) -> Response:
        """Learn from all marks, and return what that did to the classes without one."""
        await self.page.content(request)

        def act(state: State) -> Done:
            began = time.perf_counter()
            with locked(state.run.path):
                before = _current(state)
                feedback = read_feedback(state.run.path)
                pairs = Pairs.of(feedback, before)
                if not len(pairs.same):
                    raise Refused(
                        400,
                        "there is nothing to learn yet: mark one result, or two for a picture "
                        "of your own",
                    )
                history = before.manifest.history
                if before.manifest.feedback != len(feedback.lines):
                    history = (*history, before.manifest.feedback)
                after = learned(before, feedback, history=history)
                scores = compared(corrected(before, feedback), after, pairs)
                _commit(after, replace(state, feedback=feedback))
            seconds = time.perf_counter() - began
            about: dict[str, Any] = {"marks": feedback.count, "pairs": len(pairs.same)}
            about |= {"scores": scores, "seconds": seconds}
            return Done(replace(state, stored=after, feedback=feedback), about)

        return Json(await self._do(act))

    async def undo(self, request: Request) -> Response:
        """Return to what the page had learned before."""
        await self.page.content(request)

        def act(state: State) -> Done:
            with locked(state.run.path):
                before = _current(state)
                if not before.manifest.history:
                    raise Refused(409, "there is nothing to undo")
                *history, lines = before.manifest.history
                after = learned(before, state.feedback.first(lines), history=tuple(history))
                _commit(after, state)
            return Done(replace(state, stored=after), {})

        return Json(await self._do(act))

    async def doubts(self, request: Request) -> Response:
        """Return the doubtful labels, the clearest first; the first call may take seconds."""
        state = self.page.state
        return Json(
            {"labels": await run_sync(lambda: state.derived.get("doubts", lambda: _doubts(state)))}
        )

    async def judge(self, request: Request) -> Response:
        """Keep what somebody says of a label."""
        content = await self.page.content(request)

        def act(state: State) -> Done:
            name, label = by_key(state, content.get("item")), content.get("label")
            if label is not None and label not in state.classes:
                raise Refused(400, "no such class; choose one of the list")
            with locked(state.run.path):
                before = _current(state)
                [item] = before.get([name])
                if item.label is None:
                    raise Refused(400, "this item has no label that could be wrong")
                trained = _trained(state)
                if label is None and name in trained:
                    label = trained[name].corrected  # what the run was trained with holds again
                on_labels = state.feedback.on_labels
                # Those that the run was trained with come first: the file has all that was said.
                first = [] if on_labels else list(trained.values())
                said = on_labels.get(name) or [each for each in first if each.item == name]
                was = (label_in_data(item, said) if said else None) or item.label
                append(state.run.path, [*first, Correction(name, was, label)])
                now = replace(state, feedback=read_feedback(state.run.path))
                after = before.with_map(before.matrix)
                with suppress(OSError):  # the label is in force; the rule follows with the next act
                    _commit(after, now)
                    now = replace(now, stored=after)
            return Done(now, {"judged": _judged(now).get(name)})

        return Json(await self._do(act))

    async def _do(self, act: Callable[[State], Done]) -> dict[str, Any]:
        """Replace the state by what an act makes of it; one act at a time."""
        page = self.page
        async with page.writing:
            state = page.state
            try:
                page.state, answer = await run_sync(act, state)
            except OtherOnDiskError:
                page.state = await run_sync(reopened, state)
                raise Refused(
                    409, "another command has changed this run; the page shows it now, try again"
                ) from None
            except OSError as error:
                page.state = now = await run_sync(reopened, state)
                ended = "nothing changed" if now.version == state.version else "but it is in force"
                reason = error.strerror or error
                raise Refused(507, f"files of the run can't be used ({reason}); {ended}") from None
        return answer


def own(state: State) -> FolderIndex:
    """Return the run's own index as it is stored; refused where the page searches in a database."""
    if isinstance(state.stored, FolderIndex):
        return state.stored
    raise Refused(409, "this needs the run's own index; open the page without --index")


def _current(state: State) -> FolderIndex:
    """Return the run's own index, if it is still the one on disk; the caller has the lock."""
    index, run = own(state), state.run
    stored = read_manifest(run.index, state.encoder.digest)
    is_same = stored is not None and stored.version == index.manifest.version
    if not is_same or model_digest(run.model) != state.encoder.digest:
        raise OtherOnDiskError
    return index


def _commit(index: FolderIndex, state: State) -> None:
    """Put an index in force, with a rule that knows the corrected labels."""
    index.commit(calibrated(corrected(index, state.feedback), state.encoder))


def _query(asked: Any, state: State) -> str:
    """Return what marks call the query: the item's name, or that of a picture that was sent."""
    own(state)
    if not isinstance(asked, dict):
        raise Refused(400, "expected a query: item or vector")
    if (address := asked.get("vector")) is None:
        return by_key(state, asked.get("item"))
    query_of(str(address), state.encoder)
    return name_of(str(address))


def _marks(given: Any, query: str, state: State) -> list[Said]:
    if not isinstance(given, list) or not 0 < len(given) <= MOST_AT_ONCE:
        raise Refused(400, f"expected a list of 1 to {MOST_AT_ONCE} marks")
    marks = list[Said]()
    for mark in given:
        same = mark.get("same", "") if isinstance(mark, dict) else ""
        if not isinstance(same, bool | None):
            raise Refused(400, "a mark is an item and same: true, false or null")
        name = by_key(state, mark.get("item"))
        if name == query:
            raise Refused(400, "an item is the same as itself")
        marks.append(Mark(query, name, same))
    return marks


# ---- doubtful labels: the rule of the report and of `nofuss doctor`, for what the page shows


def _trained(state: State) -> dict[str, Correction]:
    """Return the corrections that the run was trained with."""
    file = state.run.corrections
    return {} if file is None else {said.item: said for said in read_corrections(file)}


def _judged(state: State) -> dict[str, str | None]:
    """Return what was said of labels since training."""
    trained = _trained(state)
    return {
        name: said.corrected
        for name, said in state.feedback.corrections.items()
        if said != trained.get(name)
    }


def _doubts(state: State) -> list[dict[str, Any]]:
    """Return doubtful labels, copies with different ones, and what was corrected."""
    index, judged = own(state), _judged(state)
    shown = corrected(index, state.feedback)
    codes = codes_of(shown.labels)
    rows = np.flatnonzero(codes >= 0)
    if len(rows) < 3:
        return []
    _, labels = np.unique(codes[rows], return_inverse=True)
    queries = min(MOST_QUERIES, max(FEWEST_QUERIES, COMPARED // len(rows)))
    nearest = neighbours(index.vectors[rows].numpy(), queries=queries)
    position = {int(query): at for at, query in enumerate(nearest.queries)}
    evidence: dict[int, tuple[str, NDArray[np.int64]]] = {
        d.item: ("label", nearest.items[position[d.item], : d.places])
        for d in doubtful_labels(nearest, labels)
    }
    for copy in copies(nearest, within=WITHIN):
        if labels[copy.first] != labels[copy.second]:
            evidence.setdefault(copy.first, ("copy", np.array([copy.second])))
    names = [shown.names[row] for row in rows]
    for item, name in enumerate(names):
        if name in judged and item in position:
            evidence.setdefault(item, ("label", nearest.items[position[item], :SHOWN]))
    doubts = []
    for item, (kind, places) in evidence.items():
        [doubt] = described(state, [names[item]])
        near = described(state, [names[place] for place in places])
        suggested, votes = Counter(other["label"] for other in near).most_common(1)[0]
        [stored] = index.get([names[item]])
        doubts.append(
            doubt
            | {"kind": kind, "suggested": suggested, "votes": votes, "neighbours": near}
            | {"label": stored.label, "judged": judged.get(names[item])}
        )
    return doubts
