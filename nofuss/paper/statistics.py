"""Means with their intervals, and whether two methods can be distinguished.

There are two sources of chance. Seeds: a t-interval over trainings. Classes: which classes happen
to be tested, by the bootstrap over classes. A difference counts as shown only if it is beyond both.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, stdev
from typing import Any, Literal

import numpy as np
import torch

from nofuss.evaluate.intervals import class_intervals

RESAMPLES = 2000
Interval = tuple[float, float]
Verdict = Literal["above", "below", "indistinguishable"]


def t_interval(values: Sequence[float]) -> Interval | None:
    """Return the 95% interval of Student's t around the mean; None for a single value."""
    if len(values) < 2:
        return None
    from scipy.stats import t

    half = float(t.ppf(0.975, len(values) - 1)) * stdev(values) / math.sqrt(len(values))
    return mean(values) - half, mean(values) + half


def summary(values: Sequence[float]) -> dict[str, Any]:
    """Return a score over seeds as results.json holds it."""
    ends = t_interval(values)
    return {"mean": mean(values), "interval": ends and list(ends), "seeds": list(values)}


@dataclass(frozen=True)
class Difference:
    """Recall@1 of one method minus that of another, as shares."""

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


def difference(one: Sequence[dict[str, Any]], other: Sequence[dict[str, Any]]) -> Difference:
    """Compare results of the same seeds on the same test classes."""
    gaps = [a["recall@1"] - b["recall@1"] for a, b in zip(one, other, strict=True)]
    hits = np.mean([r["hits"] for r in one], 0) - np.mean([r["hits"] for r in other], 0)
    queries = np.asarray(one[0]["queries"])
    tested = np.flatnonzero(queries)  # a class with one item has no query
    # Resampling classes needs only their sums, so each query may stand for its class's mean.
    classes = np.repeat(tested, queries[tested])
    means = hits[classes] / queries[classes]
    ends = class_intervals(
        {"gap": torch.from_numpy(means)}, torch.from_numpy(classes), seed=0, resamples=RESAMPLES
    )
    return Difference(mean(gaps), t_interval(gaps), ends["gap"])


def list_words(words: Sequence[str]) -> str:
    """Return "a, b and c"."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def span(ends: Interval | Sequence[float] | None, *, sign: bool = False) -> str:
    """Return an interval of shares in percent."""
    if ends is None:
        return "–"
    form = "+.2f" if sign else ".2f"
    return f"{100 * ends[0]:{form}} to {100 * ends[1]:{form}}".replace("-", "−")
