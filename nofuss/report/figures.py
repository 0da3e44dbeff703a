"""Figures as SVG drawn by hand: few marks, values beside them, readable in grey, no script.

Colours and type come from report.css, so that a figure follows light, dark and print.
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
    """A row a method: the score as a point, its 95% interval as a line; the first is the run's."""
    width, right, step = 480, 40, 30
    left = 26 + 6.6 * max(len(short(name, 28)) for name, _, _ in scores)
    low = min(ends[0] if ends else value for _, value, ends in scores)
    high = max(ends[1] if ends else value for _, value, ends in scores)
    first = math.floor(max(0.0, low - 0.03) * 20) / 20
    last = min(1.0, math.ceil((high + 0.01) * 20) / 20)
    span = max(last - first, 0.05)

    def x(value: float) -> float:
        return left + (width - left - right) * (value - first) / span

    height = step * len(scores) + 26
    marks: list[Element] = []
    for tick in ticks(first, last, 4):
        place = x(tick)
        marks.append(shape("line", x1=place, x2=place, y1=4, y2=height - 22, class_="grid"))
        label = f"{100 * tick:.0f}%"
        marks.append(text(place, height - 6, label, anchor="middle", class_="soft"))
    for i, (name, value, ends) in enumerate(scores):
        y = 18 + step * i
        kind = "other" if i else "point"
        stroke = {"stroke": "var(--accent)"} if not i else {}
        marks.append(text(left - 14, y + 4, short(name, 28), anchor="end"))
        if ends:
            marks.append(
                shape(
                    "line",
                    x1=x(ends[0]),
                    x2=x(ends[1]),
                    y1=y,
                    y2=y,
                    class_=kind,
                    stroke_width=2,
                    **stroke,
                )
            )
        if i:
            marks.append(shape("rect", x=x(value) - 4, y=y - 4, width=8, height=8, class_=kind))
        else:
            marks.append(shape("circle", cx=x(value), cy=y, r=5, class_=kind))
        end = x(ends[1] if ends else value)
        marks.append(text(max(end, x(value)) + 10, y + 4, f"{100 * value:.1f}"))
    return drawing(width, height, "Recall@1 with 95% intervals", marks)


def curve(
    values: Sequence[float],
    *,
    title: str,
    first: int = 1,
    percent: bool = False,
) -> Markup:
    """One value an epoch, from epoch `first` on."""
    width, height, left, right, top, bottom = 420, 210, 48, 52, 26, 30
    low, high = min(values), max(values)
    if high - low < 1e-9:
        low, high = low - 0.5 * abs(low or 1), high + 0.5 * abs(high or 1)
    steps = ticks(low, high, 4)
    low, high = min(low, steps[0]), max(high, steps[-1])

    def at(i: int) -> tuple[float, float]:
        across = i / (len(values) - 1) if len(values) > 1 else 0.5
        up = (values[i] - low) / (high - low)
        return left + across * (width - left - right), height - bottom - up * (
            height - top - bottom
        )

    def show(value: float, digits: int = 1) -> str:
        return f"{100 * value:.{digits}f}%" if percent else f"{value:.3g}"

    marks = [text(0, 13, title, class_="halo")]
    fine = int(len(steps) > 1 and steps[1] - steps[0] < 0.01)  # decimals that tell ticks apart
    for tick in steps:
        y = height - bottom - (tick - low) / (high - low) * (height - top - bottom)
        marks.append(shape("line", x1=left, x2=width - right, y1=y, y2=y, class_="grid"))
        marks.append(text(left - 8, y + 4, show(tick, fine), anchor="end", class_="soft"))
    points = [at(i) for i in range(len(values))]
    marks.append(
        shape("polyline", points=" ".join(f"{x:.1f},{y:.1f}" for x, y in points), class_="curve")
    )
    if len(points) <= 40:
        marks += [shape("circle", cx=x, cy=y, r=3, class_="point") for x, y in points]
    x, y = points[-1]
    marks.append(text(x + 8, y + 4, show(values[-1])))
    start = "untrained" if first == 0 else f"epoch {first}"
    marks.append(text(points[0][0], height - 8, start, anchor="middle", class_="soft"))
    if len(points) > 1:
        last = f"epoch {first + len(values) - 1}"
        marks.append(text(points[-1][0], height - 8, last, anchor="middle", class_="soft"))
    return drawing(width, height, f"{title}: {show(values[0])} to {show(values[-1])}", marks)


