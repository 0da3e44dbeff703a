"""What every score asks of its input: finite vectors, one label each, classes as 0 … C − 1."""

import numpy as np
import torch
from torch import Tensor

from nofuss.geometry import Array, as_tensor


def vectors_of(embeddings: Array, *, name: str = "embeddings") -> Tensor:
    """The embeddings as a detached (N, D) matrix, float32 unless they came as float64."""
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


def classes_of(labels: Array, items: int, *, name: str = "labels") -> Tensor:
    """One class number 0 … C − 1 an item, in the order of the sorted labels (numbers or names)."""
    return _numbered(_column(labels, items, name))


def shared_classes(
    labels: Array, items: int, gallery_labels: Array, gallery_items: int
) -> tuple[Tensor, Tensor]:
    """Class numbers of queries and gallery, numbered together."""
    query = _column(labels, items, "labels")
    gallery = _column(gallery_labels, gallery_items, "gallery_labels")
    numbers = _numbered(np.concatenate([query, gallery]))
    return numbers[:items], numbers[items:]


def _column(labels: Array, items: int, name: str) -> np.ndarray:
    column = labels.detach().cpu().numpy() if isinstance(labels, Tensor) else np.asarray(labels)
    if column.ndim != 1 or len(column) != items:
        raise ValueError(f"{name} have shape {column.shape}; expected ({items},), one an embedding")
    if column.dtype.kind == "f" and not np.isfinite(column).all():
        raise ValueError(f"{name} hold NaN or infinity; give every item a class")
    return column


def _numbered(column: np.ndarray) -> Tensor:
    return torch.from_numpy(np.unique(column, return_inverse=True)[1].astype(np.int64))
