"""The map of an index: t-SNE of a sample of it; everything else is placed near its neighbours.

It is drawn from the vectors of the model as it was trained, so it stays as it is whatever the page
learns.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

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


@dataclass(frozen=True)
class Plane:
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


def lay_out(vectors: Tensor, proxies: Tensor, *, seed: int = 0) -> Plane:
    """Lay out an index's vectors (N, D) together with its model's proxies (P, D)."""
    chosen = torch.from_numpy(
        np.sort(np.random.default_rng(seed).permutation(len(vectors))[:ANCHORS])
    )
    anchors = torch.cat([vectors[chosen], proxies])
    return Plane(anchors, project(anchors.numpy(), seed=seed))


@dataclass(frozen=True)
class Stars:
    """The proxies that the map shows, and their names."""

    vectors: Tensor
    """(P, D)"""
    names: Sequence[str]

    @classmethod
    def of(cls, proxies: NDArray[np.float32], class_names: Sequence[str]) -> "Stars":
        """Return proxies spread evenly over all, named after their class if each has one."""
        if not len(proxies):
            return cls(torch.from_numpy(proxies), ())
        chosen = np.unique(np.linspace(0, len(proxies) - 1, STARS).round().astype(np.int64))
        one_each = len(proxies) == len(class_names)
        names = [class_names[i] if one_each else f"proxy {i}" for i in chosen]
        return cls(torch.from_numpy(proxies[chosen]), names)


def map_of(
    plane: Plane, items: Sequence[Item], vectors: Tensor, stars: Stars, classes: Sequence[str]
) -> dict[str, Any]:
    """Return the page's map: keys, x, y and class of the items; x, y and name of the proxies."""
    code = {name: i for i, name in enumerate(classes)}
    return {
        "items": [key_of(item.name) for item in items],
        "places": _numbers(plane.place(vectors)),
        "classes": [-1 if item.label is None else code.get(item.label, -1) for item in items],
        "stars": _numbers(plane.place(stars.vectors)),
        "star_names": list(stars.names),
    }


def _numbers(places: NDArray[np.float32]) -> list[float]:
    numbers: list[float] = places.astype(np.float64).round(4).reshape(-1).tolist()
    return numbers
