"""Proxy-NCA over many proxies as one fused, chunked autograd function in plain torch.

The plain form holds several (B, P) matrices and the normalised proxies. Here the proxies are
walked in chunks that stay in cache, twice: the first walk sums the exponentials and the
embeddings' gradient, the second gives the proxies' gradient. Three matrix products, one
exponential a logit, and nothing of size (P, B) but, if kept, the exponentials.

Logits are laid out (P, B), so that a chunk is contiguous. Values and gradients equal the plain
form's, on any device; not differentiable twice. Free norms (−|x − p|²) stay with the plain form.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from nofuss.losses.fused_walk import KEEP_BYTES, Walk, leave, take
from nofuss.losses.inputs import without_autocast
from nofuss.processes import all_max, all_sum
from nofuss.proxies.shard import Shard


def pays(batch: int, num_proxies: int, dim: int) -> bool:
    """Whether the fused form is faster than the plain one: from 500 proxies and 2¹⁷ numbers on.

    Measured, forward + backward, for batches of 8 to 512 in 64 and 512 dimensions: the two meet
    near 2,000 proxies for (8, 64), 1,000 for (32, 64), 400 for (32, 512) and (512, 64). The
    fused one takes twice the plain one's time at 100 proxies (1 ms) and a third at 10,000.
    """
    return num_proxies >= 500 and (batch + dim) * num_proxies >= 2**17


def fused_proxy_nca(
    x: Tensor,
    positive: Tensor,
    proxies: Tensor,
    *,
    scale: float | Tensor,
    include_positive: bool = False,
    keep: bool | None = None,
    shard: Shard | None = None,
) -> Tensor:
    """Proxy-NCA, Eq. 4 over proxies, mean over the batch: log Σ_{p≠p(y)} exp(logit) − logit_y.

    x: (B, D) directions of the embeddings; logits are scale · x·p/|p|.
    positive: (B,) rows of `proxies`.
    include_positive: False is the paper; True is the softmax form common elsewhere.
    keep: True holds one (P, B) buffer between the walks; False computes it again, a fourth
        matrix product, in O(chunk) memory; None keeps the first 128 MB of it, `KEEP_BYTES`.
    shard: which rows `proxies` are, where each process holds some; all then have the same loss,
        each the gradient of its rows and its part of the gradient by x: see `to_shards`.
    """
    x = x.to(torch.promote_types(x.dtype, proxies.dtype)) * scale
    wanted = torch.is_grad_enabled() and proxies.requires_grad
    kept = len(proxies) if keep else 0
    if keep is None:
        kept = min(len(proxies), KEEP_BYTES // max(1, len(x) * x.element_size()))
    loss: Tensor = _ProxyNCA.apply(  # type: ignore[no-untyped-call]
        x, positive, proxies.to(x.dtype), include_positive, kept if wanted else 0, shard
    )
    return loss


class _ProxyNCA(torch.autograd.Function):
    """Of logits x·p/|p|: x carries the scale, whose gradient autograd finds by itself."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        positive: Tensor,
        proxies: Tensor,
        include_positive: bool,
        kept: int,
        shard: Shard | None,
    ) -> Tensor:
        """First walk: Z, and the gradient by x."""
        walk, total = Walk(x, positive, proxies, shard), shard.total if shard else len(proxies)
        if total == 1 and not include_positive:
            raise ValueError("got one proxy; a positive and a negative need two")
        block = take("exponentials", kept * len(x), like=x)
        buffer = block[: kept * len(x)].view(kept, len(x))
        scratch = x.new_empty(walk.rows if kept < len(proxies) else 0, len(x))
        ones = x.new_ones(walk.rows)
        z, dx, top = x.new_zeros(len(x)), torch.zeros_like(x), x.new_zeros(len(x))
        tops: Tensor | None = None
        if not bounded(x, total):
            top.fill_(torch.finfo(x.dtype).min)
            tops = x.new_empty(len(walk), len(x))
        with without_autocast(x):
            for i, (chunk, own) in enumerate(walk):
                walk.find_norms(chunk)
                s = walk.logits(chunk, x, out=buffer[chunk] if chunk.stop <= kept else scratch)
                if own and not include_positive:
                    s[own] = -math.inf
                if tops is not None:  # a running maximum: what was summed so far fades with it
                    torch.maximum(top, s.amax(0), out=tops[i])
                    fade = (top - tops[i]).exp_()
                    z.mul_(fade)
                    dx.mul_(fade[:, None])
                    top = tops[i]
                    s.sub_(top)
                z.addmv_(s.exp_().T, ones[: len(s)])
                m = walk.weigh_(chunk, s)
                dx.addmm_(s.T, m)
        p_y = walk.only_here(proxies[walk.row] * walk.inverse[walk.row, None])  # (B, D)
        own_logit = (x * p_y).sum(1)
        if shard is not None:
            if tops is not None:
                own_top, top = top, all_max(top.clone())
                fade = (own_top - top).exp_()
                z.mul_(fade)
                dx.mul_(fade[:, None])
            z, own_logit = all_sum(torch.stack([z, own_logit]))
        loss = (z.log() + top - own_logit).mean()
        dx.div_(z[:, None]).sub_(p_y)
        ctx.walk, ctx.include_positive = walk, include_positive
        ctx.block, ctx.kept = block, kept
        ctx.save_for_backward(x, proxies, z, dx, top, tops)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Second walk: the gradient by the proxies, each chunk straight into its place."""
        x, proxies, z, dx, top, tops = ctx.saved_tensors
        share = grad / len(x)
        dx = dx * share if ctx.needs_input_grad[0] else None
        if not ctx.needs_input_grad[2]:
            return dx, None, None, None, None, None
        walk: Walk = ctx.walk
        buffer = ctx.block[: ctx.kept * len(x)].view(ctx.kept, len(x))
        scratch = x.new_empty(walk.rows if len(buffer) < len(proxies) else 0, len(x))
        dp = torch.empty_like(proxies)
        weighted = x * (share / z)[:, None]  # into the product: no pass over the exponentials
        with without_autocast(x):
            for i, (chunk, own) in enumerate(walk):
                if chunk.stop <= len(buffer):
                    s = buffer[chunk]
                else:
                    s = walk.logits(chunk, x, out=scratch)
                    if own and not ctx.include_positive:
                        s[own] = -math.inf
                    if tops is not None:
                        s.sub_(tops[i])
                    walk.weigh_(chunk, s.exp_())
                if tops is not None:
                    weighted = x * ((tops[i] - top).exp_() * (share / z))[:, None]
                walk.pull_back_(chunk, s, weighted, dp)
            walk.pull_back_positives_(x * share, dp)
        leave("exponentials", ctx.block)
        ctx.block, ctx.kept = ctx.block[:0], 0  # a second backward computes it again
        return dx, None, dp, None, None, None


def bounded(x: Tensor, num_proxies: int) -> bool:
    """Whether sums of exp(x·p̂) can neither overflow nor vanish, so that no maximum is needed.

    |x·p̂| ≤ |x|: while |x| + log P is within the exponents of the type (85 in float32: a scale
    up to 71 over a million proxies) every exponential is a normal number of full precision.
    """
    room = math.log(torch.finfo(x.dtype).max) - 3
    longest = float(torch.linalg.vector_norm(x, dim=1).max())
    return longest + math.log(num_proxies) < room
