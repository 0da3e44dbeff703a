"""What an experiment found: tables, figures, a verdict with one sentence; and report.html of all.

An entry is plain data, stored in results.json; the page is drawn from nothing else, and requests
nothing else.
"""

import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import mean
from typing import Any, Literal

import numpy as np
from markupsafe import Markup

from nofuss.evaluate.intervals import Interval, SeededDifference, class_interval, t_interval
from nofuss.paper.published import METHODS, NAMES
from nofuss.paper.trials import Result, Results, Trial, has_collapsed
from nofuss.report import render
from nofuss.report.figures import Point, line_chart
from nofuss.report.sections import Section

Verdict = Literal["confirmed", "partly confirmed", "contradicted", "undecided", "shown"]
"""Of what the paper says; "shown" where it says nothing that could be wrong."""


@dataclass(frozen=True)
class Table:
    """Text in cells; the first column names the row."""

    title: str
    head: list[str]
    rows: list[list[str]]


@dataclass(frozen=True)
class Series:
    """A line of a figure."""

    name: str
    points: list[Point]


@dataclass(frozen=True)
class Figure:
    """Lines over x, with named levels to compare with."""

    title: str
    x: str
    series: list[Series]
    percent: bool = True
    log: bool = False
    levels: list[tuple[str, float]] = field(default_factory=list)


@dataclass(frozen=True)
class Entry:
    """A table or figure of the paper, reproduced."""

    title: str
    claim: str
    """What the paper says."""
    verdict: Verdict
    sentence: str
    """What was found."""
    tables: list[Table] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)
    """The numbers, as fractions."""
    grid: str | None = None
    """The key of the trial whose result holds rows of pictures."""


# Numbers over seeds


def recalls(results: Iterable[Result]) -> list[float]:
    """Return Recall@1 of each result."""
    return [float(result["recall@1"]) for result in results]


def summary(values: Sequence[float]) -> dict[str, Any]:
    """Return a score over seeds as results.json holds it."""
    ends = t_interval(values)
    return {"mean": mean(values), "interval": ends and list(ends), "seeds": list(values)}


def point(x: float, values: Sequence[float]) -> Point:
    """Return a point of a series: the mean over seeds and its t-interval."""
    low, high = t_interval(values) or (None, None)
    return x, mean(values), low, high


def plus_minus(values: Sequence[float]) -> str:
    """Return mean ± half the t-interval, in percent."""
    ends = t_interval(values)
    half = "" if ends is None else f" ± {100 * (ends[1] - mean(values)):.2f}"
    return f"{100 * mean(values):.2f}{half}"


def difference(one: Sequence[Result], other: Sequence[Result]) -> SeededDifference:
    """Compare Recall@1 of the same seeds on the same test classes."""
    gaps = [a - b for a, b in zip(recalls(one), recalls(other), strict=True)]
    hits = np.mean([r["hits"] for r in one], 0) - np.mean([r["hits"] for r in other], 0)
    queries = np.asarray(one[0]["queries"])
    tested = np.flatnonzero(queries)  # a class with one item has no query
    ends = class_interval(hits[tested], queries[tested], (-1.0, 1.0))
    return SeededDifference(mean(gaps), t_interval(gaps), ends)


# Words


