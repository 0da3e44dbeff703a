"""The report's sections on neighbours: retrieval grid, confused classes, suspects in the data."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from nofuss.files import csv_text, write_file
from nofuss.report.findings import (
    Copy,
    DoubtfulLabel,
    Neighbours,
    confusions,
    copies,
    doubtful_labels,
    neighbours,
)
from nofuss.report.grids import Items, retrieval_grid
from nofuss.report.sections import Section

CARDS = 12
"""Suspects of a kind that the page shows; suspects.csv lists all."""


def neighbourhood(
    items: Items, vectors: NDArray[np.float32], suspects: Path, *, seed: int, tested: bool
) -> dict[str, Section | None]:
    """Return the sections by name, and write all suspects to the file `suspects`.

    `tested` says whether the items are of test classes, which training has not seen.
    """
    if not items.collection.has_classes or len(vectors) < 3:
        return dict.fromkeys(("neighbours", "confused", "suspects"))
    nearest = neighbours(vectors, seed=seed)
    pictures = items.collection.has_pictures
    doubts = doubtful_labels(nearest, items.labels)
    same = items.look_alike if pictures else None
    # Pictures are confirmed by their pixels; vectors have to be equal but for rounding.
    duplicates = copies(nearest, same=same, within=0.1 if pictures else 1e-3)
    _write_suspects(suspects, items, doubts, duplicates)
    grid: Section | None = None
    if pictures:
        grid = {"tested": tested, "groups": retrieval_grid(items, nearest, seed=seed)}
    return {
        "neighbours": grid,
        "confused": _confused(items, nearest),
        "suspects": _suspects(items, doubts, duplicates),
    }


def _confused(items: Items, nearest: Neighbours) -> Section | None:
    names = items.collection.class_names
    pairs = [
        {
            "pictures": items.thumbnails(*confusion.example),
            "first": names[confusion.first],
            "second": names[confusion.second],
            "queries": confusion.queries,
            "share": confusion.share,
        }
        for confusion in confusions(nearest, items.labels)
    ]
    return {"pairs": pairs} if pairs else None


def _suspects(items: Items, doubts: list[DoubtfulLabel], duplicates: list[Copy]) -> Section:
    names = items.collection.class_names
    return {
        "mislabelled_count": len(doubts),
        "mislabelled": [
            {
                "pictures": items.thumbnails(doubt.item, doubt.nearest),
                "label": names[doubt.label],
                "suggested": names[doubt.suggested],
                "file": items.file(doubt.item),
                "votes": doubt.votes,
            }
            for doubt in doubts[:CARDS]
        ],
        "duplicates_count": len(duplicates),
        "duplicates": [
            {
                "pictures": items.thumbnails(copy.first, copy.second),
                "labels": (items.label(copy.first), items.label(copy.second)),
                "files": (items.file(copy.first), items.file(copy.second)),
            }
            for copy in duplicates[:CARDS]
        ],
    }


def _write_suspects(
    file: Path, items: Items, doubts: list[DoubtfulLabel], duplicates: list[Copy]
) -> None:
    """Write kind, item, label, other_item, other_label, distance as CSV."""
    pairs = [("label", d.item, d.nearest, d.distance) for d in doubts]
    pairs += [("duplicate", *copy) for copy in duplicates]
    rows = [("kind", "item", "label", "other_item", "other_label", "distance")]
    for kind, a, b, distance in pairs:
        first, second = (items.name(a), items.label(a)), (items.name(b), items.label(b))
        rows.append((kind, *first, *second, f"{distance:.4f}"))
    write_file(file, csv_text(rows))
