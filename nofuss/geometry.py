"""Directions and distances: the only distance code of the library.

The paper's d(x, y) is the *squared* Euclidean distance |x − y|²; functions here say
"squared" when they return squares.
"""

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


def normalize(x: Tensor) -> Tensor:
    """Directions x / |x|; a zero vector stays zero, and so does not blow up its gradient."""
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x / torch.where(norm > 0, norm, 1.0)


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
    apart = d2 > 0
    return torch.where(apart, d2, 1.0).sqrt() * apart
