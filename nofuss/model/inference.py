"""Embedding without training: batch norm folded away, results written into one buffer."""

import copy
from collections.abc import Callable, Iterable
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from nofuss.model.backbones import Backbone
from nofuss.model.embedder import Embedder


def for_inference(embedder: Embedder) -> Embedder:
    """A copy in eval mode with batch norm folded into the convolutions before it.

    Networks of timm are copied but not folded: the order in which their layers were made
    need not be the order in which they run.
    """
    ready = copy.deepcopy(embedder).eval().requires_grad_(False)
    if not ready.backbone.name.startswith("timm:"):
        fold_batch_norm(ready.backbone)
    ready.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return ready


def fold_batch_norm(module: nn.Module) -> None:
    """Replace, in place, each convolution followed by a batch norm with their product."""
    children = list(module.named_children())
    for (conv_name, conv), (norm_name, norm) in pairwise(children):
        if isinstance(conv, nn.Conv2d) and isinstance(norm, nn.BatchNorm2d):
            setattr(module, conv_name, fuse_conv_bn_eval(conv, norm))
            setattr(module, norm_name, nn.Identity())
    for _, child in children:
        fold_batch_norm(child)


@torch.no_grad()
def extract(
    model: Embedder | Backbone,
    batches: Iterable[Tensor],
    *,
    count: int,
    progress: Callable[[int], None] | None = None,
) -> Tensor:
    """Embeddings (of an Embedder) or features (of a Backbone) of `count` inputs, (count, …).

    The model runs in eval mode and is left in the mode it was in. `progress` is told after
    each batch how many inputs are done.
    """
    width = model.dim if isinstance(model, Embedder) else model.features
    out = torch.empty(count, width)
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    done = 0
    try:
        for batch in batches:
            if done + len(batch) > count:
                raise ValueError(f"batches hold more than the {count} inputs announced")
            out[done : done + len(batch)] = model(batch.to(device))
            done += len(batch)
            if progress:
                progress(done)
    finally:
        for module, training in modes:
            module.training = training
    if done != count:
        raise ValueError(f"batches held {done} inputs, {count} were announced")
    return out
