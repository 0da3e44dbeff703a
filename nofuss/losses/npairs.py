"""N-pairs (Sohn 2016), Eq. 6 and 8 there: a baseline of the paper."""

from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from nofuss.losses.checks import check_number, zero_with_graph
from nofuss.losses.instance_loss import InstanceLoss


def first_pairs(labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first two items of every class that has two, as rows (anchors, positives)."""
    order = labels.argsort(stable=True)
    _, counts = torch.unique_consecutive(labels[order], return_counts=True)
    start = counts.cumsum(0) - counts
    start = start[counts > 1]
    return order[start], order[start + 1]


def npairs(embeddings: Tensor, labels: Tensor, *, l2: float = 0.002) -> Tensor:
    """mean_i log(1 + Σ_{j≠i} exp(xᵢ·yⱼ − xᵢ·yᵢ)) + l2/4 · mean_i(|xᵢ|² + |yᵢ|²).

    One pair (x, y) a class. The quarter is tf.contrib's `npairs_loss`, and so is the default l2.
    """
    a, p = first_pairs(labels)
    if len(a) < 2:
        return zero_with_graph(embeddings)
    x, y = embeddings[a], embeddings[p]
    own = torch.arange(len(a), device=x.device)
    norms = (x.square().sum(1) + y.square().sum(1)).mean() / 4
    return F.cross_entropy(x @ y.T, own) + l2 * norms


class NPairs(InstanceLoss):
    """N-pairs (Sohn 2016): inner products on free norms, with a small pull on the norms.

    Made for batches of two items a class; of a class with more, the first two are used.
    """

    per_class: ClassVar[int] = 2

    def __init__(self, *, l2: float = 0.002) -> None:
        super().__init__()
        check_number("l2", l2)
        self.l2 = l2

    def _loss(self, x: Tensor, labels: Tensor) -> Tensor:
        return npairs(x, labels, l2=self.l2)
