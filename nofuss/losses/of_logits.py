"""The formulas of the losses over proxies, from logits (T, P): a row a triplet (x, p(y), p(Z)).

Plain torch operations that autograd differentiates any number of times. The fused forms compute
the same in less time and memory, and use these for second derivatives.
"""

import math

import torch
from torch import Tensor

from nofuss.proxies.assignment import ProxyTriplets


def nca_of_logits(
    logits: Tensor,
    triplets: ProxyTriplets,
    *,
    include_positive: bool = False,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Return log Σ_{z∈Z} exp(logit_z) − logit_y for each row, (T,).

    label_smoothing: takes that share of the target from y and spreads it evenly over Z and y,
        as `torch.nn.functional.cross_entropy` does.
    """
    own = triplets.positive[:, None]  # (T, 1)
    own_logit = logits.gather(1, own).squeeze(1)
    counted = None
    if triplets.negative is not None:
        counted = triplets.negative.scatter(1, own, include_positive)
        others = logits.masked_fill(~counted, -math.inf)
    elif include_positive:
        others = logits
    else:
        others = logits.scatter(1, own, -math.inf)
    losses = others.logsumexp(1) - own_logit
    if label_smoothing == 0:
        return losses
    mean = logits.mean(1) if counted is None else (logits * counted).sum(1) / counted.sum(1)
    return losses + label_smoothing * (own_logit - mean)


def triplet_of_logits(logits: Tensor, triplets: ProxyTriplets, *, margin: float) -> Tensor:
    """Return the mean over z∈Z of [logit_z + M − logit_y]₊ for each row, (T,); logits are −d."""
    own = triplets.positive[:, None]  # (T, 1)
    hinge = (logits + margin - logits.gather(1, own)).clamp_min(0)  # (T, P)
    if triplets.negative is None:
        return hinge.scatter(1, own, 0).sum(1) / (hinge.shape[1] - 1)
    return (hinge * triplets.negative).sum(1) / triplets.negative.sum(1)


def anchor_of_cosines(
    cosines: Tensor, triplets: ProxyTriplets, *, scale: float, margin: float
) -> Tensor:
    """Return Proxy-Anchor of cosines (B, P), a scalar; P⁺ are the proxies with a positive."""
    columns = torch.arange(cosines.shape[1], device=cosines.device)
    positive = triplets.positive[:, None] == columns  # (B, P)
    negative = ~positive if triplets.negative is None else triplets.negative
    pull = log1p_sum_exp(-scale * (cosines - margin), positive)  # (P,)
    push = log1p_sum_exp(scale * (cosines + margin), negative)
    return pull.sum() / positive.any(0).sum() + push.mean()


def log1p_sum_exp(logits: Tensor, counted: Tensor) -> Tensor:
    """Return log(1 + Σ exp) of each column over the counted rows; log 1 = 0 without any."""
    one = torch.zeros_like(logits[:1])
    return torch.cat([one, logits.masked_fill(~counted, -math.inf)]).logsumexp(0)
