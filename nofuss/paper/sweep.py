"""A sweep: Recall@1 against one setting, a curve for each method or way of training.

Figures 6 and 7 (`fractional`, `dynamic`) and Section 5 (`batch-size`) differ in their curves and in
what is said about them; this file makes the table, the figure and the numbers of all three.
"""

from collections.abc import Mapping, Sequence
from statistics import mean
from typing import Any

from nofuss.paper.entry import Figure, Results, Series, Table, plus_minus, point
from nofuss.paper.statistics import summary
from nofuss.paper.trial import Result, Trial

Curves = Mapping[str, Mapping[float, list[Trial]]]
"""Curve → setting → its trainings, a seed each."""


def trials_of(curves: Curves) -> list[Trial]:
    """Return the trainings of all curves."""
    return [t for curve in curves.values() for some in curve.values() for t in some]


class Sweep:
    """The results of all curves."""

    def __init__(
        self, curves: Curves, results: Results, names: Mapping[str, str] | None = None
    ) -> None:
        self.names = names or {}
        """Curve → what readers call it, where that is not its key."""
        self.results: dict[str, dict[float, list[Result]]] = {
            name: {x: [results[t] for t in some] for x, some in curve.items()}
            for name, curve in curves.items()
        }

    def scores(self, score: str = "recall@1") -> dict[str, dict[float, list[float]]]:
        """Return curve → setting → a score of each seed."""
        return {
            name: {x: [float(result[score]) for result in some] for x, some in curve.items()}
            for name, curve in self.results.items()
        }

    def means(self, score: str = "recall@1") -> dict[str, dict[float, float]]:
        """Return curve → setting → the mean score over seeds."""
        return {
            name: {x: mean(values) for x, values in curve.items()}
            for name, curve in self.scores(score).items()
        }

    def summaries(self) -> dict[str, dict[str, Any]]:
        """Return Recall@1 of all curves as results.json has it."""
        return {
            name: {str(x): summary(values) for x, values in curve.items()}
            for name, curve in self.scores().items()
        }

    def table(
        self, title: str, corner: str, more: Mapping[str, Mapping[str, str]] | None = None
    ) -> Table:
        """Return a row a curve, a column a setting; `more` are columns, head → curve → cell."""
        scores, more = self.scores(), more or {}
        settings = sorted({x for curve in scores.values() for x in curve})
        rows = [
            [
                self.names.get(name, name),
                *(plus_minus(curve[x]) if x in curve else "–" for x in settings),
                *(column[name] for column in more.values()),
            ]
            for name, curve in scores.items()
        ]
        return Table(title, [corner, *(f"{x:g}" for x in settings), *more], rows)

    def figure(self, title: str, x: str, *, levels: Sequence[tuple[str, float]] = ()) -> Figure:
        """Return a line a curve over the setting, whose axis is logarithmic."""
        series = [
            Series(self.names.get(name, name), [point(at, values) for at, values in curve.items()])
            for name, curve in self.scores().items()
        ]
        return Figure(title, x, series, log=True, levels=list(levels))
