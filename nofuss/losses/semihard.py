"""Triplet loss with semi-hard mining in the batch (Schroff et al. 2015): a baseline of the paper.

The rule is that of the baselines' public code: for each positive pair the closest negative that is
farther than the positive; if there is none, the farthest negative of all.
"""

import math
from typing import ClassVar

from torch import Tensor

from nofuss.geometry import unit_squared_distances
from nofuss.losses.checks import check_number, zero_with_graph
from nofuss.losses.instance_loss import InstanceLoss, Pairs, pair_masks


def semi_hard_triplet(embeddings: Tensor, labels: Tensor, *, margin: float = 0.2) -> Tensor:
    """Eq. 3 on the unit sphere, mean over positive pairs, each with its semi-hard negative."""
    return semi_hard_of_pairs(embeddings, embeddings, pair_masks(labels), margin=margin)


def semi_hard_of_pairs(
    embeddings: Tensor, references: Tensor, pairs: Pairs, *, margin: float
) -> Tensor:
    """Return the same loss for pairs (x, y) with a negative among the references."""
    positive, negative = pairs
    anchor, y = (positive & negative.any(1, keepdim=True)).nonzero(as_tuple=True)  # (T,)
    if len(anchor) == 0:
        return zero_with_graph(embeddings)
    d = unit_squared_distances(embeddings, references)  # (B, R)
    d_y, d_z = d[anchor, y], d[anchor]  # (T,), (T, R)
    farther = negative[anchor] & (d_z > d_y[:, None])
    closest_farther = d_z.masked_fill(~farther, math.inf).amin(1)
    farthest = d_z.masked_fill(~negative[anchor], -math.inf).amax(1)
    d_semi = closest_farther.where(farther.any(1), farthest)
    return (d_y + margin - d_semi).clamp_min(0).mean()


class SemiHardTriplet(InstanceLoss):
    """Triplet with semi-hard mining (Schroff et al. 2015), margin 0.2 as there."""

    takes_pairs: ClassVar[bool] = True

    def __init__(self, *, margin: float = 0.2) -> None:
        super().__init__()
        check_number("margin", margin)
        self.margin = margin

    def _loss_of_pairs(self, x: Tensor, ref: Tensor, pairs: Pairs) -> Tensor:
        return semi_hard_of_pairs(x, ref, pairs, margin=self.margin)
