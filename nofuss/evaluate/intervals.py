"""Chance in scores: which classes happen to be tested, and the seeds of training.

The queries of a class succeed and fail together, so intervals are over classes; over single queries
they would be too narrow. There is no resampling: the jackknife leaves out each class in turn, and
Student's t has as many degrees of freedom as the sizes of the classes are worth (Kish). Near the
end of the range, and with few classes, that alone covers too little: 12 of 12 would give 100 to
100%. So two pseudo-classes are added first, one that scores the least and one the most, as Agresti
and Coull add pseudo-counts to a binomial. Over 432 simulated settings (3 to 100 classes, means of
0.5 to 0.99) such intervals cover 92% at least; percentiles of resampled classes covered down to 7%.

Over seeds there is a t-interval. A difference between methods counts only if it is beyond both.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, stdev
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from torch import Tensor

from nofuss.evaluate.retrieval import classes_of
from nofuss.geometry import Array, as_tensor

PSEUDO = 0.25
"""Size of a pseudo-class, in classes of a typical query; with a fifth some settings cover 86%."""
Interval = tuple[float, float]
Verdict = Literal["above", "below", "indistinguishable"]


def class_interval(sums: ArrayLike, sizes: ArrayLike, ends: Interval = (0.0, 1.0)) -> Interval:
    """Return the 95% interval of a mean over queries, from their sums and numbers by class, (C,).

    ends: the least and the most that a query can score. Arrays (C, P) have P parts with the same
    mean whose errors add, as the area under a curve has (triplet_accuracy.py).
    """
    s, n = (np.asarray(values, dtype=float) for values in (sums, sizes))
    s, n = s.reshape(len(s), -1), n.reshape(len(n), -1)  # (C, P)
    found = float(s[:, 0].sum() / n[:, 0].sum())
    extra = PSEUDO * (n**2).sum(0) / n.sum(0)  # (P,): of the class size that a typical query has
    s = np.vstack([s, extra * ends[0], extra * ends[1]])
    n = np.vstack([n, extra, extra])
    means = s.sum(0) / n.sum(0)
    shifts = ((s.sum(0) - s) / (n.sum(0) - n) - means).sum(1)  # by leaving out each class
    variance = (len(n) - 1) / len(n) * (shifts**2).sum()
    worth = float((n.sum(0) ** 2 / (n**2).sum(0)).min())  # the rarer kind decides
    half = _t975(worth - 1) * math.sqrt(variance)
    center = float(means.mean())
    # The pseudo-classes pull the center inwards: stretched to hold the mean that is reported.
    low, high = min(center - half, found), max(center + half, found)
    return max(low, ends[0]), min(high, ends[1])


def class_intervals(results: Mapping[str, Tensor], classes: Tensor) -> dict[str, Interval]:
    """Return the 95% intervals over classes of mean results (Q,), each from 0 to 1."""
    group = classes_of(classes, len(classes)).numpy()
    sizes = np.bincount(group)
    return {
        name: class_interval(np.bincount(group, values.cpu().numpy()), sizes)
        for name, values in results.items()
    }


class Difference(NamedTuple):
    """The mean of a − b over the queries, and its 95% interval over classes."""

    mean: float
    low: float
    high: float


def paired_difference(
    a: Array, b: Array, labels: Array, *, largest: float | None = None
) -> Difference:
    """Return the mean of a − b over queries, and its 95% interval over classes.

    a and b are scores (Q,) of the same queries by two models, labels (Q,) their classes. Pairing
    removes what both have in common: some classes are hard for every model. largest: the largest
    difference that a query can have; None for the largest that one has (1 if all are equal).
    """
    first, second = as_tensor(a).detach().cpu().double(), as_tensor(b).detach().cpu().double()
    if first.ndim != 1 or first.shape != second.shape or not len(first):
        shapes = f"{tuple(first.shape)} and {tuple(second.shape)}"
        raise ValueError(f"scores have shapes {shapes}; expected one score a query in both")
    gap = (first - second).numpy()
    if not np.isfinite(gap).all():
        raise ValueError("scores hold NaN or infinity; pass the scores of queries only")
    group = classes_of(labels, len(gap)).numpy()
    most = largest or float(np.abs(gap).max()) or 1.0
    ends = class_interval(np.bincount(group, gap), np.bincount(group), (-most, most))
    return Difference(float(gap.mean()), *ends)


def in_points(gain: Sequence[float]) -> str:
    """Return a mean difference and its interval in words: "+4.10 points (95%: +3.02 to +5.21)"."""
    mean, low, high = (100 * value for value in gain)
    return f"{mean:+.2f} points (95%: {low:+.2f} to {high:+.2f})"


def t_interval(values: Sequence[float]) -> Interval | None:
    """Return the 95% interval of Student's t around the mean; None for a single value."""
    if len(values) < 2:
        return None
    half = _t975(len(values) - 1) * stdev(values) / math.sqrt(len(values))
    return mean(values) - half, mean(values) + half


def _t975(freedom: float) -> float:
    """Return the 97.5% point of Student's t."""
    from scipy.special import stdtrit  # scipy.stats takes ten times as long to import

    return float(stdtrit(freedom, 0.975))


@dataclass(frozen=True)
class SeededDifference:
    """A score of one method minus that of another, each over several trainings."""

    mean: float
    over_seeds: Interval | None
    """95% t-interval over paired seeds; None with one seed."""
    over_classes: Interval
    """95% interval over test classes, of the mean over seeds."""

    @property
    def ends(self) -> list[float]:
        """The ends of both intervals."""
        return [*self.over_classes, *(self.over_seeds or ())]

    @property
    def verdict(self) -> Verdict:
        """Above or below only if both intervals exclude zero."""
        if all(end > 0 for end in self.ends):
            return "above"
        return "below" if all(end < 0 for end in self.ends) else "indistinguishable"
