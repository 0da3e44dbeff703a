"""Proxy-NCA over few proxies as one autograd function: the same arithmetic, one node in the graph.

At a hundred proxies a step is all overhead, a dozen microseconds an operation and twice that for
its gradient. Writing the gradient down by hand leaves a third of the operations.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def small_proxy_nca(
    x: Tensor,
    positive: Tensor,
    proxies: Tensor,
    *,
    scale: float | Tensor,
    include_positive: bool = False,
) -> Tensor:
    """Proxy-NCA of directions x (B, D), as `fused_proxy_nca` gives it; holds (B, P) twice."""
    x = x * scale
    loss: Tensor = _SmallProxyNCA.apply(  # type: ignore[no-untyped-call]
        x, positive, proxies.to(x.dtype), include_positive
    )
    return loss


class _SmallProxyNCA(torch.autograd.Function):
    """log Σ_{p≠p(y)} exp(x·p̂) − x·p̂(y), mean over the batch; x carries the scale."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, positive: Tensor, proxies: Tensor, include_positive: bool
    ) -> Tensor:
        """The loss, and its gradient by the logits on the way."""
        norm = torch.linalg.vector_norm(proxies, dim=1, keepdim=True).clamp_min_(1e-12)
        p = proxies / norm  # (P, D)
        logits = torch.mm(x, p.T)  # (B, P)
        own = positive[:, None]
        own_logits = logits.gather(1, own)
        if not include_positive:
            logits.scatter_(1, own, -math.inf)
        shares = logits.log_softmax(1)
        # A row's maximum is the same entry before and after, so this is the log of the sum.
        loss = (logits.amax(1, True) - shares.amax(1, True) - own_logits).mean()
        shares.exp_()
        if include_positive:
            shares.scatter_add_(1, own, shares.new_full(own.shape, -1))
        else:
            shares.scatter_(1, own, -1)
        ctx.save_for_backward(x, p, norm, shares.div_(len(x)))
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Two products; the proxies' is freed of its part along each proxy."""
        x, p, norm, shares = ctx.saved_tensors
        shares = shares * grad
        dx = torch.mm(shares, p) if ctx.needs_input_grad[0] else None
        if not ctx.needs_input_grad[2]:
            return dx, None, None, None
        dp = torch.mm(shares.T, x)
        dp.addcmul_(p, (dp * p).sum(1, keepdim=True), value=-1)
        return dx, None, dp.div_(norm), None
