"""Checks of every score's input: finite vectors, one label each, classes as 0 … C − 1."""

import math

import numpy as np
import torch
from torch import Tensor

from nofuss.geometry import Array, as_tensor

LONGEST = 1e140  # squares and their sums stay within float64
CHUNK = 2**22  # numbers that are held in float64 at once


def vectors_of(embeddings: Array, *, name: str = "embeddings") -> Tensor:
    """Return the embeddings as a detached (N, D) matrix, float32 unless they are float64."""
    x = as_tensor(embeddings).detach()
    if x.ndim != 2:
        raise ValueError(f"{name} have shape {tuple(x.shape)}; expected (N, D), one row an item")
    if x.numel() == 0:
        raise ValueError(f"{name} have shape {tuple(x.shape)}; there is nothing to score")
    if x.is_complex():
        raise ValueError(f"{name} are complex; expected real numbers")
    if x.dtype != torch.float64:
        x = x.float()
    if not torch.isfinite(x).all():
        bad = int((~torch.isfinite(x).all(1)).sum())
        raise ValueError(f"{bad} of {len(x)} {name} hold NaN or infinity; score finite vectors")
    return x.contiguous()


def lengths_of(x: Tensor) -> Tensor:
    """Return |x| of each row in float64, (N,); refuse float64 beyond `LONGEST`.

    A float32 square overflows from 1.8e19 and vanishes below 1e-23; in float64 it does neither.
    """
    norm = torch.cat([part.double().norm(dim=1) for part in _chunks(x)])
    # A row that is not zero but whose squares vanish would pass for a vector of length zero.
    lost = ~norm.isfinite() | (norm > LONGEST) | ((norm < 1 / LONGEST) & x.any(1))
    if lost.any():
        largest = float(x[lost].abs().max())
        raise ValueError(
            f"{int(lost.sum())} of {len(x)} embeddings have entries like {largest:.0e}; "
            f"rescale them to within 1e±{math.log10(LONGEST):.0f}"
        )
    return norm


def directions(x: Tensor) -> Tensor:
    """Return x / |x| of each row in the precision of x, whatever its size; zero stays zero."""
    norm = lengths_of(x)
    norm = torch.where(norm > 0, norm, 1.0)[:, None]
    parts = zip(_chunks(x), torch.split(norm, len(_chunks(x)[0])), strict=True)
    return torch.cat([(part.double() / n).to(x.dtype) for part, n in parts])


def scaled_to_one(x: Tensor) -> tuple[Tensor, int]:
    """Return x · 2ᵉ, exactly, with its largest entry in [½, 1), and e: no square can overflow."""
    exponent = -math.frexp(float(x.abs().max()))[1]
    return times_power_of_two(x, exponent), exponent


def times_power_of_two(x: Tensor, exponent: int) -> Tensor:
    """Return x · 2ᵉ; in two steps, since 2ᵉ itself may not be a float32."""
    half = exponent // 2
    return x * 2.0**half * 2.0 ** (exponent - half)


def classes_of(labels: Array, items: int) -> Tensor:
    """Return class numbers 0 … C − 1 (N,), in the order of the sorted labels (numbers or names)."""
    return _numbered(_column(labels, items, "labels"))


def shared_classes(
    labels: Array, items: int, gallery_labels: Array, gallery_items: int
) -> tuple[Tensor, Tensor]:
    """Return class numbers of queries and gallery, numbered together."""
    query = _column(labels, items, "labels")
    gallery = _column(gallery_labels, gallery_items, "gallery_labels")
    if {query.dtype.kind, gallery.dtype.kind} == {"i", "u"}:  # numpy would round them to floats
        query, gallery = query.astype(object), gallery.astype(object)
    numbers = _numbered(np.concatenate([query, gallery]))
    return numbers[:items], numbers[items:]


def _chunks(x: Tensor) -> tuple[Tensor, ...]:
    return torch.split(x, max(1, CHUNK // x.shape[1]))


def _column(labels: Array, items: int, name: str) -> np.ndarray:
    column = labels.detach().cpu().numpy() if isinstance(labels, Tensor) else np.asarray(labels)
    if column.ndim != 1 or len(column) != items:
        raise ValueError(f"{name} have shape {column.shape}; expected ({items},), one an embedding")
    if column.dtype.kind == "f" and not np.isfinite(column).all():
        raise ValueError(f"{name} hold NaN or infinity; give every item a class")
    return column


def _numbered(column: np.ndarray) -> Tensor:
    return torch.from_numpy(np.unique(column, return_inverse=True)[1].astype(np.int64))
