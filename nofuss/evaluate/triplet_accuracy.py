"""Scores without labels: how often alike items are closer together than different ones.

For triplets (x, y, z) the fraction with |x − y| < |x − z|; for pairs the fraction of (alike,
different) pairs of pairs in which the alike ones are closer, which is the area under the ROC curve.
That is a mean over alike pairs and one over different ones, both of which chance has chosen: their
errors add (DeLong et al. 1988). Intervals are over groups, since comparisons that share items
succeed and fail together.
"""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nofuss.evaluate.intervals import Interval, class_interval
from nofuss.evaluate.retrieval import vectors_of
from nofuss.geometry import Array, as_tensor, normalize

TRIPLETS = "fraction of triplets whose anchor is closer to the positive than to the negative"
PAIRS = "fraction of pairs of an alike and a different pair in which the alike items are closer"
REST = "Euclidean distance on the unit sphere, ties count as wrong; 95% intervals over"


class Part(NamedTuple):
    """Comparisons of one kind, each with the fraction that is in the right order."""

    values: Tensor
    """(Q,) double."""
    groups: Tensor
    """(Q,) of linked items."""


@dataclass(frozen=True)
class Accuracy:
    """The result of `triplet_accuracy` and `pair_accuracy`."""

    ordered: float
    interval: Interval
    items: int
    protocol: str
    kind: str
    """"triplets" or "pairs"."""
    parts: tuple["Part", ...] = field(repr=False, compare=False)
    """Of triplets; of alike pairs, and of different ones."""

    def as_dict(self) -> dict[str, Any]:
        """Return a flat dict for JSON."""
        return {
            "ordered": self.ordered,
            "ordered_interval": list(self.interval),
            self.kind: len(self.parts[0].values),
            "groups": len(torch.unique(self.parts[0].groups)),
            "items": self.items,
            "protocol": self.protocol,
        }

    def gain_over(self, name: str, other: "Accuracy") -> dict[str, Any]:
        """Return the paired difference from another embedding of the same comparisons."""
        gaps = tuple(
            Part(a.values - b.values, a.groups)
            for a, b in zip(self.parts, other.parts, strict=True)
        )
        most = max(float(gap.values.abs().max()) for gap in gaps) or 1.0
        ends = _interval(gaps, (-most, most))
        return {"over": name, "ordered": [self.ordered - other.ordered, *ends]}


def extra_of(scores: dict[str, Any]) -> dict[str, Any]:
    """Return what is added to scores that labels give, of `Accuracy.as_dict`."""
    kept = ("ordered", "ordered_interval", "triplets", "pairs")
    return {name: value for name, value in scores.items() if name in kept}


def triplet_accuracy(
    embeddings: Array, triplets: Array, *, groups: Array | None = None
) -> Accuracy:
    """Return the fraction of triplets (T, 3) of rows that embeddings (N, D) put in the right order.

    groups: (N,) of the items, which intervals are over; None: over anchors.
    """
    x = normalize(vectors_of(embeddings))
    rows = _rows(triplets, items=len(x), columns=3)
    anchor, positive, negative = (x[column] for column in rows.T)
    values = (_apart(anchor, positive) < _apart(anchor, negative)).double()
    part = Part(values.cpu(), _groups(groups, rows[:, 0]))
    return _scores(x, (part,), "triplets", TRIPLETS, groups)


def pair_accuracy(embeddings: Array, pairs: Array, *, groups: Array | None = None) -> Accuracy:
    """Return the fraction of (alike, different) pairs in the right order, of pairs (M, 3).

    The third column is 1 for alike items, else 0; the rest is as in `triplet_accuracy`.
    """
    x = normalize(vectors_of(embeddings))
    rows = _rows(pairs, items=len(x), columns=2)
    is_alike = rows[:, 2] == 1
    alike, different = rows[is_alike], rows[~is_alike]
    if not len(alike) or not len(different):
        raise ValueError(f"got {len(alike)} alike and {len(different)} different pairs; need both")
    near = _apart(x[alike[:, 0]], x[alike[:, 1]])
    far = _apart(x[different[:, 0]], x[different[:, 1]])
    # How many different pairs are farther apart than each alike one, and how many alike ones are
    # closer than each different one; equal ones are neither.
    farther = len(far) - torch.searchsorted(far.sort().values, near, right=True)
    closer = torch.searchsorted(near.sort().values, far)
    parts = (
        Part(farther.double().cpu() / len(far), _groups(groups, alike[:, 0])),
        Part(closer.double().cpu() / len(near), _groups(groups, different[:, 0])),
    )
    return _scores(x, parts, "pairs", PAIRS, groups)


def _apart(a: Tensor, b: Tensor) -> Tensor:
    return (a - b).square().sum(1)


def _rows(table: Array, *, items: int, columns: int) -> Tensor:
    """Return comparisons (T, 3), whose first `columns` are rows of the embeddings."""
    found = as_tensor(table).cpu()
    rows = found.long()
    if rows.ndim != 2 or rows.shape[1] != 3 or not len(rows):
        raise ValueError(f"comparisons are {tuple(rows.shape)}; expected (T, 3), at least one row")
    named = rows[:, :columns]
    if (rows != found).any() or named.min() < 0 or named.max() >= items:
        raise ValueError(
            f"comparisons reach from {found.min()} to {found.max()}; expected whole numbers, rows "
            f"of the {items:,} embeddings from 0 to {items - 1}"
        )
    return rows


def _groups(groups: Array | None, rows: Tensor) -> Tensor:
    return rows if groups is None else as_tensor(groups).cpu()[rows]


def _scores(
    x: Tensor, parts: tuple[Part, ...], kind: str, what: str, groups: Array | None
) -> Accuracy:
    ends = _interval(parts, (0.0, 1.0))
    protocol = f"{what}; {REST} {'anchors' if groups is None else 'groups of linked items'}"
    return Accuracy(float(parts[0].values.mean()), ends, len(x), protocol, kind, parts)


def _interval(parts: tuple[Part, ...], ends: Interval) -> Interval:
    """Return the 95% interval of the score whose parts have the same mean, over groups."""
    groups, own = torch.unique(torch.cat([part.groups for part in parts]), return_inverse=True)
    places = own.split([len(part.values) for part in parts])

    def by_group(place: Tensor, values: Tensor) -> Tensor:
        return torch.bincount(place, values, minlength=len(groups))

    sums = torch.stack([by_group(p, part.values) for p, part in zip(places, parts, strict=True)], 1)
    sizes = torch.stack([by_group(p, torch.ones(len(p)).double()) for p in places], 1)
    return class_interval(sums.numpy(), sizes.numpy(), ends)
