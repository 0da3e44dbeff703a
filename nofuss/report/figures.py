"""The drawings of reports: matplotlib's SVG in the page's own colours and type.

Each colour that matplotlib draws with stands for a variable of look.css and is replaced by it, so
that a drawing follows dark mode and print. Text stays text, in the page's font; names are escaped;
screen readers read out a label. matplotlib is imported with the first drawing, without pyplot, and
its settings, whatever a session made of them, are neither used nor changed.
"""

import io
import re
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from markupsafe import Markup, escape
from numpy.typing import NDArray

from nofuss.errors import visible
from nofuss.files import digest

Point = tuple[float, float, float | None, float | None]
"""x, y, and the ends of y's interval where there is one."""

VARIABLES = ("ink", "soft", "line", "paper", "c0", "c1", "c2", "c3", "c4", "c5")
INK, SOFT, LINE, PAPER, *COLOURS = (f"#0000{i:02x}" for i in range(1, len(VARIABLES) + 1))
DASHES = ("-", (0, (4, 2)), (0, (1, 1.5)), (0, (6, 2, 1, 2)), (0, (8, 3)), (0, (3, 1, 1, 1, 1, 1)))
MARKS = ("o", "s", "^", "D", "x", "+")
"""Lines differ without colour, too."""
_STYLE = {
    "svg.fonttype": "none",  # text, not outlines
    "svg.hashsalt": "nofuss",  # the same drawing every time
    "text.parse_math": False,  # a class may be called $x$
    "font.size": 9,
    "font.sans-serif": ["DejaVu Sans"],
    "text.color": INK,
    "axes.labelcolor": SOFT,
    "axes.edgecolor": LINE,
    "axes.facecolor": "none",
    "axes.axisbelow": True,
    "axes.formatter.useoffset": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.spines.left": False,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlecolor": INK,
    "axes.titlelocation": "left",
    "axes.titlesize": 9,
    "axes.titleweight": "bold",
    "figure.facecolor": "none",
    "grid.color": LINE,
    "xtick.color": LINE,
    "xtick.labelcolor": SOFT,
    "ytick.labelcolor": SOFT,
    "ytick.major.size": 0,
}
_WHOLE: Any = {"integer": True, "min_n_ticks": 1, "steps": [1, 2, 5, 10]}


