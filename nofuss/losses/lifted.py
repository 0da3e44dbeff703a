"""Lifted structured embedding (Song et al. 2016), Eq. 4 there: a baseline of the paper."""

import math

import torch
from torch import Tensor

from nofuss.geometry import distances, root, unit_squared_distances
from nofuss.losses.checks import check_number, zero_with_graph
from nofuss.losses.instance_loss import InstanceLoss, pair_masks


def lifted_structure(
    embeddings: Tensor, labels: Tensor, *, margin: float = 1.0, unit_norm: bool = False
) -> Tensor:
    """½ mean over positive pairs of [log(Σ_k e^{α−D_ik} + Σ_l e^{α−D_jl}) + D_ij]₊².

    D is the Euclidean distance, not squared; k and l run over the negatives of i and of j.
    """
    positive, negative = pair_masks(labels)
    i, j = (positive & negative.any(1, keepdim=True)).nonzero(as_tuple=True)  # (T,) both ways
    if len(i) == 0:
        return zero_with_graph(embeddings)
    x = embeddings
    d = root(unit_squared_distances(x, x)) if unit_norm else distances(x, x)
    push = (margin - d).masked_fill(~negative, -math.inf).logsumexp(1)  # (B,)
    return (torch.logaddexp(push[i], push[j]) + d[i, j]).clamp_min(0).square().mean() / 2


class LiftedStructure(InstanceLoss):
    """Lifted structure (Song et al. 2016) on free norms, margin 1, as there."""

    def __init__(self, *, margin: float = 1.0, unit_norm: bool = False) -> None:
        super().__init__()
        check_number("margin", margin)
        self.margin = margin
        self.unit_norm = unit_norm

    def _loss(self, x: Tensor, labels: Tensor) -> Tensor:
        return lifted_structure(x, labels, margin=self.margin, unit_norm=self.unit_norm)
