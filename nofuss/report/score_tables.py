"""The report's tables: scores, bounds, data, settings."""

from collections.abc import Mapping, Sequence
from typing import Any
from xml.etree.ElementTree import Element

from nofuss.proxies.bounds import Bound, Bounds
from nofuss.report.html import Child, tag

_SCORES = {"map@r": "MAP@R", "r_precision": "R-precision", "nmi": "NMI", "ami": "AMI"}


def score_table(scores: Mapping[str, Mapping[str, Any]]) -> Element:
    """A row a score, a column a method, in percent, the interval below; the best in bold."""
    first = next(iter(scores.values()))
    keys = [k for k in first if k.startswith("recall@") and not k.endswith("_interval")]
    rows = []
    for key in [*keys, *(k for k in _SCORES if k in first)]:
        values = [of.get(key) for of in scores.values()]
        best = max(v for v in values if v is not None)
        cells: list[Child] = []
        for value, of in zip(values, scores.values(), strict=True):
            ends = of.get(f"{key}_interval")
            interval = tag("small", f"{100 * ends[0]:.1f} to {100 * ends[1]:.1f}") if ends else None
            text = "–" if value is None else f"{100 * value:.2f}"
            cells.append(tag("td", text, interval, class_="n best" if value == best else "n"))
        name = _SCORES.get(key, key.replace("recall", "Recall"))
        rows.append(tag("tr", tag("th", name, scope="row"), cells))
    head = [tag("th", name, class_="n", scope="col") for name in scores]
    return table([tag("th", "%", scope="col"), *head], rows)


def bound_table(bounds: Bounds) -> Element:
    """Both sides of each inequality, their distance, and how often it fails."""
    lines: list[tuple[str, str, str, Bound]] = [
        ("ranking", "|x − y|", "2·max d(x, p(x))", bounds.ranking),
        (
            "expected ranking",
            "|x − y|",
            "Pr of |d(x,p(y)) − d(x,p(z))| ≤ 2·max d",
            bounds.expected_ranking,
        ),
        ("NCA, Prop. 4.1", "½|x − y|²", "2√ε", bounds.nca),
        ("triplet, Prop. 4.2", "|x − y|²", "4√ε", bounds.triplet),
    ]
    head = [
        "bound",
        "d(x, y)",
        "slack allowed",
        "over instances",
        "its bound",
        "difference",
        "violated",
    ]
    rows = [
        tag(
            "tr",
            tag("th", name, scope="row"),
            tag("td", d),
            tag("td", term),
            [tag("td", f"{v:.3f}", class_="n") for v in (b.left, b.right, b.slack)],
            tag("td", f"{100 * b.violations:.2g}%", class_="n"),
        )
        for name, d, term, b in lines
    ]
    numbers = ["", "", "", "n", "n", "n", "n"]
    cells = [
        tag("th", h, scope="col", class_=c or None) for h, c in zip(head, numbers, strict=True)
    ]
    return table(cells, rows)


def side_table(items: Mapping[str, int], classes: Mapping[str, Sequence[str]]) -> Element:
    """Items and classes of each side."""
    words = {"train": "trained on", "held_out": "held out", "test": "test"}
    rows = [
        tag(
            "tr",
            tag("th", words.get(side, side), scope="row"),
            tag("td", f"{count:,}", class_="n"),
            tag("td", f"{len(classes.get(side, ())):,}", class_="n"),
        )
        for side, count in items.items()
    ]
    head = [
        tag("th"),
        tag("th", "items", class_="n", scope="col"),
        tag("th", "classes", class_="n", scope="col"),
    ]
    return table(head, rows)


def settings(values: Mapping[str, Any]) -> Element:
    """Names and values in columns."""
    shown = {k: v for k, v in values.items() if v is not None}
    return tag("dl", [tag("div", tag("dt", k), tag("dd", str(v))) for k, v in shown.items()])


def table(head: Sequence[Element], rows: Sequence[Element]) -> Element:
    """A table that scrolls by itself where it is too wide."""
    content = tag("table", tag("thead", tag("tr", *head)), tag("tbody", *rows))
    return tag("div", content, class_="wide")
