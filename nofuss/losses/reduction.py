"""From the losses of triplets over proxies to what a criterion returns: mean, sum, or none."""

import torch
from torch import Tensor

from nofuss.losses.inputs import zero_with_graph
from nofuss.proxies.assignment import ProxyTriplets

REDUCTIONS = ("mean", "sum", "none")
NOT_SEPARABLE = "it sums over the batch inside a logarithm, so a single embedding has no loss"


def check_reduction(reduction: str, name: str, *, separable: bool) -> str:
    """Check the reduction: one of `REDUCTIONS`, only the mean if a single embedding has no loss."""
    if reduction not in REDUCTIONS:
        choices = ", ".join(map(repr, REDUCTIONS))
        raise ValueError(f"unknown reduction {reduction!r}; choose from {choices}")
    if reduction != "mean" and not separable:
        raise ValueError(f"{name} has no reduction={reduction!r}: {NOT_SEPARABLE}")
    return reduction


def anchor_shares(weights: Tensor | None, x: Tensor, reduction: str) -> Tensor | None:
    """Return the factor of each row of x in the mean or the sum; None: 1/B each."""
    if reduction == "sum":
        return x.new_ones(len(x)) if weights is None else weights
    return None if weights is None else weights / weights.sum()


def reduce_losses(
    losses: Tensor, triplets: ProxyTriplets, weights: Tensor | None, batch: int, reduction: str
) -> Tensor:
    """Reduce losses of triplets (T,), weighted by their anchors, to a scalar or to one an anchor.

    "none" gives each of the `batch` embeddings the mean over its triplets times its weight, 0 if
    it has none; "sum" is the sum of that. The mean is over triplets, equally weighted without
    `weights`: an anchor with more positives counts more.
    """
    anchor, counted = triplets.anchor, triplets.counted
    weights = None if weights is None else weights.to(losses.dtype)
    if anchor is None:
        weighted = losses if weights is None else losses * weights
        if reduction == "none":
            return weighted
        if reduction == "sum":
            return weighted.sum()
        return losses.mean() if weights is None else weighted.sum() / weights.sum()
    each = torch.ones_like(losses) if counted is None else counted.to(losses.dtype)
    if reduction == "mean":
        each = each if weights is None else each * weights[anchor]
        return (losses * each).sum() / _nonzero(each.sum())
    zeros = losses.new_zeros(batch)
    count = _nonzero(zeros.index_add(0, anchor, each))
    of_anchors = zeros.index_add(0, anchor, losses * each) / count
    of_anchors = of_anchors if weights is None else of_anchors * weights
    return of_anchors if reduction == "none" else of_anchors.sum()


def no_losses(x: Tensor, proxies: Tensor, reduction: str) -> Tensor:
    """Return the loss of a batch without triplets: zero, with a graph."""
    zero = zero_with_graph(x) + zero_with_graph(proxies)
    return zero.expand(len(x)) if reduction == "none" else zero


def _nonzero(count: Tensor) -> Tensor:
    return torch.where(count == 0, 1.0, count)
