"""What an experiment found: tables, figures, a verdict with one sentence; and report.html of all.

An entry is plain data, stored in results.json; the page is drawn from nothing else, and requests
nothing else.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import mean
from typing import Any, Literal

import numpy as np
from markupsafe import Markup

from nofuss.evaluate.intervals import Interval, SeededDifference, class_interval, t_interval
from nofuss.paper.published import METHODS
from nofuss.paper.trials import Result
from nofuss.report import render
from nofuss.report.figures import Point, line_chart
from nofuss.report.sections import Section

Verdict = Literal["confirmed", "partly confirmed", "contradicted", "undecided", "shown"]
"""Of what the paper says; "shown" where it says nothing that could be wrong."""
CERTAINTY = "95%, each by itself, over classes and, of several seeds, over seeds"
"""How certain differences are: some of many will be wrong."""


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


# Numbers over seeds, and their words


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


def list_words(words: Sequence[str]) -> str:
    """Return "a, b and c"."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def signed(value: float) -> str:
    """Return a difference of fractions in points."""
    return f"{100 * value:+.2f}".replace("-", "−")


def span(ends: Interval | None) -> str:
    """Return an interval of differences in points."""
    return "–" if ends is None else f"{signed(ends[0])} to {signed(ends[1])}"


def word_of(found: Collection[str]) -> Verdict:
    """Return what becomes of a claim that something is above, by the verdicts of its parts."""
    if set(found) == {"above"}:
        return "confirmed"
    return "contradicted" if "below" in found else "undecided"


# A sweep: Recall@1 against one setting, a curve for each method or way of training

Curves = Mapping[str, Mapping[float, Sequence[Result]]]
"""Curve → setting → its results, one per seed."""


def means(curves: Curves, score: str = "recall@1") -> dict[str, dict[float, float]]:
    """Return curve → setting → the mean score over seeds."""
    return {
        name: {x: mean(float(r[score]) for r in some) for x, some in curve.items()}
        for name, curve in curves.items()
    }


def summaries(curve: Mapping[float, Sequence[Result]]) -> dict[str, Any]:
    """Return Recall@1 of a curve as results.json has it."""
    return {str(x): summary(recalls(some)) for x, some in curve.items()}


def sweep(
    curves: Curves, names: Mapping[str, str], of: str, axis: str, levels: Mapping[str, float]
) -> tuple[Table, Figure]:
    """Return a table with a row per curve, and a figure with a line; the setting's axis is log."""
    settings = sorted({x for curve in curves.values() for x in curve})
    rows, series = [], []
    for key, curve in curves.items():
        name = names.get(key, key)
        cells = (plus_minus(recalls(curve[x])) if x in curve else "–" for x in settings)
        rows.append([name, *cells])
        series.append(Series(name, [point(at, recalls(some)) for at, some in curve.items()]))
    about = f"Recall@1, %, by {of}; ± is the 95% t-interval over seeds"
    return (
        Table(about, ["", *(f"{x:g}" for x in settings)], rows),
        Figure(f"Recall@1 against {of}", axis, series, log=True, levels=list(levels.items())),
    )


# report.html


def results_page(entries: Sequence[dict[str, Any]], grid: Callable[[str], list[Section]]) -> bytes:
    """Return the page of all entries, in their order; `grid` finds a trial's rows of pictures."""
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
    machine = entry["machine"]
    return (
        f"{entry['command']} · budget {entry['budget']} · seeds {len(entry['seeds'])} · "
        f"{machine['device']}, {machine['cores']} cores, "
        f"{machine['threads']} threads, torch {machine['versions']['torch']} · {entry['trained']}"
    )


def _chart(figure: dict[str, Any]) -> Markup:
    """Draw a figure; a method looks the same in every one whose lines are all methods."""
    methods = list(METHODS.values())
    names = [series["name"] for series in figure["series"]]
    return line_chart(
        [(series["name"], [tuple(p) for p in series["points"]]) for series in figure["series"]],
        title=figure["title"],
        x_label=figure["x"],
        percent=figure["percent"],
        log=figure["log"],
        levels=[tuple(level) for level in figure["levels"]],
        styles=[methods.index(n) for n in names] if set(names) <= set(methods) else None,
    )
