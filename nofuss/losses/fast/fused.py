"""Losses over proxies as one node of the graph, their gradients computed together with them.

Values and gradients equal those of the plain form, on any device. For more than a first derivative
the plain form takes over: `backward` with `create_graph=True` differentiates it, and `torch.func`
(`grad`, `vmap`, `jvp`, `hessian`) always uses it. Under `torch.compile` the walks over many proxies
are the operator `nofuss::fused_loss`, and few proxies take the plain form. Free norms (−|x − p|²)
have no fused form.
"""

from typing import Any

import torch
from torch import Tensor

from nofuss.distributed.shard import Shard
from nofuss.geometry import normalize
from nofuss.losses.fast.margin import WalkedAnchor, WalkedTriplet
from nofuss.losses.fast.nca import WalkedNCA
from nofuss.losses.fast.operator import traced_loss
from nofuss.losses.fast.small import SmallNCA, small_is_faster
from nofuss.losses.fast.walk import Form
from nofuss.losses.inputs import full_precision, without_autocast


def pays(batch: int, num_proxies: int, dim: int) -> bool:
    """Return whether the fused form is faster: from 500 proxies and 2¹⁷ numbers on.

    Measured, forward + backward, for batches of 8 to 512 in 64 and 512 dimensions: the two meet
    near 2,000 proxies for (8, 64), 1,000 for (32, 64), 400 for (32, 512) and (512, 64). The
    fused one takes twice the plain one's time at 100 proxies (1 ms) and a third at 10,000.
    """
    return num_proxies >= 500 and (batch + dim) * num_proxies >= 2**17


def fused_proxy_nca(
    embeddings: Tensor,
    positive: Tensor,
    proxies: Tensor,
    *,
    scale: float,
    include_positive: bool = False,
    share: Tensor | None = None,
    keep: bool | None = None,
    shard: Shard | None = None,
) -> Tensor:
    """Proxy-NCA, Eq. 4 over proxies: log Σ_{p≠p(y)} exp(scale·cos) − scale·cos_y, mean over B.

    embeddings: (B, D); positive: (B,) rows of `proxies`.
    include_positive: False is the paper; True is the softmax form common elsewhere.
    share: (B,) the weight of each anchor, instead of 1/B.
    keep: whether a walk keeps its exponentials: see `WalkedNCA`.
    shard: which rows `proxies` are, where each process holds some; all processes then return the
        same loss, the gradient of their rows and their part of the gradient by x: see `to_shards`.
    """
    if shard is None and keep is None and small_is_faster(len(embeddings), len(proxies)):
        form: Form = SmallNCA(scale, include_positive)
        return fused_loss(form, embeddings, positive, proxies, share)
    x = _scaled(embeddings, proxies, scale)
    return fused_loss(WalkedNCA(include_positive, keep), x, positive, proxies, share, shard)


def fused_proxy_triplet(
    embeddings: Tensor,
    positive: Tensor,
    proxies: Tensor,
    *,
    scale: float,
    margin: float,
    share: Tensor | None = None,
    shard: Shard | None = None,
) -> Tensor:
    """Eq. 3 over proxies: mean of [scale·(cos_z − cos_y) + M]₊ over all (x, p(y), p(z)).

    Arguments as in `fused_proxy_nca`.
    """
    x = _scaled(embeddings, proxies, scale)
    return fused_loss(WalkedTriplet(margin), x, positive, proxies, share, shard)


def fused_proxy_anchor(
    embeddings: Tensor,
    positive: Tensor,
    proxies: Tensor,
    *,
    scale: float,
    margin: float,
    shard: Shard | None = None,
) -> Tensor:
    """mean_{p∈P⁺} log(1+Σ_{x∈X⁺} e^{−α(s−δ)}) + mean_{p∈P} log(1+Σ_{x∈X⁻} e^{α(s+δ)}).

    Kim et al. 2020, Eq. 4; scale and margin are their α and δ; the rest as in `fused_proxy_nca`.
    """
    x = _scaled(embeddings, proxies, scale)
    return fused_loss(WalkedAnchor(scale * margin), x, positive, proxies, shard=shard)


def _scaled(embeddings: Tensor, proxies: Tensor, scale: float) -> Tensor:
    return normalize(full_precision(embeddings, proxies)) * scale


def fused_loss(
    form: Form,
    x: Tensor,
    positive: Tensor,
    proxies: Tensor,
    share: Tensor | None = None,
    shard: Shard | None = None,
) -> Tensor:
    """Return the loss of a form, in the way that the kind of differentiation allows."""
    x, proxies = full_precision(x, proxies), full_precision(proxies, x)
    share = None if share is None else share.to(x.dtype)
    if torch.compiler.is_compiling():
        return traced_loss(form, x, positive, proxies, share)
    if torch._C._are_functorch_transforms_active():
        return form.plain(x, positive, proxies, share)
    with without_autocast(x):
        loss: Tensor = _Fused.apply(  # type: ignore[no-untyped-call]
            form, x, positive, proxies, share, shard, torch.is_grad_enabled()
        )
    return loss


class _Fused(torch.autograd.Function):
    """A loss whose gradients are computed together with it."""

    @staticmethod
    def forward(
        ctx: Any,
        form: Form,
        x: Tensor,
        positive: Tensor,
        proxies: Tensor,
        share: Tensor | None,
        shard: Shard | None,
        with_gradients: bool,
    ) -> Tensor:
        """Compute the loss and its gradients; `backward` only returns them."""
        needs = (
            with_gradients and ctx.needs_input_grad[1],
            with_gradients and ctx.needs_input_grad[3],
        )
        loss, *ctx.gradients = form.compute(x, positive, proxies, share, shard, needs)
        ctx.form, ctx.shard, ctx.needs = form, shard, needs
        ctx.save_for_backward(x, positive, proxies, share)
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients, and drop them: autograd copies one that is still referenced."""
        x, positive, proxies, share = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph=True
            if ctx.shard is not None:
                raise RuntimeError(
                    "a sharded loss can't be differentiated twice; compute it in one process"
                )
            dx, dp = ctx.form.plain_gradients(x, positive, proxies, share, grad)
            return None, dx, None, dp, None, None, None
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:  # a second backward, after retain_graph=True
            gradients = ctx.form.compute(x, positive, proxies, share, ctx.shard, ctx.needs)[1:]
        if torch._C._functorch.is_legacy_batchedtensor(grad):  # is_grads_batched=True
            dx, dp = (None if each is None else each * grad for each in gradients)
        elif grad.item() == 1:  # a plain backward() saves a pass over the proxies
            dx, dp = gradients
        else:
            dx, dp = (None if each is None else each.mul_(grad) for each in gradients)
        return None, dx, None, dp, None, None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Tensor:
        """Refuse forward mode on dual tensors; `torch.func.jvp` uses the plain form."""
        raise RuntimeError(
            "fused losses have no forward-mode derivative; use torch.func.jvp, or fused=False"
        )
