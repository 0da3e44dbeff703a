"""A map of an index: t-SNE of a sample, everything else beside its nearest in the sample."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nofuss.evaluate.neighbours import nearest
from nofuss.report.projection import project

ANCHORS = 1200
"""Items that are laid out by t-SNE, which takes some seconds."""


@dataclass(frozen=True)
class Plane:
    """Places between 0 and 1 for any vector."""

    anchors: Tensor
    """(A, D) unit."""
    places: NDArray[np.float32]
    """(A, 2)"""

    def place(self, vectors: Tensor) -> NDArray[np.float32]:
        """(N, D) → (N, 2): beside the nearest anchor, drawn a little towards the next two.

        The power is high because the mean of places far apart would lie among strangers.
        """
        apart, rows = nearest(vectors, self.anchors, 3)
        apart = apart.double() + 1e-3
        weight = (apart / apart[:, :1]).pow(-8).numpy()[..., None]
        mean = (weight * self.places[rows.numpy()]).sum(1) / weight.sum(1)
        return np.asarray(mean, dtype=np.float32)


def lay_out(vectors: Tensor, proxies: Tensor, *, seed: int = 0) -> Plane:
    """The plane of an index's vectors (N, D) and of its model's proxies (P, D)."""
    chosen = torch.from_numpy(
        np.sort(np.random.default_rng(seed).permutation(len(vectors))[:ANCHORS])
    )
    anchors = torch.cat([vectors[chosen], proxies])
    return Plane(anchors, project(anchors.numpy(), seed=seed))
