"""The paper's numbers, in percent, and the names of its methods.

Tables 1 (Cars196) and 2 (CUB-200-2011); for Stanford Online Products the text gives two NMIs, and
Figure 4 has no numbers. All but FURTHER is from the paper.
"""

METHODS = {
    "proxy-nca": "Proxy-NCA",
    "proxy-triplet": "Proxy-Triplet",
    "clustering": "Structured clustering",
    "n-pairs": "N-pairs",
    "lifted": "Lifted structure",
    "semi-hard": "Triplet, semi-hard",
}
"""Loss → its name in tables."""
BASELINES = ("clustering", "n-pairs", "lifted", "semi-hard")
"""The four methods that the paper compares with."""
FURTHER = {"proxy-nca++": "Proxy-NCA++"}
"""Beside them in our tables: the positive in the denominator, which most public code calls
Proxy-NCA."""
NAMES = METHODS | FURTHER
"""All rows of our tables."""

Row = dict[str, float]
_COLUMNS = ("recall@1", "recall@2", "recall@4", "recall@8", "nmi")


def _row(*values: float) -> Row:
    return dict(zip(_COLUMNS, values, strict=True))


PUBLISHED: dict[str, dict[str, Row]] = {
    "cars": {
        "semi-hard": _row(51.54, 63.78, 73.52, 81.41, 53.35),
        "lifted": _row(52.98, 66.70, 76.01, 84.27, 56.88),
        "n-pairs": _row(53.90, 66.76, 77.75, 86.35, 57.79),
        "proxy-triplet": _row(55.90, 67.99, 74.04, 77.95, 54.44),
        "clustering": _row(58.11, 70.64, 80.27, 87.81, 59.04),
        "proxy-nca": _row(73.22, 82.42, 86.36, 88.68, 64.90),
    },
    "cub": {
        "semi-hard": _row(42.59, 55.03, 66.44, 77.23, 55.38),
        "lifted": _row(43.57, 56.55, 68.59, 79.63, 56.50),
        "n-pairs": _row(45.37, 58.41, 69.51, 79.49, 57.24),
        "clustering": _row(48.18, 61.44, 71.83, 81.92, 59.23),
        "proxy-nca": _row(49.21, 61.90, 67.90, 72.40, 59.53),
    },
    "products": {"clustering": {"nmi": 89.48}, "proxy-nca": {"nmi": 90.60}},
}
"""Data set → loss → score → percent; only what the paper prints."""

FASTER = 3.0
"""Section 6.4: Proxy-NCA "converges about three times as fast", on Cars196."""
ENOUGH = 0.5
"""Sections 6.5, 6.6: with this many proxies a label or more, Proxy-NCA beats the baselines."""


def order_of(data: str) -> list[str]:
    """Return losses from best to worst Recall@1 in the paper; Cars196's if it has no table."""
    recall = {m: row["recall@1"] for m, row in PUBLISHED.get(data, {}).items() if "recall@1" in row}
    if len(recall) < 3:
        recall = {m: row["recall@1"] for m, row in PUBLISHED["cars"].items()}
    return sorted(recall, key=lambda method: -recall[method])
