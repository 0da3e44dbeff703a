"""Figures: lines are named at their ends, distinguishable without colour."""

from pathlib import Path
from statistics import mean
from typing import Any

from matplotlib.figure import Figure

from benchmarks.timing import Growth

STYLES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)))
NAMED_MARKERS = dict(zip("os^Dv<>PX*", "●■▲◆▼◀▶✚✖★", strict=True))
"""Markers of a figure with many lines → what stands before their names."""


def draw(growth: Growth, path: Path) -> None:
    """Draw the values of each method against the size, both logarithmic."""
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.add_subplot()
    ends: list[tuple[float, str]] = []
    for i, (method, values) in enumerate(growth.values.items()):
        ours = method == "nofuss"
        axes.plot(
            growth.sizes,
            values,
            color="black" if ours else f"{0.25 + 0.4 * (i % 5) / 5}",
            linestyle="-" if ours else STYLES[i % len(STYLES)],
            linewidth=2.2 if ours else 1.2,
            marker=[*NAMED_MARKERS][i % len(NAMED_MARKERS)],
            markersize=4,
        )
        measured = [value for value in values if value == value]
        if measured:
            glyph = [*NAMED_MARKERS.values()][i % len(NAMED_MARKERS)]
            ends.append((measured[-1], f"{glyph} {method}"))
    axes.set_xscale("log")
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    gap = (high / low) ** 0.06  # names of lines that end close together must not overlap
    place = 0.0
    for end, method in sorted(ends):
        place = max(end, place * gap)
        axes.annotate(
            method,
            (1.02, place),
            xycoords=("axes fraction", "data"),
            va="center",
            weight="bold" if method.endswith(" nofuss") else "normal",
            fontsize=9,
            annotation_clip=False,
        )
    axes.set_xticks(growth.sizes, [f"{size:,}" for size in growth.sizes])
    axes.minorticks_off()
    axes.set_xlabel(growth.axis)
    axes.set_ylabel(growth.unit)
    axes.set_title(growth.title, loc="left", fontsize=11)
    axes.grid(color="0.9")
    axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def draw_curves(results: dict[str, dict[str, Any]], path: Path) -> None:
    """Draw Recall@1 and the share of proxies in use against steps, a column a data set."""
    figure = Figure(figsize=(6.4 * len(results), 8.4), layout="constrained")
    panels = figure.subplots(2, len(results), squeeze=False)
    rows = {"recall@1": "Recall@1 on test classes, %", "in_use": "proxies in use, %"}
    for column, (source, forms) in enumerate(results.items()):
        for row, (key, label) in enumerate(rows.items()):
            axes, ends = panels[row][column], []
            for i, (name, form) in enumerate(forms.items()):
                curves = [run["curve"] for run in form["runs"]]
                points = list(zip(*curves, strict=False))
                points = points[1:] if key == "in_use" else points  # nothing is chosen at step 0
                steps = [point[0]["step"] for point in points]
                values = [100 * mean(each[key] for each in point) for point in points]
                ours = "balanced" in name or "static" in name
                axes.plot(
                    steps,
                    values,
                    color="black" if ours else f"{0.3 + 0.4 * (i % 4) / 4}",
                    linestyle=STYLES[i % len(STYLES)],
                    linewidth=2.2 if ours else 1.2,
                    marker=[*NAMED_MARKERS][i % len(NAMED_MARKERS)],
                    markersize=5,
                )
                glyph = [*NAMED_MARKERS.values()][i % len(NAMED_MARKERS)]
                ends.append((values[-1], f"{glyph} {name}"))
            low, high = axes.get_ylim()
            place = low - (high - low)
            for end, name in sorted(ends):
                place = max(end, place + 0.05 * (high - low))
                axes.annotate(
                    name,
                    (1.02, place),
                    xycoords=("axes fraction", "data"),
                    va="center",
                    fontsize=8.5,
                    weight="bold" if "balanced" in name or "static" in name else "normal",
                    annotation_clip=False,
                )
            axes.set_title(f"{source}: {label}", loc="left", fontsize=11)
            axes.set_xlabel("steps")
            axes.grid(color="0.9")
            axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
