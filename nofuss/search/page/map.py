"""The map of an index: t-SNE of a sample of it; everything else is placed near its neighbours.

It is drawn from the vectors of the model as it was trained, so it stays as it is whatever the page
learns.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nofuss.evaluate.findings import project
from nofuss.ranking.neighbours import nearest
from nofuss.search.index import Item, key_of

ANCHORS = 1200
"""Items of the sample; t-SNE takes some seconds for them."""
SHOWN = 20_000
"""Most items on the map."""
STARS = 100
"""Most proxies on the map."""


class Plane(NamedTuple):
    """Coordinates between 0 and 1 for any vector."""

    anchors: Tensor
    """(A, D) unit."""
    places: NDArray[np.float32]
    """(A, 2)"""

    def place(self, vectors: Tensor) -> NDArray[np.float32]:
        """Return coordinates (N, 2): near the closest anchor, a little towards the next two.

        The power is high because the mean of distant places would lie among unrelated items.
        """
        distances, rows = nearest(vectors, self.anchors, 3)
        distances = distances.double() + 1e-3
        weight = (distances / distances[:, :1]).pow(-8).numpy()[..., None]
        mean = (weight * self.places[rows.numpy()]).sum(1) / weight.sum(1)
        return np.asarray(mean, dtype=np.float32)


def lay_out(vectors: Tensor, proxies: Tensor) -> Plane:
    """Lay out a sample's vectors (A, D) together with its model's proxies (P, D)."""
    anchors = torch.cat([vectors, proxies])
    return Plane(anchors, project(anchors.numpy()))


class Stars(NamedTuple):
    """The proxies that the map shows, and their names."""

    vectors: Tensor
    """(P, D)"""
    names: Sequence[str]


def stars_of(proxies: NDArray[np.float32], class_names: Sequence[str]) -> Stars:
    """Return proxies spread evenly over all, named after their class if each has one."""
    chosen = range(0, len(proxies), max(1, -(-len(proxies) // STARS)))
    one_each = len(proxies) == len(class_names)
    names = [class_names[i] if one_each else f"proxy {i}" for i in chosen]
    return Stars(torch.from_numpy(proxies[list(chosen)]), names)


def map_of(
    plane: Plane, items: Sequence[Item], vectors: Tensor, stars: Stars, classes: Sequence[str]
) -> dict[str, Any]:
    """Return the page's map: keys, x, y and class of the items; x, y and name of the proxies."""
    code: dict[str | None, int] = {name: i for i, name in enumerate(classes)}
    return {
        "items": [key_of(item.name) for item in items],
        "places": _numbers(plane.place(vectors)),
        "classes": [code.get(item.label, -1) for item in items],
        "stars": _numbers(plane.place(stars.vectors)),
        "star_names": list(stars.names),
    }


def _numbers(places: NDArray[np.float32]) -> list[float]:
    numbers: list[float] = places.astype(np.float64).round(4).reshape(-1).tolist()
    return numbers