def list_words(words: Sequence[str]) -> str:
    """Return "a, b and c"."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def signed(value: float) -> str:
    """Return a difference of fractions in points."""
    return f"{100 * value:+.2f}".replace("-", "−")


def span(ends: Interval | None) -> str:
    """Return an interval of differences in points."""
    return "–" if ends is None else f"{signed(ends[0])} to {signed(ends[1])}"


def certainty(differences: Iterable[SeededDifference]) -> str:
    """Say how certain verdicts are; some of many will be wrong."""
    several = all(d.over_seeds for d in differences)
    over = "over seeds and over classes" if several else "over classes alone: one seed"
    return f"95%, each by itself, {over}"


def collapses(results_of: Mapping[str, Sequence[Result]]) -> str:
    """Name the methods whose trainings collapsed; "" if none did."""
    counts = {m: sum(map(has_collapsed, results)) for m, results in results_of.items()}
    words = [
        f"{NAMES.get(m, m)} collapsed in {count} of {len(results_of[m])} trainings"
        for m, count in counts.items()
        if count
    ]
    return f" {list_words(words)}: all embeddings point the same way." if words else ""


# A sweep: Recall@1 against one setting


@dataclass(frozen=True)
class Sweep:
    """Recall@1 against one setting, a curve for each method or way of training."""

    results: dict[str, dict[float, list[Result]]]
    """Curve → setting → its results, one per seed."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Curve → what readers call it, where that is not its key."""

    def means(self, score: str = "recall@1") -> dict[str, dict[float, float]]:
        """Return curve → setting → the mean score over seeds."""
        return {
            name: {x: mean(float(r[score]) for r in some) for x, some in curve.items()}
            for name, curve in self.results.items()
        }

    def summaries(self) -> dict[str, dict[str, Any]]:
        """Return Recall@1 of all curves as results.json has it."""
        return {
            name: {str(x): summary(recalls(some)) for x, some in curve.items()}
            for name, curve in self.results.items()
        }

    def table(
        self, title: str, corner: str, more: Mapping[str, Mapping[str, str]] | None = None
    ) -> Table:
        """Return a row per curve, a column per setting; `more` are columns, head → curve → cell."""
        more = more or {}
        settings = sorted({x for curve in self.results.values() for x in curve})
        rows = [
            [
                self.names.get(name, name),
                *(plus_minus(recalls(curve[x])) if x in curve else "–" for x in settings),
                *(column[name] for column in more.values()),
            ]
            for name, curve in self.results.items()
        ]
        return Table(title, [corner, *(f"{x:g}" for x in settings), *more], rows)

    def figure(self, title: str, x: str, *, levels: Mapping[str, float] | None = None) -> Figure:
        """Return a line per curve over the setting, whose axis is logarithmic."""
        series = [
            Series(self.names.get(name, name), [point(at, recalls(rs)) for at, rs in curve.items()])
            for name, curve in self.results.items()
        ]
        return Figure(title, x, series, log=True, levels=list((levels or {}).items()))


Curves = Mapping[str, Mapping[float, list[Trial]]]
"""Curve → setting → its trainings, one per seed."""


def trials_of(curves: Curves) -> list[Trial]:
    """Return the trainings of all curves."""
    return [t for curve in curves.values() for some in curve.values() for t in some]


def results_of(curves: Curves, results: Results) -> dict[str, dict[float, list[Result]]]:
    """Return the results of all curves."""
    return {
        name: {x: [results[t] for t in some] for x, some in curve.items()}
        for name, curve in curves.items()
    }


# report.html

Grid = Callable[[str], list[Section]]
"""From a trial's key to the rows of pictures that it stored."""


def results_page(entries: Sequence[dict[str, Any]], grid: Grid) -> bytes:
    """Return the page of all entries, in their order."""
    shown = [
        {
            **entry,
            "anchor": f"{entry['name']}-{entry['data']}-{entry['budget']}",
            "charts": [_chart(figure) for figure in entry["figures"]],
            "grid": grid(entry["grid"]) if entry.get("grid") else [],
            "made": _made(entry),
        }
        for entry in entries
    ]
    return render("paper/page.html", title="The paper, reproduced", entries=shown)


def _made(entry: dict[str, Any]) -> str:
    """Return the command, its budget and the machine in a line."""
    machine, seeds = entry["machine"], len(entry["seeds"])
    return (
        f"{shlex.join(['nofuss', *entry['command']])} · budget {entry['budget']} · "
        f"{seeds} {'seeds' if seeds > 1 else 'seed'} · "
        f"{machine['device']}, {machine['cores']} cores, {machine['threads']} threads, torch "
        f"{machine['versions']['torch']} · {entry['trained']}"
    )


def _chart(figure: dict[str, Any]) -> Markup:
    """Draw a figure; a method looks the same in every one whose lines are all methods."""
    methods = list(METHODS.values())
    names = [series["name"] for series in figure["series"]]
    known = [methods.index(name) for name in names if name in methods]
    return line_chart(
        [(series["name"], [tuple(p) for p in series["points"]]) for series in figure["series"]],
        title=figure["title"],
        x_label=figure["x"],
        percent=figure["percent"],
        log=figure["log"],
        levels=[tuple(level) for level in figure["levels"]],
        styles=known if len(known) == len(names) else None,
    )