def score_chart(rows: Sequence[tuple[str, float, Sequence[float] | None]], label: str) -> Markup:
    """Draw a row for each method: its score in percent as a point, its 95% interval as a line.

    The first method is the run's, and stands out.
    """

    def draw(axes: Any) -> None:
        for i, (_, value, interval) in enumerate(rows):
            colour = SOFT if i else COLOURS[0]
            low, high = interval or (value, value)
            axes.plot([100 * low, 100 * high], [-i, -i], color=colour, clip_on=False)
            axes.plot(100 * value, -i, "s" if i else "o", color=colour, clip_on=False)
            end = 100 * max(value, high), -i
            axes.annotate(
                f"{100 * value:.1f}", end, (8, 0), textcoords="offset points", va="center"
            )
        axes.set_yticks([-i for i in range(len(rows))], [_short(name, 28) for name, _, _ in rows])
        axes.tick_params(axis="y", labelcolor=INK)
        axes.grid(visible=False, axis="y")
        axes.grid(axis="x")
        axes.margins(y=0.6 / len(rows))
        low, high = axes.dataLim.intervalx  # round numbers, with some space before the lowest
        axes.set_xlim(max(0, (low - 3) // 5 * 5), min(100, -(-(high + 1) // 5) * 5))
        axes.locator_params(axis="x", nbins=4)

    return _svg(label, 5.0, 0.35 + 0.28 * len(rows), draw)


def line_chart(
    lines: Sequence[tuple[str, Sequence[Point]]],
    *,
    title: str,
    x_label: str,
    percent: bool = True,
    log: bool = False,
    levels: Sequence[tuple[str, float]] = (),
    styles: Sequence[int] | None = None,
) -> Markup:
    """Draw curves with their intervals, each named where it ends.

    levels: named horizontal lines to compare with. styles: the number of the colour, dash and mark
    of each curve, so that a method looks the same in every figure.
    """

    def draw(axes: Any) -> None:
        from matplotlib.ticker import MaxNLocator

        ends, unit = [], 100 if percent else 1
        for style, (name, points) in zip(styles or range(len(lines)), lines, strict=True):
            x, y = [p[0] for p in points], [unit * p[1] for p in points]
            look = {"color": COLOURS[style % 6], "linestyle": DASHES[style % 6], "clip_on": False}
            axes.plot(x, y, **look, marker=MARKS[style % 6], markersize=4 if len(x) <= 40 else 0)
            for at, _, low, high in points:
                if low is not None and high is not None:
                    bar, colour = [unit * low, unit * high], COLOURS[style % 6]
                    axes.plot([at, at], bar, color=colour, alpha=0.45, linewidth=1)
            ends.append((x[-1], y[-1], name, COLOURS[style % 6]))
        axes.set_title(_short(title, 70) + " (%)" * percent)
        axes.set_xlabel(_short(x_label, 80))
        if log:
            ticks = sorted({p[0] for _, points in lines for p in points})
            axes.set_xscale("log")
            axes.set_xticks(ticks, [f"{tick:,g}" for tick in ticks])
            axes.minorticks_off()
        else:
            axes.xaxis.set_major_locator(MaxNLocator(6, **_WHOLE))
        for name, level in levels:
            axes.axhline(unit * level, color=SOFT, linestyle=DASHES[2])
            ends.append((axes.get_xlim()[1], unit * level, name, SOFT))
        axes.locator_params(axis="y", nbins=6)
        _name_ends(axes, ends)

    return _svg(title, 5.0, 2.9, draw)


def size_chart(sizes: NDArray[np.int64]) -> Markup:
    """Draw a histogram: how many classes have how many items."""

    def draw(axes: Any) -> None:
        from matplotlib.ticker import MaxNLocator

        low, high = int(sizes.min()), int(sizes.max())
        edges = np.unique(np.linspace(low, high + 1, 16).round()) - 0.5  # sizes are whole numbers
        axes.hist(sizes, edges, color=COLOURS[0], edgecolor=PAPER)
        axes.set_xlim(low - 1.5, high + 1.5)
        axes.set_xlabel("items per class")
        axes.set_ylabel("classes")
        axes.xaxis.set_major_locator(MaxNLocator(8, **_WHOLE))
        axes.yaxis.set_major_locator(MaxNLocator(4, **_WHOLE))

    return _svg("Class sizes", 4.4, 1.7, draw)


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
    classes, counts = np.unique(labels[shown & (labels >= 0)], return_counts=True)
    named = classes[np.lexsort((classes, -counts))][:most]

    def draw(axes: Any) -> None:
        axes.set(
            xlim=(-0.02, 1.02), ylim=(1.02, -0.06), xticks=[], yticks=[], title=_short(title, 70)
        )
        axes.spines.bottom.set_visible(False)
        dots = {"linewidths": 0, "clip_on": False}
        axes.scatter(*places[~shown].T, s=5, color=LINE, **dots)
        is_rest = ~np.isin(labels, named)
        axes.scatter(*places[shown & is_rest].T, s=8, color=SOFT, alpha=0.55, **dots)
        if stars is not None and star_labels is not None:
            is_rest = ~np.isin(star_labels, named)
            _stars(axes, stars[is_rest], INK, 75)
        # A name stands above the middle of its class, or lower where another name is already.
        taken: list[tuple[float, float, float]] = []  # middle and half the width of each name
        for i, c in enumerate(named):
            points, colour = places[shown & (labels == c)], COLOURS[i % 6]
            axes.scatter(*points.T, s=17, color=colour, **dots)
            if stars is not None and star_labels is not None:
                _stars(axes, stars[star_labels == c], colour, 130)
            name = _short(names[int(c)], 16)
            half = 0.009 * len(name)
            x, y = np.median(points, axis=0) - [0, 0.025]
            x = min(max(x, half), 1 - half)
            while any(
                abs(x - x2) < half + half2 and abs(y - y2) < 0.035 for x2, y2, half2 in taken
            ):
                y += 0.035
            taken.append((x, y, half))
            axes.text(x, y, name, color=colour, weight="bold", ha="center", va="center")

    return _svg(title, 4.7, 4.3, draw)


def _stars(axes: Any, places: NDArray[Any], colour: str, size: float) -> None:
    look = {"linewidths": 0.6, "edgecolors": PAPER, "zorder": 3, "clip_on": False}
    axes.scatter(*places.T, s=size, marker="*", color=colour, **look)


def _name_ends(axes: Any, ends: Sequence[tuple[float, float, str, str]]) -> None:
    """Write names beside the ends of their lines, spread where they would touch, with leaders."""
    low, high = axes.get_ylim()
    ends, steps = sorted(ends, key=lambda end: end[1]), 0.075 * np.arange(len(ends))
    heights = np.array([(y - low) / (high - low) for _, y, _, _ in ends])  # fractions of the axis
    heights = np.maximum.accumulate(heights - steps) + steps  # none nearer than a step to the next
    heights = np.minimum(heights, 1 - steps[::-1])  # those above the axis come down, and push
    for (x, y, name, colour), height in zip(ends, heights, strict=True):
        axes.annotate(
            _short(name, 24),
            (x, y),
            (1.04, height),
            textcoords="axes fraction",
            color=colour,
            va="center",
            arrowprops={"arrowstyle": "-", "color": colour, "alpha": 0.6, "linewidth": 0.6},
        )


def _short(words: str, most: int) -> str:
    """Return at most so many characters, the last an ellipsis where some are missing."""
    words = visible(words)
    return words if len(words) <= most else words[: most - 1] + "…"


def _svg(label: str, width: float, height: float, draw: Callable[[Any], None]) -> Markup:
    """Return what `draw` puts on axes of so many inches as an <svg> element."""
    import matplotlib.style
    from matplotlib.figure import Figure

    buffer = io.StringIO()
    with warnings.catch_warnings(), matplotlib.style.context(["default", _STYLE]):
        warnings.simplefilter("ignore")  # of characters that its font lacks: browsers have others
        figure = Figure((width, height), layout="constrained")
        draw(figure.subplots())
        no_metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(buffer, format="svg", metadata=no_metadata)
    svg = buffer.getvalue().partition("<svg ")[2]
    svg = re.sub(r"<style.*?</style>", "", svg, flags=re.DOTALL)  # it would hold for the page
    mark = f"d{digest(svg.encode())[:8]}"  # two drawings must not share an id
    # Only within tags: what a class is called stays as it is.
    svg = re.sub(r"<[^>]*>", lambda tag: _restyled(tag[0], mark), f"<svg {svg}")
    return Markup(
        svg.replace("<svg ", f'<svg role="img" aria-label="{escape(visible(label))}" ', 1)
    )


def _restyled(tag: str, mark: str) -> str:
    """Return a tag of matplotlib's with variables as colours, the page's font, and its own ids."""
    tag = re.sub(r'^<g id="[^"]*"', "<g", tag)
    tag = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{mark}", tag)
    tag = re.sub(r"#0000(\d\w)\b", lambda c: f"var(--{VARIABLES[int(c[1], 16) - 1]})", tag)
    tag = re.sub(r" font-family: [^;\"]*;?", "", tag)
    return re.sub(r"(\.\d\d)\d+", r"\1", tag)  # a hundredth of a point
