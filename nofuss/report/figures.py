"""Figures of the report as SVG: few marks, values beside them, readable in grey, no script.

Drawn here and not by matplotlib. Both were looked at side by side for a line chart and a map:
matplotlib's SVG has fixed colours, which do not follow dark mode and print as these do (colours
and type come from report.css), names lines in a legend instead of where they end, needs a label
for screen readers to be added, and takes about twice the bytes.
"""

import math
from collections.abc import Sequence
from typing import Any
from xml.etree.ElementTree import Element

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

from nofuss.report.svg import drawing, shape, text

COLOURS = 6  # --c0 … --c5 of report.css


def score_chart(scores: Sequence[tuple[str, float, tuple[float, float] | None]]) -> Markup:
    """Draw a row for each method: its score as a point, its 95% interval as a line.

    The first method is the run's, and stands out.
    """
    width, right, step = 480, 40, 30
    left = 26 + 6.6 * max(len(shorten(name, 28)) for name, _, _ in scores)
    low = min(interval[0] if interval else value for _, value, interval in scores)
    high = max(interval[1] if interval else value for _, value, interval in scores)
    first = math.floor(max(0.0, low - 0.03) * 20) / 20
    last = min(1.0, math.ceil((high + 0.01) * 20) / 20)
    span = max(last - first, 0.05)

    def x_of(value: float) -> float:
        return left + (width - left - right) * (value - first) / span

    height = step * len(scores) + 26
    marks: list[Element] = []
    steps = ticks(first, last, 4)
    for tick, label in zip(steps, percent_labels(steps), strict=True):
        x = x_of(tick)
        marks.append(shape("line", x1=x, x2=x, y1=4, y2=height - 22, class_="grid"))
        marks.append(text(x, height - 6, label, anchor="middle", class_="soft"))
    for i, (name, value, interval) in enumerate(scores):
        x, y = x_of(value), 18 + step * i
        kind = "other" if i else "point"
        marks.append(text(left - 14, y + 4, shorten(name, 28), anchor="end"))
        if interval:
            bar = {"x1": x_of(interval[0]), "x2": x_of(interval[1]), "y1": y, "y2": y}
            stroke = None if i else "var(--accent)"
            marks.append(shape("line", **bar, class_=kind, stroke_width=2, stroke=stroke))
        if i:
            marks.append(shape("rect", x=x - 4, y=y - 4, width=8, height=8, class_=kind))
        else:
            marks.append(shape("circle", cx=x, cy=y, r=5, class_=kind))
        end = x_of(interval[1]) if interval else x
        marks.append(text(max(end, x) + 10, y + 4, f"{100 * value:.1f}"))
    return drawing(width, height, "Recall@1 with 95% intervals", marks)


def curve(values: Sequence[float], *, title: str, percent: bool = False) -> Markup:
    """Draw one value for each epoch, from the first on."""
    width, height, left, right, top, bottom = 420, 210, 48, 52, 26, 30
    low, high = min(values), max(values)
    if high - low < 1e-9:
        low, high = low - 0.5 * abs(low or 1), high + 0.5 * abs(high or 1)
    steps = ticks(low, high, 4)
    low, high = min(low, steps[0]), max(high, steps[-1])

    def x_of(i: int) -> float:
        share = i / (len(values) - 1) if len(values) > 1 else 0.5
        return left + share * (width - left - right)

    def y_of(value: float) -> float:
        return height - bottom - (value - low) / (high - low) * (height - top - bottom)

    def show(value: float) -> str:
        return f"{100 * value:.1f}%" if percent else f"{value:.3g}"

    marks = [text(0, 13, title, class_="halo")]
    labels = percent_labels(steps) if percent else [show(tick) for tick in steps]
    for tick, label in zip(steps, labels, strict=True):
        y = y_of(tick)
        marks.append(shape("line", x1=left, x2=width - right, y1=y, y2=y, class_="grid"))
        marks.append(text(left - 8, y + 4, label, anchor="end", class_="soft"))
    points = [(x_of(i), y_of(value)) for i, value in enumerate(values)]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    marks.append(shape("polyline", points=path, class_="curve"))
    if len(points) <= 40:
        marks += [shape("circle", cx=x, cy=y, r=3, class_="point") for x, y in points]
    x, y = points[-1]
    marks.append(text(x + 8, y + 4, show(values[-1])))
    for epoch in sorted({1, len(points)}):
        x = points[epoch - 1][0]
        marks.append(text(x, height - 8, f"epoch {epoch}", anchor="middle", class_="soft"))
    return drawing(width, height, f"{title}: {show(values[0])} to {show(values[-1])}", marks)


