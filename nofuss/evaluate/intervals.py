"""Chance in scores: which classes happen to be tested, and the seeds of training.

Classes are resampled whole, since the queries of a class succeed and fail together; intervals over
single queries would be too narrow. Over seeds there is a t-interval. A difference between methods
counts only if it is beyond both.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, stdev
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from nofuss.evaluate.checked import classes_of
from nofuss.geometry import Array, as_tensor

DRAWN = 2**18
"""Classes that are drawn at once."""
Interval = tuple[float, float]
Verdict = Literal["above", "below", "indistinguishable"]


def class_intervals(
    results: dict[str, Tensor], classes: Tensor, *, seed: int, resamples: int
) -> dict[str, tuple[float, float]]:
    """Return 95% percentile intervals of the mean results (Q,) over classes drawn with repeats."""
    if resamples < 0:
        raise ValueError(f"bootstrap is {resamples}; expected 0 (no intervals) or more")
    if resamples == 0:
        return {}
    _, group, sizes = torch.unique(classes, return_inverse=True, return_counts=True)
    # A class's queries are drawn together, so a resample only needs its sums.
    sums = torch.stack([torch.bincount(group, values) for values in results.values()], 1)
    generator, count = torch.Generator().manual_seed(seed), len(sizes)
    means = torch.empty(resamples, len(results), dtype=torch.float64)
    for part in torch.split(means, max(1, DRAWN // count)):
        drawn = torch.randint(count, (len(part), count), generator=generator)
        torch.div(sums[drawn].sum(1), sizes[drawn].sum(1)[:, None], out=part)
    low, high = means.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64), dim=0).tolist()
    return {name: (low[i], high[i]) for i, name in enumerate(results)}


class Difference(NamedTuple):
    """The mean of a − b over the queries, and its 95% interval over classes."""

    mean: float
    low: float
    high: float


def paired_difference(
    a: Array, b: Array, labels: Array, seed: int = 0, *, resamples: int = 2000
) -> Difference:
    """Return the mean of a − b over queries, and its 95% interval over classes drawn with repeats.

    a and b are scores (Q,) of the same queries by two models, labels (Q,) their classes. Pairing
    removes what both have in common: some classes are hard for every model.
    """
    first, second = as_tensor(a).detach().cpu().double(), as_tensor(b).detach().cpu().double()
    if first.ndim != 1 or first.shape != second.shape or not len(first):
        shapes = f"{tuple(first.shape)} and {tuple(second.shape)}"
        raise ValueError(f"scores have shapes {shapes}; expected one score a query in both")
    gap = first - second
    if not gap.isfinite().all():
        raise ValueError("scores hold NaN or infinity; pass the scores of queries only")
    if resamples < 1:
        raise ValueError(f"resamples is {resamples}; expected 1 or more")
    classes = classes_of(labels, len(gap))
    ends = class_intervals({"gap": gap}, classes, seed=seed, resamples=resamples)["gap"]
    return Difference(float(gap.mean()), *ends)


def t_interval(values: Sequence[float]) -> Interval | None:
    """Return the 95% interval of Student's t around the mean; None for a single value."""
    if len(values) < 2:
        return None
    from scipy.stats import t

    half = float(t.ppf(0.975, len(values) - 1)) * stdev(values) / math.sqrt(len(values))
    return mean(values) - half, mean(values) + half


@dataclass(frozen=True)
class SeededDifference:
    """A score of one method minus that of another, each over several trainings."""

    mean: float
    over_seeds: Interval | None
    """95% t-interval over paired seeds; None with one seed."""
    over_classes: Interval
    """95% interval over resampled test classes, of the mean over seeds."""

    @property
    def verdict(self) -> Verdict:
        """Above or below only if both intervals exclude zero."""
        ends = [self.over_classes, *([self.over_seeds] if self.over_seeds else [])]
        if all(low > 0 for low, _ in ends):
            return "above"
        return "below" if all(high < 0 for _, high in ends) else "indistinguishable"
