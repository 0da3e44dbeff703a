"""One batch in general position that the tests of every loss share."""

import pytest
import torch
from torch import Tensor


@pytest.fixture
def batch() -> tuple[Tensor, Tensor]:
    """Twelve points of four classes (4, 3, 3, 2 items, mixed), five dimensions, double."""
    x = torch.randn(12, 5, dtype=torch.double, generator=torch.Generator().manual_seed(0))
    return x, torch.tensor([0, 1, 2, 0, 1, 3, 2, 0, 1, 2, 3, 0])


@pytest.fixture
def proxies() -> Tensor:
    """Four proxies of various lengths for the classes of `batch`."""
    return torch.randn(4, 5, dtype=torch.double, generator=torch.Generator().manual_seed(1))
