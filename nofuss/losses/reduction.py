"""From the losses of triplets over proxies to what a criterion returns: mean, sum, or each."""

import torch
from torch import Tensor

from nofuss.losses.inputs import zero_with_graph
from nofuss.proxies.assignment import ProxyTriplets

REDUCTIONS = ("mean", "sum", "none")
NOT_SEPARABLE = "it sums over the batch inside a logarithm, so an embedding has no loss of its own"


def check_reduction(reduction: str, name: str, *, separable: bool) -> str:
    """One of `REDUCTIONS`; only the mean where an embedding has no loss of its own."""
    if reduction not in REDUCTIONS:
        choices = ", ".join(map(repr, REDUCTIONS))
        raise ValueError(f"unknown reduction {reduction!r}; choose from {choices}")
    if reduction != "mean" and not separable:
        raise ValueError(f"{name} has no reduction={reduction!r}: {NOT_SEPARABLE}")
    return reduction


def anchor_shares(weights: Tensor | None, x: Tensor, reduction: str) -> Tensor | None:
    """What each row of x counts in a sum that is the mean, or the sum; None: 1/B each."""
    if reduction == "sum":
        return x.new_ones(len(x)) if weights is None else weights
    return None if weights is None else weights / weights.sum()


def reduce_losses(
    losses: Tensor, triplets: ProxyTriplets, weights: Tensor | None, batch: int, reduction: str
) -> Tensor:
    """Losses of triplets (T,), weighted by their anchors: their mean, or one for each anchor.

    "none" gives each of the `batch` embeddings the mean over its own triplets times its weight,
    0 where it has none; "sum" is the sum of that. The mean is over triplets, all of one weight
    unless `weights` say otherwise: an anchor with more positives counts more.
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
    own = zeros.index_add(0, anchor, losses * each) / count
    own = own if weights is None else own * weights
    return own if reduction == "none" else own.sum()


def no_losses(x: Tensor, proxies: Tensor, reduction: str) -> Tensor:
    """What a batch without triplets gives: zero, with a graph."""
    zero = zero_with_graph(x) + zero_with_graph(proxies)
    return zero.expand(len(x)) if reduction == "none" else zero


def _nonzero(count: Tensor) -> Tensor:
    return torch.where(count == 0, 1.0, count)
