"""Draw the figures of docs/paper.md: python docs/figures.py"""

from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

IMAGES = Path(__file__).parent / "img"
COLOURS = ("#3b6fd4", "#d9534f", "#3a9d5d")


def proxies() -> None:
    """Left: one anchor among points, all of which it may be compared with. Right: among proxies."""
    random = np.random.default_rng(3)
    centres = np.array([[0.0, 1.0], [-0.95, -0.45], [0.95, -0.45]])
    points = centres[:, None] + 0.28 * random.normal(size=(3, 7, 2))
    figure, axes = plt.subplots(1, 2, figsize=(8, 3.6), layout="constrained")
    titles = (
        "points: 6 positives × 14 negatives = 84 triplets",
        "proxies: one triplet (x, p(y), p(Z))",
    )
    for axis, title, use_proxies in zip(axes, titles, (False, True), strict=True):
        anchor = points[0, 0]
        ends = centres if use_proxies else points
        for label in range(3):
            for end in np.atleast_2d(ends[label]):
                style = "-" if label == 0 else ":"
                axis.plot(*np.stack([anchor, end]).T, style, color=COLOURS[label], lw=1, alpha=0.7)
            faint = 0.25 if use_proxies else 1.0
            axis.scatter(*points[label].T, color=COLOURS[label], s=26, alpha=faint, zorder=3)
            if use_proxies:
                axis.scatter(*centres[label], marker="*", s=240, color=COLOURS[label], zorder=4)
        axis.scatter(*anchor, s=90, facecolor=COLOURS[0], edgecolor="black", zorder=5)
        axis.annotate("x", anchor, xytext=(7, 6), textcoords="offset points")
        axis.set_title(title, fontsize=10)
        axis.set_aspect("equal")
        axis.set_axis_off()
    figure.savefig(IMAGES / "proxies.webp", dpi=110, pil_kwargs={"quality": 90})


def bound() -> None:
    """How much proxies change d(x,y) − d(x,z), which Proposition 4.2 bounds."""
    random = np.random.default_rng(0)
    angles = random.uniform(0, 2 * np.pi, (3, 40_000))
    error = random.uniform(0, 1, 40_000)  # √ε: how far y and z are from their proxies at most
    sides = random.choice([-1, 1], (2, 40_000)) * random.uniform(0, 1, (2, 40_000)) ** 0.1
    turned = angles[1:] + 2 * np.arcsin(error / 2) * sides

    def unit(angle: np.ndarray) -> np.ndarray:
        return np.stack([np.cos(angle), np.sin(angle)])

    x, y, z, py, pz = map(unit, (angles[0], *angles[1:], *turned))

    def difference(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return ((x - a) ** 2).sum(0) - ((x - b) ** 2).sum(0)

    found = np.abs(difference(y, z) - difference(py, pz))
    figure, axis = plt.subplots(figsize=(6, 3.6), layout="constrained")
    above = found > 2 * error
    for rows, colour in ((~above, COLOURS[0]), (above, COLOURS[1])):
        axis.scatter(error[rows], found[rows], s=1, color=colour, alpha=0.3, rasterized=True)
    ends = np.array([0.0, 1.0])
    axis.plot(ends, 2 * ends, "--", color="black", lw=1, label="2√ε, as printed")
    axis.plot(ends, 4 * ends, color="black", lw=1, label="4√ε, as its proof gives")
    axis.set_xlabel("√ε")
    axis.set_ylabel("change of d(x,y) − d(x,z)")
    axis.set_title(f"{above.mean():.0%} of 40,000 random triplets are above 2√ε", fontsize=10)
    axis.legend()
    figure.savefig(IMAGES / "bound.webp", dpi=110, pil_kwargs={"quality": 88})


if __name__ == "__main__":
    IMAGES.mkdir(exist_ok=True)
    proxies()
    bound()
