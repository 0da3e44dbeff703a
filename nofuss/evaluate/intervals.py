"""Chance in scores: which classes happen to be tested, and the seeds of training.

Classes are resampled whole, since the queries of a class succeed and fail together; intervals over
single queries would be too narrow. Percentiles of resamples are too narrow for few classes, so they
are widened as a t-interval is. Over seeds there is a t-interval. A difference between methods
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
Z95 = 1.959964
"""Half of a 95% interval in standard deviations, where these are known."""
Interval = tuple[float, float]
Verdict = Literal["above", "below", "indistinguishable"]


def class_intervals(
    results: dict[str, Tensor],
    classes: Tensor,
    *,
    seed: int,
    resamples: int,
    within: Interval = (0.0, 1.0),
) -> dict[str, Interval]:
    """Return 95% intervals of the mean results (Q,) over classes drawn with repeats.

    within: what a mean can be at all; by default the results are shares.
    """
    if resamples < 0:
        raise ValueError(f"bootstrap is {resamples}; expected 0 (no intervals) or more")
    if resamples == 0:
        return {}
    _, group, sizes = torch.unique(classes, return_inverse=True, return_counts=True)
    # A class's queries are drawn together, so a resample only needs its sums.
    sums = torch.stack([torch.bincount(group, values) for values in results.values()], 1)
    means = resampled_means(sums, sizes[:, None], seed=seed, resamples=resamples)
    return {
        name: widened(means[:, i], float(values.double().mean()), len(sizes), within=within)
        for i, (name, values) in enumerate(results.items())
    }


def resampled_means(sums: Tensor, sizes: Tensor, *, seed: int, resamples: int) -> Tensor:
    """Return means (resamples, R) over groups drawn with repeats, from their sums and sizes (C, R).

    NaN where none of the drawn groups has any item.
    """
    generator, count = torch.Generator().manual_seed(seed), len(sums)
    means = torch.empty(resamples, sums.shape[1], dtype=torch.float64)
    for part in torch.split(means, max(1, DRAWN // count)):
        drawn = torch.randint(count, (len(part), count), generator=generator)
        torch.div(sums[drawn].sum(1), sizes[drawn].sum(1), out=part)
    return means


def widened(resampled: Tensor, mean: float, groups: int, *, within: Interval) -> Interval:
    """Return the 95% interval of resampled means, as wide as so few groups demand.

    A percentile takes the spread of the groups that happen to be there for that of all: too little
    by √((C − 1)/C), and as if it were known, which Student's t corrects. One group says nothing.
    """
    from scipy.stats import t

    if groups < 2:
        return within
    factor = math.sqrt(groups / (groups - 1)) * float(t.ppf(0.975, groups - 1)) / Z95
    ends = torch.nanquantile(resampled, torch.tensor([0.025, 0.975], dtype=torch.float64))
    low, high = (mean + factor * (ends - mean)).tolist()
    return max(low, within[0]), min(high, within[1])


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
    most = 1.0 if gap.abs().max() <= 1 else math.inf  # shares differ by 1 at most
    ends = class_intervals(
        {"gap": gap}, classes, seed=seed, resamples=resamples, within=(-most, most)
    )
    return Difference(float(gap.mean()), *ends["gap"])


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
    def ends(self) -> list[float]:
        """The ends of both intervals."""
        return [*self.over_classes, *(self.over_seeds or ())]

    @property
    def verdict(self) -> Verdict:
        """Above or below only if both intervals exclude zero."""
        if all(end > 0 for end in self.ends):
            return "above"
        return "below" if all(end < 0 for end in self.ends) else "indistinguishable"
