"""Made-up results, to see which words follow from which numbers."""

import math
from typing import Any

from nofuss.evaluate.intervals import SeededDifference


def result(fraction: float, *, classes: int = 40, queries: int = 50) -> dict[str, Any]:
    """Every class alike, but for a ripple that the classes of all methods have in common."""
    hits = [round(queries * fraction + math.sin(c)) for c in range(classes)]
    return {
        "recall@1": sum(hits) / (queries * classes),
        "hits": hits,
        "queries": [queries] * classes,
        "spread": 0.5,
        "spread_before": 0.5,
    }


def gap(mean: float, *, sure: bool = True) -> SeededDifference:
    """A difference that is shown, or one that is not."""
    ends = (mean - 0.001, mean + 0.001) if sure else (-1.0, 1.0)
    return SeededDifference(mean, ends, ends)
