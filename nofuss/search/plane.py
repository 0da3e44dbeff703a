"""A map of an index: t-SNE of a sample; everything else is placed near its neighbours in it."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nofuss.evaluate.findings import project
from nofuss.ranking.neighbours import nearest

ANCHORS = 1200
"""Items of the sample; t-SNE takes some seconds for them."""


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