def class_sizes(sizes: NDArray[np.int64]) -> Markup:
    """Draw a histogram: how many classes have how many items."""
    width, height, bottom = 420, 150, 30
    most = int(sizes.max())
    edges = np.unique(np.linspace(int(sizes.min()), most + 1, 16).round())
    if len(edges) < 2:
        edges = np.array([most, most + 1])
    counts, _ = np.histogram(sizes, edges)
    step = width / len(counts)
    marks = []
    for i, count in enumerate(counts):
        length = (height - bottom - 20) * count / counts.max()
        y = height - bottom - length
        marks.append(
            shape("rect", x=i * step + 1, y=y, width=step - 2, height=length, class_="bar")
        )
        # Only the highest bars and the outermost are labelled: all would touch.
        if count == counts.max() or (count and i in (0, len(counts) - 1)):
            marks.append(text((i + 0.5) * step, y - 5, f"{count:,}", anchor="middle"))
    axis = height - bottom
    marks.append(shape("line", x1=0, x2=width, y1=axis, y2=axis, class_="grid"))
    marks.append(text(0, height - 12, f"{int(edges[0]):,} items per class", class_="soft"))
    if len(counts) > 1:
        marks.append(text(width, height - 12, f"{most:,}", anchor="end", class_="soft"))
    return drawing(width, height, "Class sizes", marks)


def map_panel(
    places: NDArray[Any],
    shown: NDArray[np.bool_],
    labels: NDArray[np.int64],
    names: Sequence[str],
    *,
    title: str,
    stars: NDArray[Any] | None = None,
    star_labels: NDArray[np.int64] | None = None,
    most: int = 10,
) -> Markup:
    """Draw items on a plane: those `shown` in ink, the others faint, the largest classes named.

    `places` and `stars` (the proxies) lie between 0 and 1; at most `most` classes have a name and
    a colour.
    """
    width, height, pad = 470, 430, 10
    scale, offset = [width - 2 * pad, height - 2 * pad - 22], [0, 22]  # the title is above
    points = pad + places * scale + offset
    classes, counts = np.unique(labels[shown & (labels >= 0)], return_counts=True)
    named = classes[np.lexsort((classes, -counts))][:most] if len(classes) else classes
    colours = {int(c): f"var(--c{i % COLOURS})" for i, c in enumerate(named)}
    marks = [text(0, 12, title, class_="halo")]
    marks += [shape("circle", cx=x, cy=y, r=1.6, class_="far") for x, y in points[~shown]]
    for (x, y), label in zip(points[shown], labels[shown], strict=True):
        fill = colours.get(int(label))
        style = {"r": 3, "fill": fill} if fill else {"r": 2, "class_": "near"}
        marks.append(shape("circle", cx=x, cy=y, **style))
    if stars is not None and star_labels is not None:
        for (x, y), label in zip(pad + stars * scale + offset, star_labels, strict=True):
            fill = colours.get(int(label))
            path = _star(x, y, 8 if fill else 6)
            marks.append(shape("path", d=path, class_="star", fill=fill or "var(--ink)"))
    # A name stands above the middle of its class, or lower where another name is already.
    written: list[tuple[float, float, float]] = []  # centre x, y and half the width of each name
    for c in named:
        name = shorten(names[int(c)], 16)
        half = 3.8 * len(name) + 3
        x, y = np.median(points[shown & (labels == c)], axis=0) - [0, 10]
        x = min(max(x, half), width - half)
        while any(abs(x - x2) < half + half2 and abs(y - y2) < 13 for x2, y2, half2 in written):
            y += 13
        written.append((x, y, half))
        marks.append(text(x, y, name, anchor="middle", class_="halo", fill=colours[int(c)]))
    return drawing(width, height, title, marks)


def _star(x: float, y: float, radius: float) -> str:
    """Return the path of a five-pointed star."""
    corners = [(math.pi * (i / 5 - 0.5), radius * (0.42 if i % 2 else 1)) for i in range(10)]
    points = [f"{x + r * math.cos(a):.1f},{y + r * math.sin(a):.1f}" for a, r in corners]
    return f"M{'L'.join(points)}Z"


def ticks(low: float, high: float, count: int) -> list[float]:
    """Return about `count` round numbers within low … high; one where both are equal."""
    if low == high:
        return [low]
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(s * power for s in (1, 2, 2.5, 5, 10) if s * power >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [step * i for i in range(first, math.floor(high / step + 1e-9) + 1)] or [low, high]


def percent_labels(shares: Sequence[float]) -> list[str]:
    """Return ticks in percent with as many decimals as they need, so that no label is rounded."""
    percents = [100 * share for share in shares]
    exact = (d for d in range(3) if all(abs(p - round(p, d)) < 1e-9 for p in percents))
    digits = next(exact, 1)  # a tick that is no round number
    return [f"{p:.{digits}f}%" for p in percents]


def shorten(words: str, most: int) -> str:
    """Return at most so many characters, the last an ellipsis where some are missing."""
    return words if len(words) <= most else words[: most - 1] + "…"
