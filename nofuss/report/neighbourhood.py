"""The report's sections on neighbours: retrieval grid, confused classes, suspects in the data."""

import csv
import io
from pathlib import Path
from xml.etree.ElementTree import Element

import numpy as np
from numpy.typing import NDArray

from nofuss.files.atomic import write_file
from nofuss.report.findings import (
    Copy,
    Doubt,
    Neighbours,
    confusions,
    copies,
    doubtful_labels,
    neighbours,
)
from nofuss.report.grids import Card, Items, choose_queries, hit_row, pair_cards
from nofuss.report.html import Child, tag
from nofuss.report.sections import section, soft
from nofuss.report.thumbnails import has_pictures

CARDS = 12


def neighbourhood(
    items: Items, vectors: NDArray[np.float32], listed: Path, *, seed: int, tested: bool
) -> list[Element | None]:
    """The sections, of test items where there are any; all suspects go to the file `listed`."""
    if items.collection.labels is None or len(vectors) < 3:
        return []
    found = neighbours(vectors, seed=seed)
    pictures = has_pictures(items.collection)
    doubts = doubtful_labels(found, items.labels)
    same = items.look_alike if pictures else None
    doubles = copies(found, same=same, within=0.1 if pictures else 1e-3)
    _list_suspects(listed, items, doubts, doubles)
    return [
        _grid(items, found, seed=seed, tested=tested) if pictures else None,
        _confused(items, found),
        _suspects(items, doubts, doubles),
    ]


def _grid(items: Items, found: Neighbours, *, seed: int, tested: bool) -> Element:
    """Queries with their neighbours."""
    which = "test classes, never seen in training" if tested else "training classes"
    chosen = choose_queries(found, items.labels, seed=seed)
    rows: list[Child] = [
        [tag("h3", title), [hit_row(items, found, int(row)) for row in some]]
        for title, some in chosen.items()
        if len(some)
    ]
    words = (
        f"A query, then its nearest neighbours with their distance (0 to 2), among the {which}. "
        "✓ is of the query's class, ✗ is not."
    )
    return section("Neighbours", soft(words), rows)


def _confused(items: Items, found: Neighbours) -> Element | None:
    pairs = confusions(found, items.labels)
    if not pairs:
        return None
    names = items.collection.class_names
    cards: list[Card] = []
    for c in pairs:
        share = tag("small", f"{c.queries:,} of their queries, {100 * c.share:.0f}%")
        both: list[Child] = [tag("b", names[c.first]), " and ", tag("b", names[c.second])]
        cards.append((*c.example, _lines(both, share)))
    words = "Classes whose items are each other's nearest neighbours, with the closest such pair."
    return section("Confused classes", soft(words), pair_cards(items, cards))


def _suspects(items: Items, doubts: list[Doubt], doubles: list[Copy]) -> Element:
    names = items.collection.class_names
    wrong: list[Card] = []
    for d in doubts[:CARDS]:
        looks: list[Child] = [
            tag("b", names[d.label]),
            " looks like ",
            tag("b", names[d.suggested]),
        ]
        votes = tag("small", f"{100 * d.votes:.0f}% of its neighbours")
        wrong.append((d.item, d.nearest, _lines(looks, tag("small", items.file(d.item)), votes)))
    same: list[Card] = []
    for c in doubles[:CARDS]:
        first, second = items.label(c.first), items.label(c.second)
        label = f"both {first}" if first == second else f"labelled {first} and {second}"
        both = tag("small", items.file(c.first)), tag("small", items.file(c.second))
        same.append((c.first, c.second, _lines(label, *both)))
    file = tag("a", "suspects.csv", href="suspects.csv")
    return section(
        "Suspects in the data",
        tag("p", "The closest are shown; all are in ", file, ".", class_="soft"),
        tag("h3", f"Likely mislabelled: {len(doubts):,}"),
        soft(
            "No neighbour is of their own class, and most are of one other: "
            "either the label is wrong, or the model."
        ),
        pair_cards(items, wrong) if wrong else tag("p", "None found."),
        tag("h3", f"Duplicates: {len(doubles):,}"),
        pair_cards(items, same) if same else tag("p", "None found."),
    )


def _list_suspects(file: Path, items: Items, doubts: list[Doubt], doubles: list[Copy]) -> None:
    """kind, item, label, other_item, other_label, distance."""
    pairs = [("label", d.item, d.nearest, d.distance) for d in doubts]
    pairs += [("duplicate", *double) for double in doubles]
    with io.StringIO(newline="") as text:
        rows = csv.writer(text)
        rows.writerow(("kind", "item", "label", "other_item", "other_label", "distance"))
        for kind, a, b, distance in pairs:
            first, second = (items.name(a), items.label(a)), (items.name(b), items.label(b))
            rows.writerow((kind, *first, *second, f"{distance:.4f}"))
        write_file(file, text.getvalue().encode("utf-8", "backslashreplace"))


def _lines(*words: Child) -> list[Child]:
    """One below the other."""
    return [[line, tag("br")] for line in words]