def class_sizes(sizes: NDArray[np.int64]) -> Markup:
    """How many classes have how many items."""
    width, height, bottom = 420, 150, 30
    most = int(sizes.max())
    edges = np.unique(np.linspace(int(sizes.min()), most + 1, 16).round())
    if len(edges) < 2:
        edges = np.array([most, most + 1])
    counts, _ = np.histogram(sizes, edges)
    step = width / len(counts)
    marks = []
    for i, count in enumerate(counts):
        tall = (height - bottom - 20) * count / counts.max()
        y = height - bottom - tall
        marks.append(shape("rect", x=i * step + 1, y=y, width=step - 2, height=tall, class_="bar"))
        if count == counts.max() or (count and i in (0, len(counts) - 1)):
            marks.append(text((i + 0.5) * step, y - 5, f"{count:,}", anchor="middle"))
    marks.append(
        shape("line", x1=0, x2=width, y1=height - bottom, y2=height - bottom, class_="grid")
    )
    marks.append(text(0, height - 12, f"{int(edges[0]):,} items a class", class_="soft"))
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
    """Items on the plane: a side in ink, the other faint; some classes named where they lie."""
    width, height, pad = 470, 430, 10
    xy = pad + places * [width - 2 * pad, height - 2 * pad - 22] + [0, 22]
    classes, counts = np.unique(labels[shown & (labels >= 0)], return_counts=True)
    named = classes[np.lexsort((classes, -counts))][:most] if len(classes) else classes
    colour = {int(c): f"var(--c{i % COLOURS})" for i, c in enumerate(named)}
    marks = [text(0, 12, title, class_="halo")]
    marks += [shape("circle", cx=x, cy=y, r=1.6, class_="far") for x, y in xy[~shown]]
    for (x, y), label in zip(xy[shown], labels[shown], strict=True):
        own = colour.get(int(label))
        marks.append(
            shape("circle", cx=x, cy=y, r=3 if own else 2, class_=None if own else "near", fill=own)
        )
    if stars is not None and star_labels is not None:
        spots = pad + stars * [width - 2 * pad, height - 2 * pad - 22] + [0, 22]
        for (x, y), label in zip(spots, star_labels, strict=True):
            own = colour.get(int(label))
            marks.append(
                shape(
                    "path", d=_star(x, y, 8 if own else 6), class_="star", fill=own or "var(--ink)"
                )
            )
    taken: list[tuple[float, float, float]] = []  # middle and half the width of what is written
    for c in named:
        name = short(names[int(c)], 16)
        half = 3.8 * len(name) + 3
        x, y = np.median(xy[shown & (labels == c)], axis=0) - [0, 10]
        x = min(max(x, half), width - half)
        while any(abs(x - a) < half + b and abs(y - h) < 13 for a, h, b in taken):
            y += 13
        taken.append((x, y, half))
        marks.append(text(x, y, name, anchor="middle", class_="halo", fill=colour[int(c)]))
    return drawing(width, height, title, marks)


def _star(x: float, y: float, radius: float) -> str:
    turns = [(math.pi * (i / 5 - 0.5), radius if i % 2 == 0 else 0.42 * radius) for i in range(10)]
    return (
        "M"
        + "L".join(f"{x + r * math.cos(t):.1f},{y + r * math.sin(t):.1f}" for t, r in turns)
        + "Z"
    )


def ticks(low: float, high: float, about: int) -> list[float]:
    """Return about so many round numbers within low … high; the one number where both are equal."""
    if low == high:
        return [low]
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(s * power for s in (1, 2, 2.5, 5, 10) if s * power >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [step * i for i in range(first, math.floor(high / step + 1e-9) + 1)] or [low, high]


def short(words: str, most: int) -> str:
    """At most so many characters."""
    return words if len(words) <= most else words[: most - 1] + "…"
