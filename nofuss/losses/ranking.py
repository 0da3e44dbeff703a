"""The ranking loss, Eq. 2, of which all the others are surrogates. For evaluation only."""

import torch
from torch import Tensor

from nofuss.geometry import squared_distances, unit_squared_distances
from nofuss.losses.checks import zero_with_graph
from nofuss.losses.instance_loss import InstanceLoss, pair_masks


@torch.no_grad()
def ranking(embeddings: Tensor, labels: Tensor, *, unit_norm: bool = True) -> Tensor:
    """Eq. 2, mean of H(d(x,y) − d(x,z)) over all triplets; d on the unit sphere by default.

    H(0) = 0: Eq. 1 asks for d(x,y) ≤ d(x,z), so a tie is no violation.
    """
    positive, negative = pair_masks(labels)
    if not (positive.any(1) & negative.any(1)).any():
        return zero_with_graph(embeddings)
    d = (unit_squared_distances if unit_norm else squared_distances)(embeddings, embeddings)
    anchor, y = positive.nonzero(as_tuple=True)  # (T,)
    wrong = (d[anchor, y, None] > d[anchor]) & negative[anchor]  # (T, B)
    return wrong.sum().to(d.dtype) / negative[anchor].sum()


class Ranking(InstanceLoss):
    """Eq. 2, the fraction of triplets in the wrong order; it has no gradient.

    Embeddings are normalised first, as in every comparison of neighbours here; `unit_norm=False`
    takes distances between them as they are.
    """

    def __init__(self, *, unit_norm: bool = True) -> None:
        super().__init__()
        self.unit_norm = unit_norm

    def _loss(self, x: Tensor, labels: Tensor) -> Tensor:
        return ranking(x, labels, unit_norm=self.unit_norm)
