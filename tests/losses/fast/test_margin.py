"""Fused Proxy-Triplet and Proxy-Anchor against slow loops, autograd and a peer."""

import math
from collections.abc import Callable

import pytest
import torch
from pytorch_metric_learning.losses import ProxyAnchorLoss
from torch import Tensor
from torch.nn import functional as F

from nofuss.losses.fast import walk as fused_walk
from nofuss.losses.fast.fused import fused_proxy_anchor, fused_proxy_triplet
from nofuss.losses.proxy_anchor import proxy_anchor
from nofuss.losses.proxy_triplet import proxy_triplet

Loss = Callable[..., Tensor]
FUSED: dict[str, tuple[Loss, Loss]] = {
    "triplet": (fused_proxy_triplet, proxy_triplet),
    "anchor": (fused_proxy_anchor, proxy_anchor),
}
SIZES = [(1, 5, 9), (4, 3, 2), (3, 4, 9), (40, 6, 7), (8, 8, 16)]


def batch(
    b: int, dim: int, num_proxies: int, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(b)
    x = F.normalize(torch.randn(b, dim, generator=g, dtype=dtype))
    positive = torch.randint(num_proxies, (b,), generator=g)
    p = torch.randn(num_proxies, dim, generator=g, dtype=dtype)
    return x.requires_grad_(), positive, p.requires_grad_()


@pytest.fixture(params=[2**3, 2**6, 2**18])
def chunk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_walk, "CHUNK", request.param)


def slow_triplet(c: Tensor, positive: list[int], scale: float, margin: float) -> float:
    hinges = [
        max(0.0, scale * float(c[b, z] - c[b, y]) + margin)
        for b, y in enumerate(positive)
        for z in range(c.shape[1])
        if z != y
    ]
    return sum(hinges) / len(hinges)


def slow_anchor(c: Tensor, positive: list[int], scale: float, margin: float) -> float:
    pull = push = 0.0
    for z in range(c.shape[1]):
        mine = [float(c[b, z]) for b, y in enumerate(positive) if y == z]
        others = [float(c[b, z]) for b, y in enumerate(positive) if y != z]
        pull += math.log1p(sum(math.exp(-scale * (s - margin)) for s in mine))
        push += math.log1p(sum(math.exp(scale * (s + margin)) for s in others))
    return pull / len(set(positive)) + push / c.shape[1]


@pytest.mark.usefixtures("chunk")
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("scale", [2.0, 32.0])
def test_equal_the_slow_loops(size: tuple[int, int, int], scale: float) -> None:
    x, positive, p = batch(*size)
    cosines, y = x.detach() @ F.normalize(p.detach()).T, positive.tolist()
    triplet = fused_proxy_triplet(x, positive, p, scale=scale, margin=0.1)
    assert triplet.item() == pytest.approx(slow_triplet(cosines, y, scale, 0.1))
    anchor = fused_proxy_anchor(x, positive, p, scale=scale, margin=0.1)
    assert anchor.item() == pytest.approx(slow_anchor(cosines, y, scale, 0.1))


@pytest.mark.usefixtures("chunk")
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("scale", [2.0, 32.0, 1000.0])
@pytest.mark.parametrize("name", FUSED)
def test_gradients_equal_the_plain_form(
    name: str, scale: float, size: tuple[int, int, int]
) -> None:
    fused, plain = FUSED[name]
    x, positive, p = batch(*size)
    # Times three: what comes back from above is not always 1.
    got = torch.autograd.grad(3 * fused(x, positive, p, scale=scale, margin=0.1), (x, p))
    expected = torch.autograd.grad(3 * plain(x, positive, p, scale=scale, margin=0.1), (x, p))
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("name", FUSED)
def test_float32_at_many_proxies(name: str) -> None:
    x, positive, p = batch(64, 16, 5001, torch.float32)
    fused, plain = FUSED[name]
    got = torch.autograd.grad(fused(x, positive, p, scale=18.0, margin=0.1), p)[0]
    double = p.detach().double().requires_grad_()
    exact = plain(x.detach().double(), positive, double, scale=18.0, margin=0.1)
    expected = torch.autograd.grad(exact, double)[0]
    assert (got - expected).norm() <= 1e-5 * expected.norm()


def test_anchor_equals_the_peer() -> None:
    x, positive, p = batch(12, 8, 30, torch.float32)
    peer = ProxyAnchorLoss(30, 8, margin=0.1, alpha=32)
    peer.proxies.data.copy_(p.detach())
    mine = fused_proxy_anchor(x, positive, p, scale=32.0, margin=0.1)
    torch.testing.assert_close(mine, peer(x, positive))


def test_triplet_by_hand() -> None:
    """Cosines 1, 0, −1 with margin 2 and scale 1: hinges [0 − 1 + 2]₊ and [−1 − 1 + 2]₊."""
    p = torch.tensor([[2.0, 0.0], [0.0, 3.0], [-1.0, 0.0]])
    x, positive = torch.tensor([[1.0, 0.0]]), torch.tensor([0])
    assert fused_proxy_triplet(x, positive, p, scale=1.0, margin=2.0).item() == 0.5


@pytest.mark.parametrize("name", FUSED)
def test_without_gradients_and_twice(name: str) -> None:
    x, positive, p = batch(5, 4, 9)
    loss = FUSED[name][0](x, positive, p, scale=3.0, margin=0.1)
    with torch.no_grad():
        torch.testing.assert_close(FUSED[name][0](x, positive, p, scale=3.0, margin=0.1), loss)
    (once,) = torch.autograd.grad(loss, p, retain_graph=True)
    torch.testing.assert_close(torch.autograd.grad(loss, p), (once,))
