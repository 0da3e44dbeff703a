"""Scores and differences of trials as results.json and the page's sentences have them."""

from collections.abc import Sequence
from statistics import mean
from typing import Any

import numpy as np
import torch

from nofuss.evaluate.intervals import Interval, SeededDifference, class_intervals, t_interval

RESAMPLES = 2000
NOT_TIMED = (
    "Some of these trainings ran beside other commands or on other machines: their seconds can't "
    "be compared."
)


def summary(values: Sequence[float]) -> dict[str, Any]:
    """Return a score over seeds as results.json holds it."""
    ends = t_interval(values)
    return {"mean": mean(values), "interval": ends and list(ends), "seeds": list(values)}


def difference(one: Sequence[dict[str, Any]], other: Sequence[dict[str, Any]]) -> SeededDifference:
    """Compare results of the same seeds on the same test classes."""
    gaps = [a["recall@1"] - b["recall@1"] for a, b in zip(one, other, strict=True)]
    hits = np.mean([r["hits"] for r in one], 0) - np.mean([r["hits"] for r in other], 0)
    queries = np.asarray(one[0]["queries"])
    tested = np.flatnonzero(queries)  # a class with one item has no query
    # Resampling classes needs only their sums, so each query may stand for its class's mean.
    classes = np.repeat(tested, queries[tested])
    means = hits[classes] / queries[classes]
    ends = class_intervals(
        {"gap": torch.from_numpy(means)},
        torch.from_numpy(classes),
        seed=0,
        resamples=RESAMPLES,
        within=(-1.0, 1.0),
    )
    return SeededDifference(mean(gaps), t_interval(gaps), ends["gap"])


def list_words(words: Sequence[str]) -> str:
    """Return "a, b and c"."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def span(ends: Interval | Sequence[float] | None, *, sign: bool = False) -> str:
    """Return an interval of shares in percent."""
    if ends is None:
        return "–"
    form = "+.2f" if sign else ".2f"
    return f"{100 * ends[0]:{form}} to {100 * ends[1]:{form}}".replace("-", "−")


def comparable_times(results: Sequence[dict[str, Any]]) -> bool:
    """Return whether all trainings ran on one machine."""
    return len({result.get("host") for result in results}) == 1
