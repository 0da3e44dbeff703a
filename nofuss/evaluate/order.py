"""Scores without labels: how often alike items are closer together than different ones.

For triplets (x, y, z) the share with |x − y| < |x − z|; for pairs the share of (alike, different)
pairs of pairs in which the alike ones are closer, which is the area under the ROC curve. Both are
means over alike pairs (x, y). They are resampled by groups, since comparisons that share items
succeed and fail together.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from nofuss.evaluate.checked import vectors_of
from nofuss.evaluate.intervals import class_intervals, paired_difference
from nofuss.geometry import Array, as_tensor, normalize

TRIPLETS = "share of triplets whose anchor is closer to the positive than to the negative"
PAIRS = "share of pairs of an alike and a different pair in which the alike items are closer"
REST = "Euclidean distance on the unit sphere, ties count as wrong; 95% intervals by resampling"


@dataclass(frozen=True)
class OrderScores:
    """The result of `order_of_triplets` and `order_of_pairs`."""

    ordered: float
    interval: tuple[float, float]
    items: int
    seed: int
    protocol: str
    kind: str
    """"triplets" or "pairs"."""
    values: Tensor = field(repr=False, compare=False)
    """(Q,) of each alike pair: the share of its comparisons in the right order."""
    groups: Tensor = field(repr=False, compare=False)
    """(Q,) what is resampled as a whole."""

    def as_dict(self) -> dict[str, Any]:
        """Return a flat dict for JSON."""
        return {
            "ordered": self.ordered,
            "ordered_interval": list(self.interval),
            self.kind: len(self.values),
            "groups": len(torch.unique(self.groups)),
            "items": self.items,
            "seed": self.seed,
            "protocol": self.protocol,
        }

    def gain_over(self, name: str, other: "OrderScores") -> dict[str, Any]:
        """Return the paired difference from another embedding of the same comparisons."""
        gap = paired_difference(self.values, other.values, self.groups, self.seed)
        return {"over": name, "ordered": [*gap]}


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
    x, rows = normalize(vectors_of(embeddings)), _rows(triplets)
    anchor, positive, negative = (x[column] for column in rows.T)
    values = (_apart(anchor, positive) < _apart(anchor, negative)).double()
    return _scores(x, values, _groups(groups, rows[:, 0]), "triplets", TRIPLETS, seed)


def order_of_pairs(
    embeddings: Array, pairs: Array, *, groups: Array | None = None, seed: int = 0
) -> OrderScores:
    """Return the share of (alike, different) pairs in the right order, of pairs (M, 3).

    The third column is 1 for alike items, else 0; the rest is as in `order_of_triplets`.
    """
    x, rows = normalize(vectors_of(embeddings)), _rows(pairs)
    is_alike = rows[:, 2] == 1
    alike, different = rows[is_alike], rows[~is_alike]
    if not len(alike) or not len(different):
        raise ValueError(f"got {len(alike)} alike and {len(different)} different pairs; need both")
    near = _apart(x[alike[:, 0]], x[alike[:, 1]])
    far = _apart(x[different[:, 0]], x[different[:, 1]]).sort().values
    # How many different pairs are farther apart than each alike one; equal ones are not.
    farther = len(far) - torch.searchsorted(far, near, right=True)
    values = farther.double() / len(far)
    return _scores(x, values, _groups(groups, alike[:, 0]), "pairs", PAIRS, seed)


def _apart(a: Tensor, b: Tensor) -> Tensor:
    return (a - b).square().sum(1)


def _rows(table: Array) -> Tensor:
    rows = as_tensor(table).long().cpu()
    if rows.ndim != 2 or rows.shape[1] != 3 or not len(rows):
        raise ValueError(f"comparisons are {tuple(rows.shape)}; expected (T, 3), at least one row")
    return rows


def _groups(groups: Array | None, rows: Tensor) -> Tensor:
    return rows if groups is None else as_tensor(groups).cpu()[rows]


def _scores(
    x: Tensor, values: Tensor, groups: Tensor, kind: str, what: str, seed: int
) -> OrderScores:
    values = values.cpu()
    ends = class_intervals({"ordered": values}, groups, seed=seed, resamples=1000)["ordered"]
    protocol = f"{what}; {REST} groups of linked items"
    return OrderScores(
        float(values.mean()), ends, len(x), seed, protocol, kind, values=values, groups=groups
    )
