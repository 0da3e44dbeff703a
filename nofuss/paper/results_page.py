"""report.html of a reproduction, drawn from the entries of results.json; asks for nothing else."""

import shlex
from collections.abc import Callable, Sequence
from importlib.resources import files
from typing import Any
from xml.etree.ElementTree import Element

from nofuss.paper.published import METHODS
from nofuss.report.charts import line_chart
from nofuss.report.html import document, from_fragment, tag
from nofuss.report.report import POLICY
from nofuss.report.score_tables import table

Grid = Callable[[str], str | None]
"""The rows of pictures that a trial kept."""


def render(entries: Sequence[dict[str, Any]], grid: Grid) -> bytes:
    """The page of all entries, in their order."""
    style = files("nofuss.report").joinpath("report.css").read_text(encoding="utf-8")
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=POLICY),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("title", "The paper, reproduced · nofuss"),
        tag("style", style),
    )
    links = [tag("a", e["title"], href=f"#{anchor(e)}") for e in entries]
    header = tag(
        "header",
        tag("h1", "The paper, reproduced"),
        tag(
            "div",
            "No Fuss Distance Metric Learning using Proxies (ICCV 2017): its tables and figures, "
            "run again, with its own numbers beside ours.",
            class_="soft",
        ),
        tag("nav", links, aria_label="Sections"),
    )
    body = tag("body", header, tag("main", [_section(e, grid) for e in entries]))
    return document(tag("html", head, body, lang="en"))


def anchor(entry: dict[str, Any]) -> str:
    """Where an entry stands on the page."""
    return f"{entry['name']}-{entry['data']}-{entry['budget']}"


def _section(entry: dict[str, Any], grid: Grid) -> Element:
    machine = entry["machine"]
    made = (
        f"{shlex.join(['nofuss', *entry['command']])} · budget {entry['budget']} · "
        f"{len(entry['seeds'])} {'seeds' if len(entry['seeds']) > 1 else 'seed'} · "
        f"{machine['device']}, {machine['cores']} cores, {machine['threads']} threads, torch "
        f"{machine['versions']['torch']} · {entry['trained']}"
    )
    pictures = grid(entry["grid"]) if entry.get("grid") else None
    return tag(
        "section",
        tag("h2", entry["title"]),
        tag("p", tag("b", "The paper: "), entry["claim"]),
        tag("p", tag("b", "Here: "), entry["verdict"][0]),
        [tag("p", line) for line in entry["verdict"][1:]],
        [_table(t) for t in entry["tables"]],
        tag("div", [tag("figure", _figure(f)) for f in entry["figures"]], class_="charts")
        if entry["figures"]
        else None,
        from_fragment(pictures) if pictures else None,
        [tag("p", line, class_="soft") for line in entry["how"]],
        tag("pre", tag("code", made)),
        id=anchor(entry),
    )


def _figure(figure: dict[str, Any]) -> Element:
    methods = list(METHODS.values())
    names = [s["name"] for s in figure["series"]]
    known = [methods.index(name) for name in names if name in methods]
    return line_chart(
        [(s["name"], [tuple(p) for p in s["points"]]) for s in figure["series"]],
        title=figure["title"],
        x_label=figure["x"],
        percent=figure["percent"],
        log=figure["log"],
        levels=[tuple(level) for level in figure["levels"]],
        styles=known if len(known) == len(names) else None,
    )


def _table(content: dict[str, Any]) -> Element:
    first, *others = content["head"]
    head = [tag("th", first, scope="col"), *(tag("th", h, scope="col", class_="n") for h in others)]
    rows = []
    for row in content["rows"]:
        cells = [tag("td", cell, class_="n") for cell in row[1:]]
        blank = [tag("td") for _ in content["head"][len(row) :]]
        rows.append(tag("tr", tag("th", row[0], scope="row"), cells, blank))
    return tag("div", tag("h3", content["title"]), table(head, rows))
