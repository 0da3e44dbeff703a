"""Neighbourhood component analysis, Eq. 4, over the instances of a batch.

The positive is *not* in the denominator, as the paper writes it, so the loss can go below
zero. d is |x − y|² with |x| = |y| = N, which makes −d = scale · cos − const with
scale = 2N²; the constant cancels. `scale=None` leaves the norms free.
"""

import math
from typing import ClassVar

from torch import Tensor

from nofuss.geometry import normalize, squared_distances
from nofuss.losses.checks import check_number, zero_with_graph
from nofuss.losses.instance_loss import InstanceLoss, Pairs, pair_masks


def nca(embeddings: Tensor, labels: Tensor, *, scale: float | None = 18.0) -> Tensor:
    """Eq. 4, mean over positive pairs (x, y) of d(x,y) + log Σ_{z∈Z} exp(−d(x,z)).

    Z is every item of another class in the batch.
    """
    return nca_of_pairs(embeddings, embeddings, pair_masks(labels), scale=scale)


def nca_of_pairs(
    embeddings: Tensor, references: Tensor, pairs: Pairs, *, scale: float | None
) -> Tensor:
    """Return the same loss for pairs (x, y) and Z among the references."""
    positive, negative = pairs
    rows = (positive.any(1) & negative.any(1)).nonzero()[:, 0]  # (A,) the anchors
    at, y = positive[rows].nonzero(as_tuple=True)  # (T,) each
    if len(rows) == 0:
        return zero_with_graph(embeddings)
    if scale is None:
        logits = -squared_distances(embeddings, references)  # (B, R)
    else:
        logits = scale * (normalize(embeddings) @ normalize(references).T)
    to_negatives = logits[rows].masked_fill(~negative[rows], -math.inf).logsumexp(1)  # (A,)
    return (to_negatives[at] - logits[rows[at], y]).mean()


class NCA(InstanceLoss):
    """Eq. 4 over instances: the denominator sums the negatives of the batch only."""

    takes_pairs: ClassVar[bool] = True

    def __init__(self, *, scale: float | None = 18.0) -> None:
        super().__init__()
        if scale is not None:
            check_number("scale", scale, positive=True)
        self.scale = scale

    def _loss_of_pairs(self, x: Tensor, ref: Tensor, pairs: Pairs) -> Tensor:
        return nca_of_pairs(x, ref, pairs, scale=self.scale)
