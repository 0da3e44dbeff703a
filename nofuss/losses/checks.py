"""Checks of every loss's batch: one line of error instead of a silent zero or a NaN."""

import math
from contextlib import AbstractContextManager, nullcontext
from functools import reduce

import torch
from torch import Tensor

from nofuss.geometry import Array, as_tensor

HALVES = (torch.float16, torch.bfloat16)


def full_precision(x: Tensor, *others: Tensor) -> Tensor:
    """Return x in the widest precision of all inputs, float32 at least."""
    dtype = reduce(torch.promote_types, (other.dtype for other in others), x.dtype)
    return x.to(torch.float32 if dtype in HALVES else dtype)


def check_number(name: str, value: float, *, positive: bool = False) -> None:
    """Refuse a value that is not a finite number from 0 up, or above 0."""
    if not (value > 0 if positive else value >= 0) or value == math.inf:
        raise ValueError(f"{name} is {value}; expected {'above 0' if positive else 'from 0 up'}")


def without_autocast(x: Tensor) -> AbstractContextManager[None]:
    """Return a context without autocast on the device of x; free where autocast is off."""
    device = x.device.type
    on = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    return torch.autocast(device, enabled=False) if on else nullcontext()


def check_embeddings(x: Array, dim: int | None = None, *, name: str = "embeddings") -> Tensor:
    """Return embeddings (B, D), floating point with at least one row, as a tensor."""
    x = as_tensor(x)
    if x.ndim != 2 or not x.is_floating_point():
        raise ValueError(
            f"{name} are {tuple(x.shape)} {x.dtype}; expected (batch, dim) floating point"
        )
    if len(x) == 0:
        raise ValueError(f"{name} are empty; a batch needs at least one row")
    if dim is not None and x.shape[1] != dim:
        raise ValueError(
            f"{name} have {x.shape[1]} columns but the proxies have dim {dim}; make them equal"
        )
    return x


def check_labels(labels: Array, x: Tensor, num_classes: int | None = None) -> Tensor:
    """Return labels (B,), whole numbers 0 … num_classes − 1, as int64 on the device of x."""
    labels = as_tensor(labels)
    if labels.ndim != 1 or len(labels) != len(x):
        raise ValueError(f"labels are {tuple(labels.shape)}; expected ({len(x)},), one a row")
    if labels.dtype != torch.int64 or labels.device != x.device:
        if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
            raise ValueError(f"labels are {labels.dtype}; expected int64 class numbers")
        labels = labels.to(x.device, torch.int64)
    ends = None if num_classes is None else _ends(labels)
    if ends is not None and ends[0] < 0:
        raise ValueError(f"labels go down to {ends[0]}; renumber them with compact_labels()")
    if ends is not None and num_classes is not None and ends[1] >= num_classes:
        raise ValueError(
            f"labels reach {ends[1]} but there are {num_classes} classes (0 to "
            f"{num_classes - 1}); renumber them with compact_labels()"
        )
    return labels


def check_weights(weights: Array, x: Tensor) -> Tensor:
    """Return weights (B,), numbers from 0 up and not all 0, in float32 at least."""
    weights = as_tensor(weights).to(x.device)
    if weights.shape != x.shape[:1] or weights.dtype == torch.bool or weights.is_complex():
        raise ValueError(
            f"weights are {tuple(weights.shape)} {weights.dtype}; expected ({len(x)},) numbers"
        )
    if weights.dtype != torch.float64:  # the sum of halves may be rounded, or overflow
        weights = weights.float()
    ends = _ends(weights)
    if ends is not None and not (ends[0] >= 0 and 0 < ends[1] < math.inf):
        raise ValueError("weights are negative, not finite or all zero; expected numbers from 0 up")
    return weights


def _ends(values: Tensor) -> tuple[float, float] | None:
    """Return the least and the largest value, None where there are no values to check."""
    if torch.compiler.is_compiling():
        return None
    try:
        low, high = (end.item() for end in values.detach().aminmax())
    except RuntimeError:  # under torch.vmap
        return None
    return low, high


def zero_with_graph(x: Tensor) -> Tensor:
    """Return a zero whose backward gives zero gradients, for a batch without pairs or triplets."""
    return (x * 0).sum()


def one_or_nan(*inputs: Tensor) -> Tensor:
    """Return 1, or NaN if an input holds a number that is not finite: a factor for the loss.

    Comparisons with NaN are false, so a choice by comparing (the closest proxy, the hardest
    negative) may leave it out, and the loss would look sound.
    """
    return torch.stack([(x.detach() * 0).sum() for x in inputs]).sum() + 1


def check_triplets(
    x: Tensor, positives: Array | None, negatives: Array | None
) -> tuple[Tensor, Tensor]:
    """Return positives (B, D) and negatives (B, K, D) of anchors x (B, D)."""
    if positives is None or negatives is None:
        raise ValueError("got no labels; pass them, or both positives= and negatives=")
    positives, negatives = as_tensor(positives), as_tensor(negatives)
    if negatives.ndim == 2:
        negatives = negatives[:, None]  # (B, 1, D)
    b, d = x.shape
    k = negatives.shape[1] if negatives.ndim == 3 else 0
    if positives.shape != (b, d) or k < 1 or negatives.shape != (b, k, d):
        raise ValueError(
            f"anchors are {tuple(x.shape)}, positives {tuple(positives.shape)}, negatives "
            f"{tuple(negatives.shape)}; expected (B, D), (B, D) and (B, D) or (B, K, D)"
        )
    return positives, negatives
