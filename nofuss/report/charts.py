"""Lines over x for several methods: named where they end, distinct in grey by dash and mark.

Drawn as the other figures, and for the same reasons not by matplotlib: see figures.py.
"""

import math
from collections.abc import Callable, Sequence
from xml.etree.ElementTree import Element

from markupsafe import Markup

from nofuss.report.figures import COLOURS, percent_labels, shorten, ticks
from nofuss.report.svg import drawing, shape, text

Point = tuple[float, float, float | None, float | None]
"""x, y, and the ends of y's interval where there is one."""
Scale = Callable[[float], float]
"""From a value to pixels."""
Line = tuple[str, Sequence[Point]]
DASHES = (None, "7 3", "2 3", "9 3 2 3", "12 4", "5 2 1 2 1 2")
WIDTH, HEIGHT, LEFT, TOP, BOTTOM = 560, 320, 50, 30, 40
LABEL = 14
"""Pixels between two labels."""


def line_chart(
    lines: Sequence[Line],
    *,
    title: str,
    x_label: str,
    percent: bool = True,
    log: bool = False,
    levels: Sequence[tuple[str, float]] = (),
    styles: Sequence[int] | None = None,
) -> Markup:
    """Draw curves with their intervals; `levels` are named horizontal lines to compare with.

    `styles` gives each line the number of its colour, dash and mark, so that a method looks the
    same in every figure.
    """
    names = [shorten(name, 24) for name, _ in [*lines, *levels]]
    right = WIDTH - 26 - 6.4 * max(map(len, names))  # the names stand beyond
    xs = [p[0] for _, points in lines for p in points]
    ys = [v for _, points in lines for p in points for v in p[1:] if v is not None]
    ys += [level for _, level in levels]
    y_ticks = ticks(min(ys), max(ys), 5) if max(ys) - min(ys) > 1e-9 else [min(ys)]
    low, high = min(*ys, y_ticks[0]), max(*ys, y_ticks[-1])
    pad = 0.04 * (high - low or 1)
    low, high = low - pad, high + pad
    first, last = (math.log(min(xs)), math.log(max(xs))) if log else (min(xs), max(xs))

    def x_of(x: float) -> float:
        if first == last:  # a single x: in the middle
            return (LEFT + right) / 2
        share = ((math.log(x) if log else x) - first) / (last - first)
        return LEFT + share * (right - LEFT)

    def y_of(y: float) -> float:
        return HEIGHT - BOTTOM - (y - low) / (high - low) * (HEIGHT - TOP - BOTTOM)

    marks = [text(0, 13, title, class_="halo")]
    marks += _axes(xs, y_ticks, x_of, y_of, x_label, percent=percent, log=log, right=right)
    ends: list[tuple[float, float, str, str]] = []  # x, y, name and colour of each line's end
    for name, level in levels:
        y = y_of(level)
        marks.append(
            shape("line", x1=LEFT, x2=right, y1=y, y2=y, class_="other", stroke_dasharray="1 3")
        )
        ends.append((right, y, name, "var(--soft)"))
    for style, (name, points) in zip(styles or range(len(lines)), lines, strict=True):
        colour = f"var(--c{style % COLOURS})"
        marks += _line(points, x_of, y_of, colour, style)
        ends.append((x_of(points[-1][0]), y_of(points[-1][1]), name, colour))
    marks += _labels(ends, right + 18)
    return drawing(WIDTH, HEIGHT, title, marks)


