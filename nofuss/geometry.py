"""Directions and distances: the only distance code of the library.

The paper's d(x, y) is the *squared* Euclidean distance |x − y|²; functions here say
"squared" when they return squares.
"""

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Array = Tensor | NDArray[np.generic]

ZERO = 1e-12
"""A row shorter than this has no direction: it counts as zero."""


def as_tensor(values: Array) -> Tensor:
    """Return a tensor that shares memory with `values` where it can."""
    if isinstance(values, Tensor):
        return values
    return torch.from_numpy(np.require(values, requirements=["C", "W"]))


def lengths(x: Tensor) -> Tensor:
    """Return |x| of each row, (…, 1), to divide by: 1 for a row of zeros, NaN if it overflows."""
    norm: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    is_zero = norm < ZERO
    if norm.requires_grad:
        # The norm has no second derivative at zero: compute it at ones there.
        norm = torch.linalg.vector_norm(x.masked_fill(is_zero, 1.0), dim=-1, keepdim=True)
    return norm.masked_fill(is_zero, 1.0).masked_fill(norm == math.inf, math.nan)


def normalize(x: Tensor) -> Tensor:
    """Return directions x / |x|; a zero row stays, and one whose norm overflows gives NaN."""
    return x / lengths(x)


def squared_distances(x: Tensor, y: Tensor) -> Tensor:
    """Return |xᵢ − yⱼ|² for all pairs, (…, N, D) × (…, M, D) → (…, N, M), never below zero.

    Expanded as |x|² + |y|² − 2 x·y: one matrix product. The difference of squares cancels where
    points lie close together and far from zero, as the embeddings of a fresh network do, so both
    are moved by the mean of y first. Gradients are finite everywhere, also at x = y.
    """
    center = y.detach().mean(-2, keepdim=True)
    x, y = x - center, y - center
    x2 = x.square().sum(-1, keepdim=True)  # (…, N, 1)
    y2 = y.square().sum(-1).unsqueeze(-2)  # (…, 1, M)
    return (x2 + y2 - 2 * x @ y.transpose(-1, -2)).clamp_min(0)


def unit_squared_distances(x: Tensor, y: Tensor) -> Tensor:
    """Return |x̂ − ŷ|² = 2 − 2 cos for all pairs of directions, (N, D) × (M, D) → (N, M).

    A zero vector has the cosine 0 with everything, so it is at 2, as in losses made of cosines.
    """
    x, y = normalize(x), normalize(y)
    absent = [(v.detach() == 0).all(-1).to(v.dtype) for v in (x, y)]
    return squared_distances(x, y) + absent[0][:, None] + absent[1]


def exact_squared_distances(x: Tensor, y: Tensor) -> Tensor:
    """Return |xᵢ − yⱼ|² for all pairs as sums of squared differences: slower, no cancellation."""
    return torch.cdist(x, y, compute_mode="donot_use_mm_for_euclid_dist").square_()


def distances(x: Tensor, y: Tensor) -> Tensor:
    """Return |xᵢ − yⱼ| for all pairs, with gradient zero (not NaN) where points coincide."""
    return root(squared_distances(x, y))


def root(squared: Tensor) -> Tensor:
    """Return √d², with gradient zero (not NaN) at zero."""
    coincide = squared == 0  # False for NaN, which passes through
    return squared.masked_fill(coincide, 1.0).sqrt().masked_fill(coincide, 0.0)
