"""Rows of pictures: queries with their neighbours, and pairs worth a second look."""

from collections.abc import Sequence
from xml.etree.ElementTree import Element

import numpy as np
from numpy.typing import NDArray

from nofuss.data.collection import Collection
from nofuss.data.thumbnail import encoded
from nofuss.report.findings import Neighbours
from nofuss.report.html import Child, tag
from nofuss.report.thumbnails import SIDE, data_uri, has_pictures, picture

Rows = NDArray[np.int64]
Card = tuple[int, int, Child]
"""Two positions, and the words beside their pictures."""
SHOWN = 8
ALIKE = 3.0
"""Mean difference of gray values (0…255) at 16 × 16 pixels, below which pictures are copies."""


class Items:
    """The items that a report speaks of: positions in the embeddings → rows of the data."""

    def __init__(self, collection: Collection, rows: Rows) -> None:
        self.collection, self.rows = collection, rows
        labels = collection.labels
        self.labels: Rows = np.full(len(rows), -1, np.int64) if labels is None else labels[rows]

    def name(self, position: int) -> str:
        """What the item is called."""
        return self.collection.names[int(self.rows[position])]

    def file(self, position: int) -> str:
        """The last part of its name."""
        return self.name(position).rpartition("/")[2]

    def label(self, position: int) -> str:
        """The name of its class."""
        label = self.labels[position]
        return "" if label < 0 else self.collection.class_names[label]

    def look_alike(self, a: int, b: int) -> bool:
        """Whether two pictures are the same but for scale and compression."""
        small = []
        for position in (a, b):
            image = picture(self.collection, int(self.rows[position]), side=64)
            if image is None:
                return False
            small.append(np.asarray(image.convert("L").resize((16, 16)), dtype=np.float32))
        return float(np.abs(small[0] - small[1]).mean()) < ALIKE

    def image(self, position: int) -> Element:
        """Its picture, with its class in words for those who do not see it."""
        shown = picture(self.collection, int(self.rows[position]), side=SIDE)
        if shown is None:
            return tag("span", "no picture", class_="lost")
        tiny = max(shown.size) <= 64
        title = f"{self.label(position)} · {self.name(position)}"
        return tag(
            "img",
            src=data_uri(*encoded(shown)),
            alt=self.label(position),
            title=title,
            class_="pixel" if tiny else None,
        )


def choose_queries(found: Neighbours, labels: Rows, *, seed: int = 0) -> dict[str, Rows]:
    """Rows of `found` to show: some at random, the best and the worst, of different classes."""
    own = labels[found.queries]
    right = labels[found.items[:, :SHOWN]] == own[:, None]  # (Q, K)
    positives = np.bincount(labels)[own] - 1
    order = np.random.default_rng(seed).permutation(len(own))
    order = order[positives[order] > 0]
    # Early hits count more, out of those there could be; then close neighbours: the better good
    # example, and the stranger bad one.
    weight = 1 / np.arange(1, right.shape[1] + 1)
    possible = np.where(np.arange(right.shape[1]) < positives[:, None], weight, 0).sum(1)
    worth = (right * weight).sum(1) / np.maximum(possible, 1e-9)
    near = found.distances[:, :SHOWN].mean(1)
    best = order[np.lexsort((near[order], -worth[order]))]
    worst = order[np.lexsort((near[order], worth[order]))]
    return {
        "Random queries": _distinct(order, own, 6),
        "Best": _distinct(best, own, 4),
        "Worst": _distinct(worst, own, 6),
    }


def hit_row(items: Items, found: Neighbours, row: int) -> Element:
    """A query and its neighbours; right and wrong differ in sign and border, not only colour."""
    query = int(found.queries[row])
    cells = [
        tag(
            "li",
            items.image(query),
            tag("span", items.label(query), class_="name"),
            class_="query",
        )
    ]
    for item, distance in zip(found.items[row, :SHOWN], found.distances[row, :SHOWN], strict=True):
        right = items.labels[item] == items.labels[query]
        cells.append(
            tag(
                "li",
                items.image(int(item)),
                tag(
                    "span",
                    tag("b", "✓ " if right else "✗ "),
                    items.label(int(item)),
                    class_="name",
                ),
                f"{distance:.2f}",
                class_="right" if right else "wrong",
            )
        )
    return tag("ol", *cells, class_="hit")


def pair_cards(items: Items, pairs: Sequence[Card]) -> Element:
    """Two items beside each other with what is to be said about them."""
    cards = []
    for first, second, words in pairs:
        two = None
        if has_pictures(items.collection):
            two = tag("span", items.image(first), items.image(second), class_="two")
        cards.append(tag("li", two, tag("span", words, class_="what")))
    return tag("ul", cards, class_="cards")


def _distinct(order: Rows, labels: Rows, most: int) -> Rows:
    """The first of `order`, one a class."""
    _, first = np.unique(labels[order], return_index=True)
    return order[np.sort(first)][:most]
