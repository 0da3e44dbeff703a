"""Means with their intervals, and whether two methods can be told apart.

Two sources of chance are kept apart. Seeds: a t-interval over trainings. Classes: which classes
happen to be tested, by resampling them. A difference counts as shown only if it is beyond both.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, stdev
from typing import Any, Literal

import numpy as np

RESAMPLES = 2000
Interval = tuple[float, float]
Verdict = Literal["above", "below", "not told apart"]


def t_interval(values: Sequence[float]) -> Interval | None:
    """95% of Student's t around the mean; None for a single value."""
    if len(values) < 2:
        return None
    from scipy.stats import t

    half = float(t.ppf(0.975, len(values) - 1)) * stdev(values) / math.sqrt(len(values))
    return mean(values) - half, mean(values) + half


def summary(values: Sequence[float]) -> dict[str, Any]:
    """What results.json holds of a score over seeds."""
    ends = t_interval(values)
    return {"mean": mean(values), "interval": ends and list(ends), "seeds": list(values)}


@dataclass(frozen=True)
class Difference:
    """Recall@1 of one method less that of another, in shares."""

    mean: float
    over_seeds: Interval | None
    """95% t-interval over paired seeds; None with one seed."""
    over_classes: Interval
    """95% of resamples of the test classes, seeds averaged."""

    @property
    def verdict(self) -> Verdict:
        """Above or below only where both intervals leave out zero."""
        ends = [self.over_classes, *([self.over_seeds] if self.over_seeds else [])]
        if all(low > 0 for low, _ in ends):
            return "above"
        return "below" if all(high < 0 for _, high in ends) else "not told apart"


def difference(one: Sequence[dict[str, Any]], other: Sequence[dict[str, Any]]) -> Difference:
    """Compare results of the same seeds on the same test classes."""
    gaps = [a["recall@1"] - b["recall@1"] for a, b in zip(one, other, strict=True)]
    hits = np.mean([r["hits"] for r in one], 0) - np.mean([r["hits"] for r in other], 0)
    queries = np.asarray(one[0]["queries"], dtype=float)
    drawn = np.random.default_rng(0).integers(len(hits), size=(RESAMPLES, len(hits)))
    low, high = np.quantile(hits[drawn].sum(1) / queries[drawn].sum(1), [0.025, 0.975])
    return Difference(mean(gaps), t_interval(gaps), (float(low), float(high)))


def list_words(words: Sequence[str]) -> str:
    """a, b and c."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def span(ends: Interval | Sequence[float] | None, *, sign: bool = False) -> str:
    """An interval of shares in percent."""
    if ends is None:
        return "–"
    form = "+.2f" if sign else ".2f"
    return f"{100 * ends[0]:{form}} to {100 * ends[1]:{form}}".replace("-", "−")
