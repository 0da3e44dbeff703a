"""Log-log figures of growth: lines are named at their ends, distinguishable without colour."""

from pathlib import Path

from matplotlib.figure import Figure

from benchmarks.timing import Growth

STYLES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)))
MARKERS = "os^Dv"


def draw(growth: Growth, path: Path) -> None:
    """Draw the seconds of each method against the size, both logarithmic."""
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.add_subplot()
    ends: list[tuple[float, str]] = []
    for i, (method, seconds) in enumerate(growth.seconds.items()):
        ours = method == "nofuss"
        axes.plot(
            growth.sizes,
            seconds,
            color="black" if ours else f"{0.25 + 0.4 * (i % 5) / 5}",
            linestyle="-" if ours else STYLES[i % len(STYLES)],
            linewidth=2.2 if ours else 1.2,
            marker=MARKERS[i % len(MARKERS)],
            markersize=4,
        )
        measured = [value for value in seconds if value == value]
        if measured:
            ends.append((measured[-1], method))
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
            weight="bold" if method == "nofuss" else "normal",
            fontsize=9,
            annotation_clip=False,
        )
    axes.set_xticks(growth.sizes, [f"{size:,}" for size in growth.sizes])
    axes.minorticks_off()
    axes.set_xlabel(growth.axis)
    axes.set_ylabel("seconds")
    axes.set_title(growth.title, loc="left", fontsize=11)
    axes.grid(color="0.9")
    axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
