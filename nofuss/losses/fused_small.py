"""Proxy-NCA over few proxies as one autograd function: the same arithmetic, one node in the graph.

At a hundred proxies a step is all overhead, a dozen microseconds an operation and twice that for
its gradient. Writing the gradient down by hand leaves a third of the operations.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def few(batch: int, num_proxies: int) -> bool:
    """Whether this form is faster than the walk in chunks: below 6,000 proxies.

    Measured, forward + backward, for batches of 8 to 512 in 64 and 512 dimensions: the two meet
    between 4,000 and 8,000 proxies whatever the rest; at 1,000 the walk takes 1.2 to 2.2 times as
    long. The second condition is for memory: (B, P) is held twice.
    """
    return num_proxies < 6000 and batch * num_proxies <= 2**22


def small_proxy_nca(
    embeddings: Tensor,
    positive: Tensor,
    proxies: Tensor,
    *,
    scale: float | Tensor,
    include_positive: bool = False,
) -> Tensor:
    """Proxy-NCA of embeddings (B, D) of any norm: `fused_proxy_nca` of their directions.

    Holds (B, P) twice.
    """
    loss: Tensor = _SmallProxyNCA.apply(  # type: ignore[no-untyped-call]
        embeddings, positive, proxies.to(embeddings.dtype), scale, include_positive
    )
    return loss


class _SmallProxyNCA(torch.autograd.Function):
    """log Σ_{p≠p(y)} exp(x·p̂) − x·p̂(y), mean over the batch, of x = scale·e/|e|."""

    @staticmethod
    def forward(
        ctx: Any,
        embeddings: Tensor,
        positive: Tensor,
        proxies: Tensor,
        scale: float | Tensor,
        include_positive: bool,
    ) -> Tensor:
        """The loss, and its gradient by the logits on the way."""
        length = torch.linalg.vector_norm(embeddings, dim=1, keepdim=True)
        x = embeddings / length.masked_fill_(length == 0, 1)  # zero stays zero: `normalize`
        norm = torch.linalg.vector_norm(proxies, dim=1, keepdim=True).clamp_min_(1e-12)
        p = proxies / norm  # (P, D)
        logits = torch.addmm(length, x, p.t(), beta=0, alpha=float(scale))  # (B, P)
        own = positive.unsqueeze(1)
        own_logits = logits.gather(1, own)
        if not include_positive:
            logits.scatter_(1, own, -math.inf)
        shares = logits.softmax(1)
        # A row's largest share is that of its largest logit: together, the log of the sum.
        loss = (logits.amax(1, True) - shares.amax(1, True).log_() - own_logits).mean()
        if include_positive:
            shares.scatter_add_(1, own, shares.new_full(own.shape, -1))
        else:
            shares.scatter_(1, own, -1)
        ctx.scale = scale
        ctx.save_for_backward(x, length, p, norm, shares)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Two products, each freed of its part along the vector whose norm does not count."""
        x, length, p, norm, shares = ctx.saved_tensors
        shares = shares * (grad * (ctx.scale / len(x)))
        de = dp = dscale = None
        if ctx.needs_input_grad[0] or ctx.needs_input_grad[3]:
            de = torch.mm(shares, p)
            along = (de * x).sum(1, keepdim=True)
            dscale = along.sum() / ctx.scale if ctx.needs_input_grad[3] else None
            de.addcmul_(x, along, value=-1).div_(length)
        if ctx.needs_input_grad[2]:
            dp = torch.mm(shares.t(), x)
            dp.addcmul_(p, (dp * p).sum(1, keepdim=True), value=-1).div_(norm)
        return de, None, dp, dscale, None
