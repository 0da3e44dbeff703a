"""The page's requests that change it: feedback on results, and what is right of doubtful labels.

    POST /api/feedback       keep marks: {query: {item} or {vector}, said: [{item, same}]}
    POST /api/learn          learn from all marks; POST /api/undo from those before
    GET  /api/labels         doubtful labels with their evidence
    POST /api/labels         what is right: {item, label}, or null to take it back

What was said is on disk when it is answered. Each act makes a new state from the one that is shown,
unless the disk has another by now: then the page shows that one, and says so.
"""

import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from anyio.to_thread import run_sync
from numpy.typing import NDArray
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from nofuss.data.corrections import Correction, read_corrections
from nofuss.errors import NofussError
from nofuss.evaluate.findings import copies, doubtful_labels
from nofuss.files import locked
from nofuss.model.manifest import read_manifest
from nofuss.model.saved import model_digest
from nofuss.ranking.neighbours import neighbours
from nofuss.search.feedback import (
    Feedback,
    Mark,
    Pairs,
    append,
    compared,
    corrected,
    learned,
    read_feedback,
)
from nofuss.search.folder import FolderIndex
from nofuss.search.page.guard import Json
from nofuss.search.page.routes import (
    Handler,
    Page,
    by_key,
    described,
    feedback_on,
    read_query,
)
from nofuss.search.page.state import State, open_state
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

Content = dict[str, Any]
_DOUBTS: WeakKeyDictionary[State, Content] = WeakKeyDictionary()
Act = Callable[[State, Content], tuple[State, Content]]
"""Of a state and what was sent: the state from now on, and the answer."""


class OtherOnDiskError(NofussError):
    """Another command has put something else in force than the page shows."""

    def __init__(self) -> None:
        super().__init__("another command has changed this run; the page shows it now, try again")


def routes(page: Page) -> list[Route]:
    """Return the requests that change something, and what they show."""

    def acts(act: Act) -> Handler:
        async def handler(request: Request) -> Response:
            content = await page.content(request)
            return Json(await _do(page, act, content))

        return handler

    return [
        Route("/api/feedback", acts(mark), methods=["POST"]),
        Route("/api/learn", acts(learn), methods=["POST"]),
        Route("/api/undo", acts(undo), methods=["POST"]),
        Route("/api/labels", page.studies(doubts), methods=["GET"]),
        Route("/api/labels", acts(judge), methods=["POST"]),
    ]


async def _do(page: Page, act: Act, content: Content) -> Content:
    """Replace the state by what an act makes of it; one act at a time."""
    async with page.writing:
        state = page.state
        try:
            page.state, answer = await run_sync(act, state, content)
        except OtherOnDiskError:
            page.state = await run_sync(_reopened, state)
            raise
        except OSError as error:
            now, ended = await run_sync(_reopened, state), "nothing changed"
            if now.version != state.version:
                page.state, ended = now, "but it is in force"
            reason = error.strerror or error
            words = f"files of the run can't be used ({reason}); {ended}"
            raise HTTPException(507, words) from None
    return answer


def _reopened(state: State) -> State:
    """Return what is on disk now."""
    return open_state(state.run, state.url, rerank=state.rerank)


# ---- acts


def mark(state: State, content: Content) -> tuple[State, Content]:
    """Keep marks of a query's results, and return all that there are."""
    own(state)
    try:
        _, query = read_query(content["query"], state)
        said = [Mark(query, by_key(state, s["item"]), s["same"]) for s in content["said"]]
    except (AttributeError, KeyError, TypeError):
        said = []
    if not 0 < len(said) <= MOST_AT_ONCE or not all(map(_is_mark, said)):
        words = (
            f"expected a query, and 1 to {MOST_AT_ONCE} other items with same: true, false, null"
        )
        raise HTTPException(400, words)
    append(state.run.path, said)
    now = replace(state, feedback=read_feedback(state.run.path))
    return now, feedback_on(now, query) or {}


def _is_mark(mark: Mark) -> bool:
    return isinstance(mark.same, bool | None) and mark.item != mark.query


def learn(state: State, content: Content) -> tuple[State, Content]:
    """Learn from all marks, and return what that did to the classes without one."""
    began = time.perf_counter()
    with locked(state.run.path):
        before, feedback = _current(state), read_feedback(state.run.path)
        pairs = Pairs.of(feedback, before)
        if not len(pairs.same):
            words = "mark one result, or two for a picture of your own"
            raise HTTPException(400, f"there is nothing to learn yet: {words}")
        history = before.manifest.history
        if before.manifest.feedback != len(feedback.lines):
            history = (*history, before.manifest.feedback)
        after = learned(before, feedback, history=history)
        scores = compared(corrected(before, feedback), after, pairs)
        now = _commit(after, replace(state, feedback=feedback))
    counts = {"marks": len(feedback.marks), "pairs": len(pairs.same)}
    return now, counts | {"scores": scores, "seconds": time.perf_counter() - began}


