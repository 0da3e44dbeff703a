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
    """Return a tensor that shares memory with `values` where it can."""
    if isinstance(values, Tensor):
        return values
    return torch.from_numpy(np.require(values, requirements=["C", "W"]))


def is_traced() -> bool:
    """Return whether tensors have no values to branch on: in `torch.compile` and `torch.func`."""
    return torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()


def are_ordinary(norms: Tensor) -> bool:
    """Return whether no sum of squares behind these norms has overflowed, vanished or is NaN."""
    low, high = _ordinary_range(norms.dtype)
    least, largest = torch.aminmax(norms)
    return low < least.item() and largest.item() < high


@cache
def _ordinary_range(dtype: torch.dtype) -> tuple[float, float]:
    """Return limits between which the squares of a norm and of its large entries are normal."""
    limits = torch.finfo(dtype)
    return 1e4 * limits.tiny**0.5, 0.1 * limits.max**0.5


def normalize(x: Tensor) -> Tensor:
    """Return directions x / |x| of rows of any length; a zero row (or a subnormal one) stays."""
    norm: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    if not is_traced() and (x.numel() == 0 or are_ordinary(norm)):
        return x / norm
    # A direction does not depend on the row's scale, so autograd may treat the scale as a constant.
    x = x / largest_entries(x.detach())
    zero = (x.abs() < torch.finfo(x.dtype).tiny).all(-1, keepdim=True)
    # The norm has no second derivative at zero: compute it at ones there, then replace it by 1.
    norm = torch.linalg.vector_norm(x.masked_fill(zero, 1.0), dim=-1, keepdim=True)
    return x / norm.masked_fill(zero, 1.0)


def largest_entries(x: Tensor) -> Tensor:
    """Return max |xᵢ| of each row, (…, 1), to divide by; 1 for a row of zeros."""
    top = x.abs().amax(-1, keepdim=True)
    return torch.where(top < torch.finfo(x.dtype).tiny, 1.0, top)


def squared_distances(x: Tensor, y: Tensor) -> Tensor:
    """Return |xᵢ − yⱼ|² for all pairs, (…, N, D) × (…, M, D) → (…, N, M), never below zero.

    Expanded as |x|² + |y|² − 2 x·y: one matrix product, with the rounding error of a
    difference of squares. Gradients are finite everywhere, also at x = y.
    """
    x2 = x.square().sum(-1, keepdim=True)  # (…, N, 1)
    y2 = y.square().sum(-1).unsqueeze(-2)  # (…, 1, M)
    return (x2 + y2 - 2 * x @ y.transpose(-1, -2)).clamp_min(0)


def exact_squared_distances(x: Tensor, y: Tensor) -> Tensor:
    """Return |xᵢ − yⱼ|² for all pairs as sums of squared differences: slower, no cancellation."""
    return torch.cdist(x, y, compute_mode="donot_use_mm_for_euclid_dist").square_()


def distances(x: Tensor, y: Tensor) -> Tensor:
    """Return |xᵢ − yⱼ| for all pairs, with gradient zero (not NaN) where points coincide."""
    d2 = squared_distances(x, y)
    coincide = d2 == 0  # False for NaN, which passes through
    return d2.masked_fill(coincide, 1.0).sqrt().masked_fill(coincide, 0.0)
