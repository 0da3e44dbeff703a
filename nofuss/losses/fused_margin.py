"""Proxy-Triplet and Proxy-Anchor over many proxies, on the walk of the fused Proxy-NCA.

The weight of a cell (proxy, anchor) is known as soon as its chunk is, so one walk gives loss and
gradients: three matrix products, and O(chunk) memory beside the gradients themselves.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from nofuss.geometry import normalize
from nofuss.losses.fused_walk import Walk
from nofuss.losses.inputs import without_autocast
from nofuss.processes import all_sum
from nofuss.proxies.shard import Shard

Gradients = tuple[Tensor, Tensor, Tensor]
"""By x, by the proxies, by the margin."""
WalkOnce = Callable[
    [Tensor, Tensor, Tensor, Tensor, Shard | None, bool], tuple[Tensor, Gradients | None]
]


def fused_proxy_triplet(
    x: Tensor,
    positive: Tensor,
    proxies: Tensor,
    *,
    scale: float | Tensor,
    margin: float,
    shard: Shard | None = None,
) -> Tensor:
    """Eq. 3 over proxies: mean of [scale·(cos_z − cos_y) + M]₊ over all (x, p(y), p(z)).

    x: (B, D) directions of the embeddings; positive: (B,) rows of `proxies`; shard: as in
    `fused_proxy_nca`.
    """
    x = x.to(torch.promote_types(x.dtype, proxies.dtype)) * scale
    return _apply(_triplet, x, positive, proxies, x.new_tensor(margin), shard)


def fused_proxy_anchor(
    x: Tensor,
    positive: Tensor,
    proxies: Tensor,
    *,
    scale: float | Tensor,
    margin: float,
    shard: Shard | None = None,
) -> Tensor:
    """mean_{p∈P⁺} log(1+Σ_{x∈X⁺} e^{−α(s−δ)}) + mean_{p∈P} log(1+Σ_{x∈X⁻} e^{α(s+δ)}).

    Kim et al. 2020, Eq. 4; x: (B, D) directions of the embeddings; positive: (B,) rows of
    `proxies`; scale and margin are their α and δ; shard: as in `fused_proxy_nca`.
    """
    x = x.to(torch.promote_types(x.dtype, proxies.dtype))
    scale = torch.as_tensor(scale, dtype=x.dtype, device=x.device)
    return _apply(_anchor, x * scale, positive, proxies, scale * margin, shard)


def _triplet(
    x: Tensor,
    positive: Tensor,
    proxies: Tensor,
    margin: Tensor,
    shard: Shard | None,
    gradient: bool,
) -> tuple[Tensor, Gradients | None]:
    """A cell weighs 1 where its hinge is open; x carries the scale."""
    num_proxies = shard.total if shard else len(proxies)
    if num_proxies == 1:
        raise ValueError("got one proxy; a positive and a negative need two")
    walk = Walk(x, positive, proxies, shard)
    p_y = walk.only_here(normalize(proxies[walk.row]))  # (B, D)
    lead = margin - _whole((x * p_y).sum(1), shard)
    count = len(x) * (num_proxies - 1)
    x_mean = x / count
    e, ones = x.new_empty(walk.rows, len(x)), x.new_ones(walk.rows)
    total, open_, dx = x.new_zeros(()), x.new_zeros(len(x)), torch.zeros_like(x)
    dp = torch.empty_like(proxies) if gradient else None
    for chunk, own in walk:
        walk.find_norms(chunk)
        s = walk.logits(chunk, x, out=e).add_(lead).clamp_min_(0)  # (chunk, B)
        if own:
            s[own] = 0
        total += s.sum()
        if dp is not None:
            open_.addmv_(s.sign_().T, ones[: len(s)])
            m = walk.weigh_(chunk, s)
            dx.addmm_(s.T, m)
            walk.pull_back_(chunk, s, x_mean, dp)
    total = _whole(total, shard)
    if dp is None:
        return total / count, None
    open_ = _whole(open_, shard)
    dx.addcmul_(p_y, open_[:, None], value=-1).div_(count)
    walk.pull_back_positives_(x_mean * open_[:, None], dp)
    return total / count, (dx, dp, walk.only_here(open_[:, None]).sum() / count)


def _anchor(
    x: Tensor,
    positive: Tensor,
    proxies: Tensor,
    margin: Tensor,
    shard: Shard | None,
    gradient: bool,
) -> tuple[Tensor, Gradients | None]:
    """The negatives of a proxy are one row; its positives need B numbers in all.

    x and the margin carry the scale.
    """
    walk, num_proxies = Walk(x, positive, proxies, shard), shard.total if shard else len(proxies)
    p_y = walk.only_here(normalize(proxies[walk.row]))  # (B, D)
    pull, inside = _pull(margin - _whole((x * p_y).sum(1), shard), positive)
    dx = -inside[:, None] * p_y
    push, dmargin = x.new_zeros(()), walk.only_here(inside[:, None]).sum()
    e = x.new_empty(walk.rows, len(x))
    dp = torch.empty_like(proxies) if gradient else None
    for chunk, own in walk:
        walk.find_norms(chunk)
        s = walk.logits(chunk, x, out=e).add_(margin)  # (chunk, B)
        if own:
            s[own] = -math.inf
        top = s.amax(1).clamp_min_(0)  # 1 = exp(0) is in the sum too
        outside = s.sub_(top[:, None]).exp_().sum(1)
        whole = outside + (-top).exp_()
        push += (whole.log() + top).sum()
        if dp is not None:
            weight = 1 / (whole * num_proxies)
            dmargin += outside @ weight
            m = walk.weigh_(chunk, s, weight)
            dx.addmm_(s.T, m)
            walk.pull_back_(chunk, s, x, dp, weight)
    loss = pull + _whole(push, shard) / num_proxies
    if dp is None:
        return loss, None
    walk.pull_back_positives_(x * inside[:, None], dp)
    return loss, (dx, dp, dmargin)


def _whole(part: Tensor, shard: Shard | None) -> Tensor:
    """The sum over the shards."""
    return part if shard is None else all_sum(part)


def _pull(t: Tensor, positive: Tensor) -> tuple[Tensor, Tensor]:
    """mean_{p∈P⁺} log(1 + Σ_{b∈X⁺} exp t_b), and its derivative by t."""
    used, of_used = torch.unique(positive, return_inverse=True)
    top = t.new_zeros(len(used)).scatter_reduce_(0, of_used, t, "amax")
    e = (t - top[of_used]).exp()
    whole = (-top).exp().index_add_(0, of_used, e)
    return (whole.log() + top).sum() / len(used), e / (whole[of_used] * len(used))


def _apply(
    walk_once: WalkOnce,
    x: Tensor,
    positive: Tensor,
    proxies: Tensor,
    margin: Tensor,
    shard: Shard | None,
) -> Tensor:
    gradient = torch.is_grad_enabled() and (x.requires_grad or proxies.requires_grad)
    with without_autocast(x):
        loss: Tensor = _Walked.apply(  # type: ignore[no-untyped-call]
            x, positive, proxies.to(x.dtype), margin, shard, walk_once, gradient
        )
    return loss


class _Walked(torch.autograd.Function):
    """A loss whose gradients are made together with it."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        positive: Tensor,
        proxies: Tensor,
        margin: Tensor,
        shard: Shard | None,
        walk_once: WalkOnce,
        gradient: bool,
    ) -> Tensor:
        """The loss; its gradients wait."""
        loss, ctx.gradients = walk_once(x, positive, proxies, margin, shard, gradient)
        ctx.walk_once, ctx.shard = walk_once, shard
        ctx.save_for_backward(x, positive, proxies, margin)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients, given away: one that is still held here would be copied by autograd."""
        inputs = ctx.saved_tensors
        gradients = ctx.gradients
        if gradients is None:  # again, with retain_graph
            gradients = ctx.walk_once(*inputs, ctx.shard, True)[1]
        ctx.gradients = None
        # A plain backward() comes with 1, and then a pass over the proxies is saved.
        dx, dp, dmargin = gradients if grad == 1 else (each.mul_(grad) for each in gradients)
        return dx, None, dp, dmargin, None, None, None
