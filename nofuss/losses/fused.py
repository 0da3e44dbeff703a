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

from nofuss.losses.fused_walk import Walk, inverse_norms, through_norm_

KEEP_BYTES = 2**28
"""The exponentials are kept for the second walk up to this size, and computed again beyond it."""


def fused_proxy_nca(
    x: Tensor,
    positive: Tensor,
    proxies: Tensor,
    *,
    scale: float | Tensor,
    include_positive: bool = False,
    keep: bool | None = None,
) -> Tensor:
    """Proxy-NCA, Eq. 4 over proxies, mean over the batch: log Σ_{p≠p(y)} exp(logit) − logit_y.

    x: (B, D) directions of the embeddings; logits are scale · x·p/|p|.
    positive: (B,) rows of `proxies`.
    include_positive: False is the paper; True is the softmax form common elsewhere.
    keep: True holds one (P, B) buffer between the walks; False computes it again, a fourth
        matrix product, in O(chunk) memory; None keeps up to 256 MB (`KEEP_BYTES`).
    """
    x = x.to(torch.promote_types(x.dtype, proxies.dtype)) * scale
    if keep is None:
        keep = len(proxies) * len(x) * x.element_size() <= KEEP_BYTES
    keep = keep and torch.is_grad_enabled() and proxies.requires_grad
    loss: Tensor = _ProxyNCA.apply(x, positive, proxies.to(x.dtype), include_positive, keep)  # type: ignore[no-untyped-call]
    return loss


class _ProxyNCA(torch.autograd.Function):
    """Of logits x·p/|p|: x carries the scale, whose gradient autograd finds by itself."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, positive: Tensor, proxies: Tensor, include_positive: bool, keep: bool
    ) -> Tensor:
        """First walk: Z, and the gradient by x."""
        walk = Walk(x, positive, proxies)
        if len(proxies) == 1 and not include_positive:
            raise ValueError("got one proxy; a positive and a negative need two")
        e = x.new_empty(len(proxies) if keep else walk.rows, len(x))
        work = x.new_empty(walk.rows, x.shape[1])
        ones = x.new_ones(walk.rows)
        inverse = x.new_empty(len(proxies))
        z, dx = x.new_zeros(len(x)), torch.zeros_like(x)
        top = x.new_zeros(len(x))
        tops: Tensor | None = None
        if not bounded(x, len(proxies)):
            top.fill_(-math.inf)
            tops = x.new_empty(len(walk), len(x))
        with torch.autocast(x.device.type, enabled=False):
            for i, (chunk, own) in enumerate(walk):
                n = chunk.stop - chunk.start
                p = walk.directions(chunk, inverse_norms(proxies[chunk], inverse[chunk]), work)
                s = torch.mm(p, x.T, out=e[chunk] if keep else e[:n])  # (chunk, B)
                if own and not include_positive:
                    s[own] = -math.inf
                if tops is not None:  # a running maximum: what was summed so far fades with it
                    torch.maximum(top, s.amax(0), out=tops[i])
                    fade = (top - tops[i]).exp_()
                    z.mul_(fade)
                    dx.mul_(fade[:, None])
                    top = tops[i]
                    s.sub_(top)
                s.exp_()
                z.addmv_(s.T, ones[:n])
                dx.addmm_(s.T, p)
        p_y = proxies[positive] * inverse[positive, None]  # (B, D)
        loss = (z.log() + top - (x * p_y).sum(1)).mean()
        dx.div_(z[:, None]).sub_(p_y)
        ctx.walk, ctx.include_positive = walk, include_positive
        ctx.save_for_backward(x, positive, proxies, inverse, z, dx, tops, e if keep else None)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Second walk: the gradient by the proxies, each chunk straight into its place."""
        x, positive, proxies, inverse, z, dx, tops, kept = ctx.saved_tensors
        share = grad / len(x)
        dx = dx * share if ctx.needs_input_grad[0] else None
        if not ctx.needs_input_grad[2]:
            return dx, None, None, None, None
        walk = ctx.walk
        work = x.new_empty(walk.rows, x.shape[1])
        e = x.new_empty(walk.rows, len(x)) if kept is None else kept
        dp = torch.empty_like(proxies)
        weighted = x / z[:, None]  # 1/Z goes into the product: no pass over the exponentials
        with torch.autocast(x.device.type, enabled=False):
            for i, (chunk, own) in enumerate(walk):
                n = chunk.stop - chunk.start
                if kept is not None:
                    s = kept[chunk]
                else:
                    p = walk.directions(chunk, inverse[chunk], work)
                    s = torch.mm(p, x.T, out=e[:n])
                    if own and not ctx.include_positive:
                        s[own] = -math.inf
                    if tops is not None:
                        s.sub_(tops[i])
                    s.exp_()
                if tops is not None:
                    weighted = x * ((tops[i] - tops[-1]).exp_() / z)[:, None]
                v = torch.mm(s, weighted, out=dp[chunk])
                through_norm_(v, proxies[chunk], inverse[chunk] * share, inverse[chunk], work[:n])
        v = x.clone()
        p_y, inverse = proxies[positive], inverse[positive]
        through_norm_(v, p_y, inverse * share, inverse, torch.empty_like(x))
        return dx, None, dp.index_add_(0, positive, v, alpha=-1), None, None


def bounded(x: Tensor, num_proxies: int) -> bool:
    """Whether sums of exp(x·p̂) can neither overflow nor vanish, so that no maximum is needed.

    |x·p̂| ≤ |x|: while |x| + log P is within the exponents of the type (85 in float32: a scale
    up to 71 over a million proxies) every exponential is a normal number of full precision.
    """
    room = math.log(torch.finfo(x.dtype).max) - 3
    longest = float(torch.linalg.vector_norm(x, dim=1).max())
    return longest + math.log(num_proxies) < room
