"""Triplet loss with semi-hard mining in the batch (Schroff et al. 2015): a baseline of the paper.

The rule is the one of the baselines' common code: for each positive pair the closest negative
that is farther than the positive; where there is none, the farthest negative of all.
"""

import math

from torch import Tensor

from nofuss.geometry import normalize, squared_distances
from nofuss.losses.inputs import zero_with_graph
from nofuss.losses.instance_loss import InstanceLoss, pair_masks


def semi_hard_triplet(embeddings: Tensor, labels: Tensor, *, margin: float = 0.2) -> Tensor:
    """Eq. 3 on the unit sphere, mean over positive pairs, each with its semi-hard negative."""
    x = normalize(embeddings)
    positive, negative = pair_masks(labels)
    anchor, y = (positive & negative.any(1, keepdim=True)).nonzero(as_tuple=True)  # (T,)
    if len(anchor) == 0:
        return zero_with_graph(embeddings)
    d = squared_distances(x, x)
    d_y, d_z = d[anchor, y], d[anchor]  # (T,), (T, B)
    farther = negative[anchor] & (d_z > d_y[:, None])
    closest_farther = d_z.masked_fill(~farther, math.inf).amin(1)
    farthest = d_z.masked_fill(~negative[anchor], -math.inf).amax(1)
    d_semi = closest_farther.where(farther.any(1), farthest)
    return (d_y + margin - d_semi).clamp_min(0).mean()


class SemiHardTriplet(InstanceLoss):
    """Triplet with semi-hard mining (Schroff et al. 2015), margin 0.2 as there."""

    def __init__(self, *, margin: float = 0.2) -> None:
        super().__init__()
        self.margin = margin

    def _loss(self, x: Tensor, labels: Tensor) -> Tensor:
        return semi_hard_triplet(x, labels, margin=self.margin)