def undo(state: State, content: Content) -> tuple[State, Content]:
    """Return to what the page had learned before."""
    with locked(state.run.path):
        before = _current(state)
        if not before.manifest.history:
            raise HTTPException(409, "there is nothing to undo")
        *history, lines = before.manifest.history
        now = replace(state, feedback=read_feedback(state.run.path))
        after = learned(before, now.feedback.first(lines), history=tuple(history))
        return _commit(after, now), {}


def judge(state: State, content: Content) -> tuple[State, Content]:
    """Keep what somebody says of a label; it counts at once."""
    own(state)
    name, label = by_key(state, content.get("item")), content.get("label")
    if label is not None and label not in state.base.classes:
        raise HTTPException(400, "no such class; choose one of the list")
    with locked(state.run.path):
        before, feedback = _current(state), read_feedback(state.run.path)
        [item] = before.get([name])
        if item.label is None:
            raise HTTPException(400, "this item has no label that could be wrong")
        trained = _trained(state)
        if label is None and name in trained:
            label = trained[name].corrected  # what the run was trained with holds again
        # Those that the run was trained with come first: the file has all that was said.
        first = () if feedback.on_labels else tuple(trained.values())
        told = Feedback((*first, *feedback.lines))
        was = told.label_in_data(item) or item.label
        append(state.run.path, [*first, Correction(name, was, label)])
        now = replace(state, feedback=read_feedback(state.run.path))
        with suppress(OSError):  # the label is in force; the rule follows with the next act
            now = _commit(before.with_map(before.matrix), now)
    return now, {"judged": _judged(now).get(name)}


def own(state: State) -> FolderIndex:
    """Return the run's own index as it is stored; refused where the page searches in a database."""
    if isinstance(state.stored, FolderIndex):
        return state.stored
    raise HTTPException(409, "this needs the run's own index; open the page without --index")


def _current(state: State) -> FolderIndex:
    """Return the run's own index, if it is still the one on disk; the caller has the lock."""
    index, run = own(state), state.run
    stored = read_manifest(run.index, state.encoder.digest)
    is_same = stored is not None and stored.version == index.manifest.version
    if not is_same or model_digest(run.model) != state.encoder.digest:
        raise OtherOnDiskError
    return index


def _commit(index: FolderIndex, state: State) -> State:
    """Put an index in force, with a rule that knows the corrected labels."""
    index.commit(calibrated(corrected(index, state.feedback), state.encoder))
    return replace(state, stored=index)


# ---- doubtful labels: the rule of the report and of `nofuss doctor`, for what the page shows


def _trained(state: State) -> dict[str, Correction]:
    """Return the corrections that the run was trained with."""
    file = state.run.corrections
    return {} if file is None else {said.item: said for said in read_corrections(file)}


def _judged(state: State) -> dict[str, str | None]:
    """Return what was said of labels since training."""
    trained, said = _trained(state), state.feedback.corrections
    return {n: each.corrected for n, each in said.items() if each != trained.get(n)}


def doubts(state: State) -> Content:
    """Return what is doubtful of a state, found once."""
    if state not in _DOUBTS:
        _DOUBTS[state] = {"labels": _doubts(state)}
    return _DOUBTS[state]


def _doubts(state: State) -> list[Content]:
    """Return doubtful labels, copies with different ones, and what was corrected."""
    stored, judged = own(state), _judged(state)
    index = corrected(stored, state.feedback)
    codes = index.codes
    rows = np.flatnonzero(codes >= 0)
    if len(rows) < 3:
        return []
    names, labels = [index.names[row] for row in rows], codes[rows]
    queries = min(MOST_QUERIES, max(FEWEST_QUERIES, COMPARED // len(rows)))
    nearest = neighbours(index.vectors[rows].numpy(), queries=queries)
    near = dict(zip(nearest.queries.tolist(), nearest.items, strict=True))
    evidence: dict[int, tuple[str, NDArray[np.int64]]] = {
        doubt.item: ("label", near[doubt.item][: doubt.places])
        for doubt in doubtful_labels(nearest, labels)
    }
    for copy in copies(nearest, within=WITHIN):
        if labels[copy.first] != labels[copy.second]:
            evidence.setdefault(copy.first, ("copy", np.array([copy.second])))
    for item in near:
        if names[item] in judged:
            evidence.setdefault(item, ("label", near[item][:SHOWN]))

    def doubt_of(item: int, kind: str, places: NDArray[np.int64]) -> Content:
        [doubt], others = (described(state, [names[at] for at in of]) for of in ([item], places))
        suggested, votes = Counter(other["label"] for other in others).most_common(1)[0]
        said = {"kind": kind, "suggested": suggested, "votes": votes, "neighbours": others}
        label = stored.labels[rows[item]]  # as the data say
        return doubt | said | {"label": label, "judged": judged.get(names[item])}

    return [doubt_of(item, *why) for item, why in evidence.items()]
