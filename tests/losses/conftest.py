"""What the tests of several losses share: a batch in general position, threads."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from nofuss.losses import chunked


@pytest.fixture
def batch() -> tuple[Tensor, Tensor]:
    """Twelve points of four classes (4, 3, 3, 2 items, mixed), five dimensions, double."""
    x = torch.randn(12, 5, dtype=torch.double, generator=torch.Generator().manual_seed(0))
    return x, torch.tensor([0, 1, 2, 0, 1, 3, 2, 0, 1, 2, 3, 0])


@pytest.fixture
def proxies() -> Tensor:
    """Four proxies of various lengths for the classes of `batch`."""
    return torch.randn(4, 5, dtype=torch.double, generator=torch.Generator().manual_seed(1))


@pytest.fixture(params=[1, 3], ids=["one thread", "three threads"])
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Threads that sleep, so that each visits proxies of its own, however few."""
    monkeypatch.setattr(chunked, "LEAST", 1)
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)
