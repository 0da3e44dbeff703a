"""Lines over x for several methods: named where they end, told apart in grey by dash and mark.

As the other figures, drawn by hand as SVG; colours and type come from report.css.
"""

import math
from collections.abc import Callable, Sequence
from xml.etree.ElementTree import Element

from markupsafe import Markup

from nofuss.report.figures import COLOURS, short, ticks
from nofuss.report.svg import drawing, shape, text

Point = tuple[float, float, float | None, float | None]
"""x, y, and the ends of y's interval where there is one."""
Place = Callable[[float], float]
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
    """Curves with their intervals; `levels` are horizontal lines to stand beside.

    `styles` numbers colour, dash and mark, for a method to look the same in every figure.
    """
    names = [short(name, 24) for name, _ in [*lines, *levels]]
    stop = WIDTH - 26 - 6.4 * max(map(len, names))
    xs = [p[0] for _, points in lines for p in points]
    ys = [v for _, points in lines for p in points for v in p[1:] if v is not None]
    ys += [level for _, level in levels]
    y_ticks = ticks(min(ys), max(ys), 5) if max(ys) - min(ys) > 1e-9 else [min(ys)]
    low, high = min(*ys, y_ticks[0]), max(*ys, y_ticks[-1])
    pad = 0.04 * (high - low or 1)
    low, high = low - pad, high + pad
    first, last = (math.log(min(xs)), math.log(max(xs))) if log else (min(xs), max(xs))

    def across(x: float) -> float:
        if first == last:  # a single x: in the middle
            return (LEFT + stop) / 2
        share = ((math.log(x) if log else x) - first) / (last - first)
        return LEFT + share * (stop - LEFT)

    def up(y: float) -> float:
        return HEIGHT - BOTTOM - (y - low) / (high - low) * (HEIGHT - TOP - BOTTOM)

    marks = [text(0, 13, title, class_="halo")]
    marks += _axes(xs, y_ticks, across, up, x_label, percent=percent, log=log, right=stop)
    ends: list[tuple[float, str, str]] = []
    for name, level in levels:
        y = up(level)
        marks.append(
            shape("line", x1=LEFT, x2=stop, y1=y, y2=y, class_="other", stroke_dasharray="1 3")
        )
        ends.append((y, name, "var(--soft)"))
    for i, (name, points) in zip(styles or range(len(lines)), lines, strict=True):
        colour = f"var(--c{i % COLOURS})"
        marks += _line(points, across, up, colour, i)
        ends.append((up(points[-1][1]), name, colour))
    stops = [across(points[-1][0]) for _, points in lines]
    starts = [stop] * len(levels) + stops
    marks += _labels(ends, starts, stop + 18)
    return drawing(WIDTH, HEIGHT, title, marks)


def _axes(
    xs: Sequence[float],
    y_ticks: Sequence[float],
    across: Place,
    up: Place,
    x_label: str,
    *,
    percent: bool,
    log: bool,
    right: float,
) -> list[Element]:
    """Levels of y with their values, and ticks of x."""
    marks = []
    fine = percent and len(y_ticks) > 1 and y_ticks[1] - y_ticks[0] < 0.0099
    for tick in y_ticks:
        y = up(tick)
        shown = f"{100 * tick:.{int(fine)}f}%" if percent else f"{tick:.3g}"
        marks.append(shape("line", x1=LEFT, x2=right, y1=y, y2=y, class_="grid"))
        marks.append(text(LEFT - 8, y + 4, shown, anchor="end", class_="soft"))
    foot = HEIGHT - BOTTOM
    places = sorted(set(xs)) if log else ticks(min(xs), max(xs), 5)
    for x in places:
        place = across(x)
        marks.append(
            shape(
                "line",
                x1=place,
                x2=place,
                y1=HEIGHT - BOTTOM,
                y2=HEIGHT - BOTTOM + 4,
                class_="grid",
            )
        )
        marks.append(text(place, foot + 17, f"{x:,g}", anchor="middle", class_="soft"))
    marks.append(text((LEFT + right) / 2, HEIGHT - 6, x_label, anchor="middle", class_="soft"))
    return marks


def _line(
    points: Sequence[Point], across: Place, up: Place, colour: str, index: int
) -> list[Element]:
    """A curve with its marks, and thin bars for the intervals."""
    marks = []
    for x, _, low, high in points:
        if low is not None and high is not None:
            place = across(x)
            bar = {"stroke": colour, "stroke_opacity": 0.45, "stroke_width": 1.2}
            marks.append(shape("line", x1=place, x2=place, y1=up(low), y2=up(high), **bar))
    path = " ".join(f"{across(x):.1f},{up(y):.1f}" for x, y, *_ in points)
    style = f"fill: none; stroke: {colour}; stroke-width: {2.4 if index == 0 else 1.7}"
    dash = DASHES[index % len(DASHES)]
    marks.append(shape("polyline", points=path, style=style, stroke_dasharray=dash))
    marks += [_mark(index, across(x), up(y), colour) for x, y, *_ in points]
    return marks


def _mark(index: int, x: float, y: float, colour: str) -> Element:
    """A shape of its own for each line."""
    r = 3.2
    shapes = (
        None,
        f"M{x - r},{y - r}h{2 * r}v{2 * r}h{-2 * r}Z",
        f"M{x},{y - 1.3 * r}L{x + 1.2 * r},{y + r}L{x - 1.2 * r},{y + r}Z",
        f"M{x},{y - 1.4 * r}L{x + 1.4 * r},{y}L{x},{y + 1.4 * r}L{x - 1.4 * r},{y}Z",
        f"M{x - r},{y - r}L{x + r},{y + r}M{x - r},{y + r}L{x + r},{y - r}",
        f"M{x - 1.3 * r},{y}h{2.6 * r}M{x},{y - 1.3 * r}v{2.6 * r}",
    )
    path = shapes[index % len(shapes)]
    if path is None:
        return shape("circle", cx=x, cy=y, r=r, style=f"fill: {colour}")
    style = f"fill: {colour}; stroke: {colour}; stroke-width: {1.5 if index > 3 else 0}"
    return shape("path", d=path, style=style)


def _labels(
    ends: Sequence[tuple[float, str, str]], starts: Sequence[float], x: float
) -> list[Element]:
    """Names beside the ends of their lines, moved apart where they would touch, with a leader."""
    order = sorted(range(len(ends)), key=lambda i: ends[i][0])
    places: list[float] = []
    for i in order:
        places.append(max(ends[i][0], places[-1] + LABEL if places else TOP))
    below = places[-1] - (HEIGHT - BOTTOM) if places else 0
    if below > 0:  # push back up from the bottom
        places[-1] -= below
        for k in range(len(places) - 2, -1, -1):
            places[k] = min(places[k], places[k + 1] - LABEL)
    marks = []
    for i, y in zip(order, places, strict=True):
        end, name, colour = ends[i]
        leader = {"stroke": colour, "stroke_width": 0.8, "stroke_opacity": 0.6}
        marks.append(shape("line", x1=starts[i] + 5, x2=x - 3, y1=end, y2=y, **leader))
        marks.append(text(x, y + 4, short(name, 24), fill=colour, class_="name"))
    return marks