def _axes(
    xs: Sequence[float],
    y_ticks: Sequence[float],
    x_of: Scale,
    y_of: Scale,
    x_label: str,
    *,
    percent: bool,
    log: bool,
    right: float,
) -> list[Element]:
    """Draw levels of y with their values, and ticks of x."""
    marks = []
    labels = percent_labels(y_ticks) if percent else [f"{tick:.3g}" for tick in y_ticks]
    for tick, label in zip(y_ticks, labels, strict=True):
        y = y_of(tick)
        marks.append(shape("line", x1=LEFT, x2=right, y1=y, y2=y, class_="grid"))
        marks.append(text(LEFT - 8, y + 4, label, anchor="end", class_="soft"))
    foot = HEIGHT - BOTTOM
    for tick in sorted(set(xs)) if log else ticks(min(xs), max(xs), 5):
        x = x_of(tick)
        marks.append(shape("line", x1=x, x2=x, y1=foot, y2=foot + 4, class_="grid"))
        marks.append(text(x, foot + 17, f"{tick:,g}", anchor="middle", class_="soft"))
    marks.append(text((LEFT + right) / 2, HEIGHT - 6, x_label, anchor="middle", class_="soft"))
    return marks


def _line(
    points: Sequence[Point], x_of: Scale, y_of: Scale, colour: str, style: int
) -> list[Element]:
    """Draw a curve with its marks, and thin bars for the intervals."""
    marks = []
    for x, _, low, high in points:
        if low is not None and high is not None:
            bar = {"x1": x_of(x), "x2": x_of(x), "y1": y_of(low), "y2": y_of(high)}
            marks.append(shape("line", **bar, stroke=colour, stroke_opacity=0.45, stroke_width=1.2))
    path = " ".join(f"{x_of(x):.1f},{y_of(y):.1f}" for x, y, *_ in points)
    css = f"fill: none; stroke: {colour}; stroke-width: {2.4 if style == 0 else 1.7}"
    dash = DASHES[style % len(DASHES)]
    marks.append(shape("polyline", points=path, style=css, stroke_dasharray=dash))
    marks += [_mark(style, x_of(x), y_of(y), colour) for x, y, *_ in points]
    return marks


def _mark(style: int, x: float, y: float, colour: str) -> Element:
    """Draw a point: circle, square, triangle, diamond, cross or plus."""
    r = 3.2
    paths = (
        None,
        f"M{x - r},{y - r}h{2 * r}v{2 * r}h{-2 * r}Z",
        f"M{x},{y - 1.3 * r}L{x + 1.2 * r},{y + r}L{x - 1.2 * r},{y + r}Z",
        f"M{x},{y - 1.4 * r}L{x + 1.4 * r},{y}L{x},{y + 1.4 * r}L{x - 1.4 * r},{y}Z",
        f"M{x - r},{y - r}L{x + r},{y + r}M{x - r},{y + r}L{x + r},{y - r}",
        f"M{x - 1.3 * r},{y}h{2.6 * r}M{x},{y - 1.3 * r}v{2.6 * r}",
    )
    path = paths[style % len(paths)]
    if path is None:
        return shape("circle", cx=x, cy=y, r=r, style=f"fill: {colour}")
    css = f"fill: {colour}; stroke: {colour}; stroke-width: {1.5 if style > 3 else 0}"
    return shape("path", d=path, style=css)


def _labels(ends: Sequence[tuple[float, float, str, str]], x: float) -> list[Element]:
    """Write names beside the ends of their lines, spread where they would touch, with leaders."""
    order = sorted(range(len(ends)), key=lambda i: ends[i][1])
    heights: list[float] = []
    for i in order:
        heights.append(max(ends[i][1], heights[-1] + LABEL if heights else TOP))
    excess = heights[-1] - (HEIGHT - BOTTOM) if heights else 0
    if excess > 0:  # the last is below the axis: push it up, and those above it in turn
        heights[-1] -= excess
        for k in range(len(heights) - 2, -1, -1):
            heights[k] = min(heights[k], heights[k + 1] - LABEL)
    marks = []
    for i, height in zip(order, heights, strict=True):
        end_x, end_y, name, colour = ends[i]
        leader = {"x1": end_x + 5, "x2": x - 3, "y1": end_y, "y2": height}
        marks.append(shape("line", **leader, stroke=colour, stroke_width=0.8, stroke_opacity=0.6))
        marks.append(text(x, height + 4, shorten(name, 24), fill=colour, class_="name"))
    return marks
