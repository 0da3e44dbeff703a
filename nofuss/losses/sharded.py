"""The plain losses over proxies where each process holds some of the columns of the logits.

The formulas of `of_logits.py`, for any assignment and for free norms; sums over proxies are also
sums over processes. Where p(Z) is every other proxy and norms are equal, the fused forms compute
the same in less memory.
"""

import math

import torch
from torch import Tensor

from nofuss.distributed.collectives import from_shards, to_shards
from nofuss.distributed.processes import all_max, all_sum
from nofuss.distributed.shard import Shard
from nofuss.proxies.assignment import ProxyTriplets


def sharded_nca(
    logits: Tensor, triplets: ProxyTriplets, shard: Shard, *, include_positive: bool
) -> Tensor:
    """Return `nca_of_logits`, from this process's columns (T, own rows)."""
    own, counted = _cells(triplets, shard)
    if include_positive:
        counted = counted | own
    others = logits.masked_fill(~counted, -math.inf)
    top = all_max(others.detach().amax(1))  # the same in all processes, so that sums add up
    z = from_shards((others - top[:, None]).exp().sum(1))
    return z.log() + top - _own_logit(logits, own)


def sharded_triplet(
    logits: Tensor, triplets: ProxyTriplets, shard: Shard, *, margin: float
) -> Tensor:
    """Return `triplet_of_logits`, from this process's columns (T, own rows)."""
    own, counted = _cells(triplets, shard)
    # Every process's hinges use the positive's logit, so its gradient is the sum of all parts.
    own_logit = to_shards(_own_logit(logits, own))
    hinge = (logits + margin - own_logit[:, None]).clamp_min(0)
    return from_shards((hinge * counted).sum(1)) / all_sum(counted.sum(1))


def sharded_anchor(
    cosines: Tensor, triplets: ProxyTriplets, shard: Shard, *, scale: float, margin: float
) -> Tensor:
    """Return `anchor_of_cosines`, from this process's columns (B, own rows)."""
    own, counted = _cells(triplets, shard)
    pull = log1p_sum_exp(-scale * (cosines - margin), own)
    push = log1p_sum_exp(scale * (cosines + margin), counted)
    used = all_sum(own.any(0).sum())
    return from_shards(pull.sum() / used + push.sum() / shard.total)


def _cells(triplets: ProxyTriplets, shard: Shard) -> tuple[Tensor, Tensor]:
    """Return masks (T, own rows) of each anchor's positive, and of its negatives."""
    rows = torch.arange(shard.start, shard.stop, device=triplets.positive.device)
    own = triplets.positive[:, None] == rows
    return own, ~own if triplets.negative is None else triplets.negative


def _own_logit(logits: Tensor, own: Tensor) -> Tensor:
    """Return each anchor's logit of its positive (T,), from the process that holds it."""
    return from_shards(logits.masked_fill(~own, 0).sum(1))


def log1p_sum_exp(logits: Tensor, counted: Tensor) -> Tensor:
    """Return log(1 + Σ exp) of each column over the counted rows; log 1 = 0 without any."""
    one = torch.zeros_like(logits[:1])
    return torch.cat([one, logits.masked_fill(~counted, -math.inf)]).logsumexp(0)
