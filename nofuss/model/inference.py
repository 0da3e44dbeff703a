"""Embedding without training: batch norm folded into convolutions, results in one buffer."""

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from nofuss.data.loader import ahead
from nofuss.distributed.device import device_of
from nofuss.distributed.processes import merge_rows, share, world
from nofuss.model.backbones import OWN, Backbone
from nofuss.model.embedder import Embedder
from nofuss.model.modes import evaluating
from nofuss.progress import Progress, silent


def for_inference(embedder: Embedder) -> Embedder:
    """Return a copy in eval mode with batch norm folded into the convolutions before it.

    Networks of timm and modules from Python are copied but not folded: the order in which their
    layers were made need not be the order in which they run.
    """
    ready = copy.deepcopy(embedder).eval().requires_grad_(False)
    if ready.backbone.name != OWN and not ready.backbone.name.startswith("timm:"):
        fold_batch_norm(ready.backbone)
    ready.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return ready


def fold_batch_norm(module: nn.Module) -> None:
    """Fold each batch norm into the convolution before it, in place."""
    children = list(module.named_children())
    for (conv_name, conv), (norm_name, norm) in pairwise(children):
        if isinstance(conv, nn.Conv2d) and isinstance(norm, nn.BatchNorm2d):
            setattr(module, conv_name, fuse_conv_bn_eval(conv, norm))
            setattr(module, norm_name, nn.Identity())
    for _, child in children:
        fold_batch_norm(child)


def extract(
    model: Embedder | Backbone,
    batches: Iterable[Tensor],
    *,
    count: int,
    progress: Progress = silent,
    threads: int = 0,
) -> Tensor:
    """Return embeddings (of an Embedder) or features (of a Backbone) of `count` inputs, (count, …).

    The result is on the CPU, wherever the model is. The model runs in eval mode, and its mode is
    restored afterwards.
    threads: how many batches run at once; 0 runs them one after the other in this thread.
    """
    width = model.dim if isinstance(model, Embedder) else model.features
    out = torch.empty(count, width, dtype=torch.float32)
    device = device_of(model)
    done = 0

    @torch.no_grad()  # which holds for one thread
    def run(batch: Tensor) -> Tensor:
        found: Tensor = model(batch.to(device)).cpu()
        return found

    with evaluating(model):
        for found in ahead(run, batches, threads, waiting=threads):
            if done + len(found) > count:
                raise ValueError(f"batches hold more than count={count} inputs")
            out[done : done + len(found)] = found
            done += len(found)
            progress("embedding", done, count)
    if done != count:
        raise ValueError(f"batches held {done} inputs, expected count={count}")
    return out


@torch.no_grad()
def through_head(embedder: Embedder, features: Tensor) -> Tensor:
    """Return raw embeddings (N, dim) of the head's inputs, all at once, on the CPU."""
    raw: Tensor = embedder.head(features.to(device_of(embedder)))
    return raw.cpu()


def extract_together(
    model: Embedder | Backbone,
    load: Callable[[Sequence[Any]], Iterator[Tensor]],
    chosen: Sequence[Any],
    *,
    progress: Progress = silent,
    threads: int = 0,
) -> Tensor:
    """Run `extract` on the batches `chosen`, distributed over the processes; rows stay in order."""
    ours = share(len(chosen))  # the batches of this process
    before, count = sum(map(len, chosen[: ours.start])), sum(map(len, chosen[ours]))
    total = sum(map(len, chosen))

    def advance(what: str, done: int, _: int) -> None:
        progress(what, min(total, done * world()), total)  # other processes are about as far

    part = extract(model, load(chosen[ours]), count=count, progress=advance, threads=threads)
    if world() == 1:
        return part
    whole = part.new_zeros(total, part.shape[1])
    whole[before : before + count] = part
    return merge_rows(whole, slice(before, before + count))
