"""Directions and distances: the only distance code of the library.

The paper's d(x, y) is the *squared* Euclidean distance |x − y|²; functions here say
"squared" when they return squares.
"""

from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Array = Tensor | NDArray[np.generic]


def as_tensor(values: Array) -> Tensor:
    """A tensor that shares memory with `values` where it can."""
    if isinstance(values, Tensor):
        return values
    return torch.from_numpy(np.require(values, requirements=["C", "W"]))


def is_traced() -> bool:
    """Whether tensors have no values to branch on: under `torch.compile` and `torch.func`."""
    return torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()


def are_ordinary(norms: Tensor) -> bool:
    """Whether no sum of squares behind these norms has overflowed or vanished; NaN has."""
    low, high = _ordinary_range(norms.dtype)
    least, largest = torch.aminmax(norms)
    return low < least.item() and largest.item() < high


@cache
def _ordinary_range(dtype: torch.dtype) -> tuple[float, float]:
    """Norms of which neither the square, nor that of an entry that counts, leaves the type."""
    limits = torch.finfo(dtype)
    return 1e4 * limits.tiny**0.5, 0.1 * limits.max**0.5


def normalize(x: Tensor) -> Tensor:
    """Directions x / |x| of rows of any length; a zero row stays zero, as if its length were 1."""
    norm: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    if not is_traced() and (x.numel() == 0 or are_ordinary(norm)):
        return x / norm
    # Directions do not depend on a row's scale, so autograd may take it for a constant.
    x = x / largest_entries(x.detach())
    zero = (x == 0).all(-1, keepdim=True)
    # The norm has no second derivative at zero, so it is taken elsewhere.
    norm = torch.linalg.vector_norm(x.masked_fill(zero, 1.0), dim=-1, keepdim=True)
    return x / norm.masked_fill(zero, 1.0)


def largest_entries(x: Tensor) -> Tensor:
    """Max |xᵢ| of each row, (…, 1), for division; 1 for a row of zeros."""
    top = x.abs().amax(-1, keepdim=True)
    return torch.where(top < torch.finfo(x.dtype).tiny, 1.0, top)


def squared_distances(x: Tensor, y: Tensor) -> Tensor:
    """|xᵢ − yⱼ|² for all pairs, (…, N, D) × (…, M, D) → (…, N, M), never below zero.

    Expanded as |x|² + |y|² − 2 x·y: one matrix product, with the rounding error of a
    difference of squares. Gradients are finite everywhere, also at x = y.
    """
    x2 = x.square().sum(-1, keepdim=True)  # (…, N, 1)
    y2 = y.square().sum(-1).unsqueeze(-2)  # (…, 1, M)
    return (x2 + y2 - 2 * x @ y.transpose(-1, -2)).clamp_min(0)


def distances(x: Tensor, y: Tensor) -> Tensor:
    """|xᵢ − yⱼ| for all pairs, with gradient zero (not NaN) where the points coincide."""
    d2 = squared_distances(x, y)
    coincide = d2 == 0  # False for NaN, which passes through
    return d2.masked_fill(coincide, 1.0).sqrt().masked_fill(coincide, 0.0)
