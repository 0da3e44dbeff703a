"""Scores without labels: how often alike items are closer together than different ones.

For triplets (x, y, z) the share with |x − y| < |x − z|; for pairs the share of (alike, different)
pairs of pairs in which the alike ones are closer, which is the area under the ROC curve. That is a
mean over alike pairs and one over different ones, both of which chance has chosen: their sum less
the area itself varies as the area does (DeLong et al. 1988). Comparisons are resampled by groups,
since those that share items succeed and fail together.
"""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nofuss.evaluate.checked import vectors_of
from nofuss.evaluate.intervals import Interval, resampled_means, widened
from nofuss.geometry import Array, as_tensor, normalize

TRIPLETS = "share of triplets whose anchor is closer to the positive than to the negative"
PAIRS = "share of pairs of an alike and a different pair in which the alike items are closer"
REST = "Euclidean distance on the unit sphere, ties count as wrong; 95% intervals by resampling"


class Part(NamedTuple):
    """Comparisons of one kind, each with the share that is in the right order."""

    values: Tensor
    """(Q,) double."""
    groups: Tensor
    """(Q,) what is resampled as a whole."""


@dataclass(frozen=True)
class OrderScores:
    """The result of `order_of_triplets` and `order_of_pairs`."""

    ordered: float
    interval: Interval
    items: int
    seed: int
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
            "seed": self.seed,
            "protocol": self.protocol,
        }

    def gain_over(self, name: str, other: "OrderScores") -> dict[str, Any]:
        """Return the paired difference from another embedding of the same comparisons."""
        gaps = tuple(
            Part(a.values - b.values, a.groups)
            for a, b in zip(self.parts, other.parts, strict=True)
        )
        ends = _interval(gaps, seed=self.seed, resamples=2000, within=(-1.0, 1.0))
        return {"over": name, "ordered": [self.ordered - other.ordered, *ends]}


def extra_of(scores: dict[str, Any]) -> dict[str, Any]:
    """Return what is added to scores that labels give, of `OrderScores.as_dict`."""
    kept = ("ordered", "ordered_interval", "triplets", "pairs")
    return {name: value for name, value in scores.items() if name in kept}


def order_of_triplets(
    embeddings: Array, triplets: Array, *, groups: Array | None = None, seed: int = 0
) -> OrderScores:
    """Return the share of triplets (T, 3) of rows that embeddings (N, D) put in the right order.

    groups: (N,) of the items, whose comparisons are resampled together; None: anchors alone are.
    """
    x = normalize(vectors_of(embeddings))
    rows = _rows(triplets, items=len(x), columns=3)
    anchor, positive, negative = (x[column] for column in rows.T)
    values = (_apart(anchor, positive) < _apart(anchor, negative)).double()
    part = Part(values.cpu(), _groups(groups, rows[:, 0]))
    return _scores(x, (part,), "triplets", TRIPLETS, seed)


def order_of_pairs(
    embeddings: Array, pairs: Array, *, groups: Array | None = None, seed: int = 0
) -> OrderScores:
    """Return the share of (alike, different) pairs in the right order, of pairs (M, 3).

    The third column is 1 for alike items, else 0; the rest is as in `order_of_triplets`.
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
    return _scores(x, parts, "pairs", PAIRS, seed)


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


def _scores(x: Tensor, parts: tuple[Part, ...], kind: str, what: str, seed: int) -> OrderScores:
    ends = _interval(parts, seed=seed, resamples=1000, within=(0.0, 1.0))
    protocol = f"{what}; {REST} groups of linked items"
    return OrderScores(float(parts[0].values.mean()), ends, len(x), seed, protocol, kind, parts)


def _interval(parts: tuple[Part, ...], *, seed: int, resamples: int, within: Interval) -> Interval:
    """Return the 95% interval of the score whose parts have the same mean, over groups."""
    groups, own = torch.unique(torch.cat([part.groups for part in parts]), return_inverse=True)
    places = own.split([len(part.values) for part in parts])

    def by_group(place: Tensor, values: Tensor) -> Tensor:
        return torch.bincount(place, values, minlength=len(groups))

    sums = torch.stack([by_group(p, part.values) for p, part in zip(places, parts, strict=True)], 1)
    sizes = torch.stack([by_group(p, torch.ones(len(p)).double()) for p in places], 1)
    means = resampled_means(sums, sizes, seed=seed, resamples=resamples)
    mean = float(parts[0].values.mean())
    fewest = int((sizes > 0).sum(0).min())  # the chance in the rarer kind decides
    return widened(means.sum(1) - (len(parts) - 1) * mean, mean, fewest, within=within)
