"""report.html of a reproduction, drawn from the entries of results.json; requests nothing else."""

import shlex
from collections.abc import Callable, Sequence
from typing import Any

from markupsafe import Markup

from nofuss.paper.published import METHODS
from nofuss.report.charts import line_chart
from nofuss.report.grids import GridGroup
from nofuss.report.templates import render as render_template

Grid = Callable[[str], list[GridGroup]]
"""From a trial's key to the rows of pictures that it stored."""


def results_page(entries: Sequence[dict[str, Any]], grid: Grid) -> bytes:
    """Return the page of all entries, in their order."""
    shown = [
        {
            **entry,
            "anchor": anchor(entry),
            "charts": [_chart(figure) for figure in entry["figures"]],
            "grid": grid(entry["grid"]) if entry.get("grid") else [],
            "made": _made(entry),
        }
        for entry in entries
    ]
    return render_template("paper/results_page.html", title="The paper, reproduced", entries=shown)


def anchor(entry: dict[str, Any]) -> str:
    """Return the id of an entry's section."""
    return f"{entry['name']}-{entry['data']}-{entry['budget']}"


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
