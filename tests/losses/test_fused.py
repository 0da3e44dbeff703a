"""The fused losses against slow loops, the plain autograd form, and the corner cases."""

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from nofuss.losses import fused, fused_walk
from nofuss.losses.fused import fused_proxy_nca


def slow_nca(x: Tensor, positive: Tensor, p: Tensor, scale: float, softmax: bool) -> float:
    total = 0.0
    for xi, y in zip(x, positive.tolist(), strict=True):
        logits = [scale * float(xi @ z / z.norm().clamp_min(1e-12)) for z in p]
        others = [v for j, v in enumerate(logits) if softmax or j != y]
        top = max(others)
        total += top + math.log(sum(math.exp(v - top) for v in others)) - logits[y]
    return total / len(x)


def plain_nca(
    x: Tensor, positive: Tensor, p: Tensor, *, scale: float | Tensor, include_positive: bool
) -> Tensor:
    logits = scale * x @ F.normalize(p).T
    own = positive[:, None]
    others = logits if include_positive else logits.scatter(1, own, -math.inf)
    return (others.logsumexp(1) - logits.gather(1, own)[:, 0]).mean()


def batch(
    b: int, dim: int, num_proxies: int, *, dtype: torch.dtype = torch.float64, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    x = F.normalize(torch.randn(b, dim, generator=g, dtype=dtype))
    positive = torch.randint(num_proxies, (b,), generator=g)
    return x, positive, torch.randn(num_proxies, dim, generator=g, dtype=dtype)


def gradients(loss: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(loss, inputs)


SIZES = {
    "one anchor": (1, 5, 9),
    "two proxies": (4, 3, 2),
    "last chunk of one row": (3, 4, 9),
    "more anchors than proxies": (40, 6, 7),
    "whole chunks": (8, 8, 16),
}


@pytest.fixture(params=[2**3, 2**6, 2**18])
def chunk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_walk, "CHUNK", request.param)


@pytest.mark.usefixtures("chunk")
@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("softmax", [True, False])
@pytest.mark.parametrize("scale", [1.0, 18.0, 2000.0])  # the last needs a running maximum
@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_equals_the_slow_loop_and_the_plain_gradients(
    size: tuple[int, int, int], scale: float, softmax: bool, keep: bool
) -> None:
    x, positive, p = (t.requires_grad_(t.is_floating_point()) for t in batch(*size))
    loss = fused_proxy_nca(x, positive, p, scale=scale, include_positive=softmax, keep=keep)
    assert loss.item() == pytest.approx(slow_nca(x, positive, p, scale, softmax), rel=1e-9)
    plain = plain_nca(x, positive, p, scale=scale, include_positive=softmax)
    for got, expected in zip(gradients(loss, x, p), gradients(plain, x, p), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-8, atol=1e-10)
