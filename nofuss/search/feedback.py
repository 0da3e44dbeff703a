"""Feedback: what people said on the page, and what follows from it for a search.

RUN/feedback.jsonl has a line for each thing that was said; lines are only ever added to it:

    {"query": NAME, "item": NAME, "same": true, "time": SECONDS}
    {"item": NAME, "label": LABEL, "corrected": LABEL, "time": SECONDS}

`same` is true for "the same", false for "not the same", null for neither after all; `query` is the
name of an item, or "picture KEY" for one that somebody sent, which is not kept. `label` is what the
data say and `corrected` what is right: another class, the same where somebody looked and found it
right, null for nothing after all. Of several lines about an item, or about two in either order, the
last one counts. What is not a whole line of this form says nothing; a cut last line is ignored.

Neither the model nor the vectors that it gave change. Corrected labels are in force at once, laid
over those of the index. Marks are in force once the page has learned from them: the first so many
lines teach a map (D, D) of the vectors, which the manifest names together with that number of lines
(model/manifest.py). So undoing is learning from fewer lines.

What marks teach: of all metrics, the one with the least LogDet divergence from the present distance
is wanted in which pairs marked the same are at most `near` apart and the others at least `far`
(information-theoretic metric learning, Davis, Kulis, Jain, Sra & Dhillon 2007). Each pair is a
rank-one change in closed form; they take turns until nothing changes. Directions that no marked
pair differs in stay as they are, so a dozen marks can't undo what thousands of labels have taught,
and with no marks nothing changes.
"""

import dataclasses
import json
import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from nofuss.data.corrections import Correction, in_force
from nofuss.evaluate.intervals import paired_difference
from nofuss.evaluate.protocol import per_query, scorable
from nofuss.files import append_lines, read_lines
from nofuss.ranking.neighbours import nearest
from nofuss.run.proxies import sample_by_class
from nofuss.search.folder import FolderIndex
from nofuss.search.index import Index, Item

FILE = "feedback.jsonl"
PICTURE = "picture "
"""Begins the query of a mark where it was a picture that somebody sent."""
MOST_PAIRS = 2000
"""Pairs to learn from, the last ones: learning takes seconds."""
SAMPLE = 1000
"""Items that say how far apart items usually are."""
SCORED = 5000
"""Items of classes without a mark that a map is scored on."""
SLACK = 10.0
"""How firmly marks count against the present metric (γ): the larger, the more exactly they hold
(docs/lab)."""
SWEEPS, ENOUGH = 100, 1e-3
"""Most rounds over the pairs, and the relative change of their weights at which they end."""


class Mark(NamedTuple):
    """What somebody said of a result."""

    query: str
    item: str
    same: bool | None

    @classmethod
    def from_json(cls, stored: Any) -> "Mark | None":
        """Return a line of the file; None where it says something else."""
        if not isinstance(stored, dict) or not stored.keys() >= {*cls._fields}:
            return None
        mark = cls(*(stored[name] for name in cls._fields))
        is_valid = type(mark.query) is type(mark.item) is str
        return mark if is_valid and isinstance(mark.same, bool | None) else None


Said = Mark | Correction
_Index = TypeVar("_Index", Index, FolderIndex)


# ---- the file


@dataclass(frozen=True)
class Feedback:
    """What was said, in order; None for lines that say nothing."""

    lines: tuple[Said | None, ...] = ()

    def first(self, count: int) -> "Feedback":
        """Return what the first lines say."""
        return Feedback(self.lines[:count])

    @cached_property
    def marks(self) -> dict[tuple[str, str], bool]:
        """(query, item) → whether they are the same; the last line about two counts, either way."""
        last = dict[tuple[str, str], bool | None]()
        for said in self.lines:
            if isinstance(said, Mark):
                last.pop((said.item, said.query), None)
                last[said.query, said.item] = said.same
        return {pair: same for pair, same in last.items() if same is not None}

    @cached_property
    def on_labels(self) -> dict[str, list[Correction]]:
        """Item → all that was said of its label, in order."""
        found: dict[str, list[Correction]] = {}
        for said in self.lines:
            if isinstance(said, Correction):
                found.setdefault(said.item, []).append(said)
        return found

    @cached_property
    def corrections(self) -> dict[str, Correction]:
        """Item → what is said of its label."""
        return in_force(said for said in self.lines if isinstance(said, Correction))

    def pairs(self) -> list[tuple[str, str, bool]]:
        """Return pairs of items; a picture that is not kept is replaced by its first same item."""
        marks = [(query, item, same) for (query, item), same in self.marks.items()]
        first = {query: item for query, item, same in reversed(marks) if same}
        pairs = [(first.get(q) if q.startswith(PICTURE) else q, i, same) for q, i, same in marks]
        return [(a, b, same) for a, b, same in pairs if a is not None and a != b]

    def labels(self, index: FolderIndex) -> dict[str, str]:
        """Return the corrected labels of items; not of those that have another in the data now."""
        return {
            item.name: label
            for item in index.get(list(self.corrections))
            if (label := self.corrections[item.name].corrected) is not None
            and self.label_in_data(item) is not None
        }

    def label_in_data(self, item: Item) -> str | None:
        """Return the label that an item had before it was corrected; None if it has another by now.

        The index has that label, or one of those that it was corrected to.
        """
        said = self.on_labels.get(item.name, [])
        known = {label for each in said for label in (each.label, each.corrected)}
        return said[0].label if item.label in known else None


def read_feedback(run: Path) -> Feedback:
    """Read what was said of a run; nothing where there is no file."""
    lines = read_lines(run / FILE)
    return Feedback(tuple(Mark.from_json(line) or Correction.from_json(line) for line in lines))


