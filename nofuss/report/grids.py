"""Pictures for the templates: queries with their neighbours, and pairs worth a second look.

All of it is plain data (JSON), drawn by macros.html: a reproduction stores its grids in files.
"""

from typing import TypedDict

import numpy as np
from numpy.typing import NDArray

from nofuss.data.collection import Collection
from nofuss.data.decode import data_uri, encoded, shrunk_item
from nofuss.report.findings import Neighbours

Rows = NDArray[np.int64]
SHOWN = 8
SIDE = 112
"""Longest side of a thumbnail; more than the page shows, for dense screens."""
ALIKE = 3.0
"""Mean difference of gray values (0…255) at 16 × 16 pixels, below which pictures are copies."""


class Thumbnail(TypedDict):
    """An item's picture, with its class in words for those who do not see it."""

    src: str | None
    """A data: address; None where the file can't be read any more."""
    label: str
    title: str
    pixelated: bool
    """Whether it is so small that its pixels are shown enlarged."""


class Hit(TypedDict):
    """A neighbour of a query."""

    picture: Thumbnail
    distance: float
    right: bool
    """Whether it is of the query's class."""


class GridRow(TypedDict):
    """A query and its neighbours, closest first."""

    query: Thumbnail
    hits: list[Hit]


class GridGroup(TypedDict):
    """Queries chosen for one reason, which is their title."""

    title: str
    rows: list[GridRow]


class Items:
    """The items that a report is about: positions in the embeddings → rows of the data."""

    def __init__(self, collection: Collection, rows: Rows) -> None:
        self.collection, self.rows = collection, rows
        self.labels: Rows = collection.labels[rows]

    def name(self, position: int) -> str:
        """Return the item's name."""
        return self.collection.names[int(self.rows[position])]

    def file(self, position: int) -> str:
        """Return the last part of the item's name."""
        return self.name(position).rpartition("/")[2]

    def label(self, position: int) -> str:
        """Return the name of the item's class; empty where it has none."""
        label = self.labels[position]
        return "" if label < 0 else self.collection.class_names[label]

    def look_alike(self, a: int, b: int) -> bool:
        """Return whether two pictures are the same but for scale and compression."""
        small = []
        for position in (a, b):
            image = shrunk_item(self.collection, int(self.rows[position]), side=64)
            if image is None:
                return False
            small.append(np.asarray(image.convert("L").resize((16, 16)), dtype=np.float32))
        return float(np.abs(small[0] - small[1]).mean()) < ALIKE

    def thumbnail(self, position: int) -> Thumbnail:
        """Return the item's picture, encoded for the page."""
        image = shrunk_item(self.collection, int(self.rows[position]), side=SIDE)
        label = self.label(position)
        return Thumbnail(
            src=None if image is None else data_uri(*encoded(image)),
            label=label,
            title=f"{label} · {self.name(position)}",
            pixelated=image is not None and max(image.size) <= 64,
        )

    def thumbnails(self, *positions: int) -> list[Thumbnail]:
        """Return the pictures of several items; none where the items are vectors."""
        return [self.thumbnail(p) for p in positions] if self.collection.has_pictures else []


def choose_queries(nearest: Neighbours, labels: Rows, *, seed: int = 0) -> dict[str, Rows]:
    """Return rows of `nearest` to show: some at random, the best, the worst; one of a class."""
    own = labels[nearest.queries]
    right = labels[nearest.items[:, :SHOWN]] == own[:, None]  # (Q, K)
    positives = np.bincount(labels)[own] - 1
    order = np.random.default_rng(seed).permutation(len(own))
    order = order[positives[order] > 0]
    # Early hits count more, relative to the best score that the class's size allows. Equal scores
    # are ordered by distance: close neighbours make the better good example, and the more
    # surprising bad one.
    weight = 1 / np.arange(1, right.shape[1] + 1)
    possible = np.where(np.arange(right.shape[1]) < positives[:, None], weight, 0).sum(1)
    score = (right * weight).sum(1) / np.maximum(possible, 1e-9)
    distance = nearest.distances[:, :SHOWN].mean(1)
    best = order[np.lexsort((distance[order], -score[order]))]
    worst = order[np.lexsort((distance[order], score[order]))]
    return {
        "Random queries": _distinct(order, own, 6),
        "Best": _distinct(best, own, 4),
        "Worst": _distinct(worst, own, 6),
    }


def retrieval_grid(items: Items, nearest: Neighbours, *, seed: int = 0) -> list[GridGroup]:
    """Return the chosen queries with their neighbours, grouped by why they were chosen."""
    chosen = choose_queries(nearest, items.labels, seed=seed)
    return [
        GridGroup(title=title, rows=[_grid_row(items, nearest, int(row)) for row in rows])
        for title, rows in chosen.items()
        if len(rows)
    ]


def _grid_row(items: Items, nearest: Neighbours, row: int) -> GridRow:
    query = int(nearest.queries[row])
    neighbours = zip(nearest.items[row, :SHOWN], nearest.distances[row, :SHOWN], strict=True)
    hits = [
        Hit(
            picture=items.thumbnail(int(item)),
            distance=float(distance),
            right=bool(items.labels[item] == items.labels[query]),
        )
        for item, distance in neighbours
    ]
    return GridRow(query=items.thumbnail(query), hits=hits)


def _distinct(order: Rows, labels: Rows, most: int) -> Rows:
    """Return the first rows of `order`, one of each class."""
    _, first = np.unique(labels[order], return_index=True)
    return order[np.sort(first)][:most]
