"""Embeddings of known difficulty that the tests of every score share."""

from typing import Protocol

import pytest
import torch
from torch import Tensor


class Scene(Protocol):
    def __call__(
        self, items: int, classes: int, dim: int = 8, *, noise: float = 0.8, seed: int = 0
    ) -> tuple[Tensor, Tensor]: ...


@pytest.fixture
def scene() -> Scene:
    """Noisy class centers of various lengths in random order; a class may have one item."""

    def make(
        items: int, classes: int, dim: int = 8, *, noise: float = 0.8, seed: int = 0
    ) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        labels = torch.randint(classes, (items,), generator=generator)
        centers = torch.randn(classes, dim, generator=generator)
        return centers[labels] + noise * torch.randn(items, dim, generator=generator), labels

    return make
