"""The walks over many proxies as an operator that torch.compile keeps whole.

A walk branches on values and reuses workspaces, which can't be traced; as a registered operator it
is one node of the compiled graph, as fast as without compiling. Over few proxies the compiler
does well with the plain form.
"""

from typing import Any

import torch
from torch import Tensor

from nofuss.losses.fast.margin import WalkedAnchor, WalkedTriplet
from nofuss.losses.fast.nca import WalkedNCA
from nofuss.losses.fast.walk import Form


def traced_loss(
    form: Form, x: Tensor, positive: Tensor, proxies: Tensor, share: Tensor | None
) -> Tensor:
    """Return the loss as torch.compile sees it."""
    name, margin = _name(form)
    if name == "":
        return form.plain(x, positive, proxies, share)
    with_gradients = torch.is_grad_enabled()
    needs = with_gradients and x.requires_grad, with_gradients and proxies.requires_grad
    loss: Tensor = torch.ops.nofuss.fused_loss(x, positive, proxies, share, name, margin, *needs)[0]
    return loss


def _name(form: Form) -> tuple[str, float]:
    """Return a walked form in types that an operator takes; no name for another form."""
    if isinstance(form, WalkedNCA):  # not `match`, which the compiler of torch 2.6 does not know
        return "softmax" if form.include_positive else "nca", 0.0
    if isinstance(form, WalkedTriplet):
        return "triplet", form.margin
    if isinstance(form, WalkedAnchor):
        return "anchor", form.margin
    return "", 0.0


def _form(name: str, margin: float) -> Form:
    forms: dict[str, Form] = {
        "nca": WalkedNCA(),
        "softmax": WalkedNCA(include_positive=True),
        "triplet": WalkedTriplet(margin),
        "anchor": WalkedAnchor(margin),
    }
    return forms[name]


def _operator(
    x: Tensor,
    positive: Tensor,
    proxies: Tensor,
    share: Tensor | None,
    form: str,
    margin: float,
    needs_x: bool,
    needs_proxies: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the loss and its gradients, empty where they are not needed."""
    needs = needs_x, needs_proxies
    loss, dx, dp = _form(form, margin).compute(x, positive, proxies, share, None, needs)
    return loss, x.new_empty(0) if dx is None else dx, x.new_empty(0) if dp is None else dp


def _operator_shapes(
    x: Tensor,
    positive: Tensor,
    proxies: Tensor,
    share: Tensor | None,
    form: str,
    margin: float,
    needs_x: bool,
    needs_proxies: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    dx = torch.empty_like(x) if needs_x else x.new_empty(0)
    dp = torch.empty_like(proxies) if needs_proxies else x.new_empty(0)
    return x.new_empty(()), dx, dp


def _operator_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.form, ctx.margin, ctx.needs_x, ctx.needs_proxies = inputs
    ctx.save_for_backward(*tensors, *output[1:])


def _operator_backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    x, positive, proxies, share, dx, dp = ctx.saved_tensors
    if torch.is_grad_enabled():
        form = _form(ctx.form, ctx.margin)
        by_x, by_proxies = form.plain_gradients(x, positive, proxies, share, grad)
    else:
        by_x = dx * grad if ctx.needs_x else None
        by_proxies = dp * grad if ctx.needs_proxies else None
    return by_x, None, by_proxies, None, None, None, None, None


_registered = torch.library.custom_op("nofuss::fused_loss", _operator, mutates_args=())
_registered.register_fake(_operator_shapes)
_registered.register_autograd(_operator_backward, setup_context=_operator_setup)