def append(run: Path, said: Iterable[Said]) -> None:
    """Append what somebody said."""
    now = int(time.time())
    lines = [json.dumps(each._asdict() | {"time": now}) for each in said]
    append_lines(run / FILE, lines)


# ---- what follows from it


class Pairs(NamedTuple):
    """Marked pairs: rows of vectors (N, D)."""

    first: Tensor
    second: Tensor
    same: Tensor
    """(P,) of bool."""

    @classmethod
    def of(cls, feedback: Feedback, index: FolderIndex) -> "Pairs":
        """Return the last pairs whose items are in an index."""
        pairs = [pair for pair in feedback.pairs() if pair[0] in index and pair[1] in index]
        row = {name: row for row, name in enumerate(index.names)}
        rows = [(row[a], row[b], same) for a, b, same in pairs[-MOST_PAIRS:]]
        first, second, same = zip(*rows, strict=True) if rows else ((), (), ())
        return cls(
            torch.tensor(first).long(), torch.tensor(second).long(), torch.tensor(same).bool()
        )


def corrected(index: _Index, feedback: Feedback) -> _Index:
    """Return the index with the labels that are corrected; those on disk stay as they are."""
    if isinstance(index, FolderIndex):
        return index.with_labels(feedback.labels(index))
    return index  # in a database none are


def learned(index: FolderIndex, feedback: Feedback, *, history: tuple[int, ...]) -> FolderIndex:
    """Return the index as feedback teaches it, to be committed; history: for undo."""
    pairs = Pairs.of(feedback, index)
    made = index.with_map(learned_map(index.base, pairs) if len(pairs.same) else None)
    made.manifest = dataclasses.replace(
        index.manifest, feedback=len(feedback.lines), history=history
    )
    return made


def learned_map(vectors: Tensor, pairs: Pairs, *, slack: float = SLACK) -> Tensor:
    """Return the map (D, D), double and symmetric, that marked pairs teach of vectors (N, D).

    Pairs should keep within the median distance of nearest neighbours, or beyond that of any two.
    """
    random = np.random.default_rng(0)
    some = vectors[torch.from_numpy(random.permutation(len(vectors))[:SAMPLE])]
    closest = nearest(some, vectors, 2)[0][:, -1]
    near = max(float(closest.median()), 1e-3)  # 0 where every item has a copy
    far = max(float((some - some.roll(1, 0)).norm(dim=1).median()), near)
    return nearest_map(vectors, pairs, near=near, far=far, slack=slack)


def nearest_map(
    vectors: Tensor, pairs: Pairs, *, near: float, far: float, slack: float = SLACK
) -> Tensor:
    """Return the map (D, D) with the metric nearest to the present one in which pairs hold.

    vectors: (N, D) unit. near, far: distances that pairs should keep within, and beyond.
    """
    x = vectors.double()
    differences = x[pairs.first] - x[pairs.second]  # (P, D)
    usable = differences.norm(dim=1) > 1e-6  # copies have nothing to learn from
    # Only the directions in which marked pairs differ change: solve in the space they span.
    basis, coordinates = torch.linalg.qr(differences[usable].T)  # (D, R), (R, P)
    metric = _metric(coordinates.T, pairs.same[usable], near**2, far**2, slack)
    values, directions = torch.linalg.eigh(metric)
    change = (directions * (values.clamp_min(1e-12).sqrt() - 1)) @ directions.T
    matrix: Tensor = torch.eye(x.shape[1], dtype=torch.float64) + basis @ change @ basis.T
    return matrix


def _metric(differences: Tensor, is_same: Tensor, near: float, far: float, slack: float) -> Tensor:
    """Return A (R, R) with vᵀ·A·v at most `near`, or at least `far`, for each difference v."""
    a = torch.eye(differences.shape[1], dtype=torch.float64)
    sign = torch.where(is_same, 1.0, -1.0).tolist()
    wanted = torch.where(is_same, near, far).tolist()
    weights = [0.0] * len(sign)
    for _ in range(SWEEPS):
        before = list(weights)
        for i, v in enumerate(differences):
            image = a @ v
            distance = float(v @ image)
            # A Bregman projection onto one constraint, softened by the slack: the target gives way.
            wished = sign[i] * (1 / distance - 1 / wanted[i]) * slack / (slack + 1)
            step = min(weights[i], wished)
            factor = sign[i] * step / (1 - sign[i] * step * distance)
            wanted[i] = 1 / (1 / wanted[i] + sign[i] * step / slack)
            weights[i] -= step
            a += factor * torch.outer(image, image)
        change = sum(abs(w - b) for w, b in zip(weights, before, strict=True))
        if change <= ENOUGH * sum(before):
            break
    return (a + a.T) / 2


def compared(before: FolderIndex, after: FolderIndex, pairs: Pairs) -> dict[str, Any] | None:
    """Return Recall@1 and MAP@R before and after on the classes without a mark, paired.

    Whether it helps elsewhere is not for the marked items to say. None where there is none.
    """
    codes = before.codes
    marked = np.unique(codes[torch.cat([pairs.first, pairs.second]).numpy()])
    rows = np.flatnonzero((codes >= 0) & ~np.isin(codes, marked))
    rows = rows[sample_by_class(codes[rows], items=SCORED)]
    labels = codes[rows]
    if not len(rows) or not scorable(labels):
        return None
    was, now = (per_query(index.vectors[rows], labels) for index in (before, after))
    gain = paired_difference(now.map_at_r, was.map_at_r, torch.as_tensor(was.labels))
    return {
        "classes": len(np.unique(labels)),
        "items": len(rows),
        "recall@1": [float(s.recall1.mean()) for s in (was, now)],
        "map@r": [float(s.map_at_r.mean()) for s in (was, now)],
        "gain": [float(gain.mean), float(gain.low), float(gain.high)],
    }
