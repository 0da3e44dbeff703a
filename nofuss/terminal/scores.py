"""Scores of methods side by side in the terminal, in percent, and gains in words."""

from collections.abc import Mapping
from typing import Any

from nofuss.terminal import console

EXTENDED = ("mrr", "map", "precision@", "class_mean_")
"""Prefixes of the names of optional scores."""
ORDER = {"in the right order": "ordered"}


def score_table(title: str, columns: Mapping[str, Mapping[str, Any]]) -> None:
    """Print a column per method and a row per score, in percent."""
    first = next(iter(columns.values()))
    names = [n for n in first if n.startswith("recall@") and not n.endswith("_interval")]
    rows = {f"Recall@{n.removeprefix('recall@')}": n for n in names}
    others = {"MAP@R": "map@r", "R-precision": "r_precision", "NMI": "nmi", "AMI": "ami"}
    rows |= {label: name for label, name in (others | ORDER).items() if name in first}
    rows |= {_title(name): name for name in first if _is_extended(name)}
    cells = [
        [label, *(f"{100 * of[name]:.2f}" if name in of else "–" for of in columns.values())]
        for label, name in rows.items()
    ]
    console.table(title, ["%", *columns], cells)
    if names:
        low, high = first[f"{names[0]}_interval"]
        console.say(
            f"{first['queries']:,} queries of {first['classes']:,} classes; Recall@"
            f"{names[0].removeprefix('recall@')} of the first column is between {100 * low:.2f} "
            f"and {100 * high:.2f} (95%, over classes)"
        )
    if "ordered" in first:
        low, high = first["ordered_interval"]
        console.say(
            f"{compared(first)}; those of the first column in the right order are between "
            f"{100 * low:.2f} and {100 * high:.2f}% (95%, over groups)"
        )
    if gain := first.get("gain"):
        console.say(f"over the {gain['over']}: {describe_gain(gain)}")
    if reranked := first.get("reranked"):
        console.say(f"by re-ranking: {describe_gain(reranked['gain'])}")


def with_reranked(name: str, scores: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return the columns of a method: by distance and, where search re-ranks, re-ranked."""
    reranked = scores.get("reranked")
    return {name: scores} | ({f"{name}, re-ranked": reranked} if reranked else {})


def compared(scores: Mapping[str, Any]) -> str:
    """Return how much was compared: "1,200 triplets" or "80 pairs of alike items"."""
    if "triplets" in scores:
        return f"{scores['triplets']:,} triplets"
    return f"{scores['pairs']:,} pairs of alike items"


def describe_gain(gain: Mapping[str, Any]) -> str:
    """Return the paired differences in words: "Recall@1 +4.10 points (95%: +3.02 to +5.21), …"."""
    words = []
    for label, name in (("Recall@1", "recall@1"), ("MAP@R", "map@r"), ("right order", "ordered")):
        if name not in gain:
            continue
        mean, low, high = (100 * value for value in gain[name])
        words.append(f"{label} {mean:+.2f} points (95%: {low:+.2f} to {high:+.2f})")
    return ", ".join(words)


def _is_extended(name: str) -> bool:
    return name.startswith(EXTENDED) and name != "map@r" and not name.endswith("_interval")


def _title(name: str) -> str:
    """Return the title of an optional score in a table."""
    of_classes = name.startswith("class_mean_")
    name = name.removeprefix("class_mean_").replace("r_precision", "R-precision")
    name = name.replace("map", "MAP").replace("mrr", "MRR").replace("@r", "@R")
    return f"{name[0].upper()}{name[1:]}" + (", mean over classes" if of_classes else "")
