import math

import pytest
import torch
from torch import Tensor

from nofuss.losses.proxy_nca import ProxyNCA, proxy_nca

ANCHOR, LABEL = torch.tensor([[3.0, 0.0]]), torch.tensor([0])
COMPASS = torch.tensor([[1.0, 0.0], [0.0, 2.0], [-1.0, 0.0]])  # distances² 0, 2, 4 on the sphere


def slow(x: Tensor, labels: Tensor, proxies: Tensor, n: float, *, softmax: bool = False) -> Tensor:
    """Eq. 4 as printed, with |x| = |p| = n."""
    total = torch.zeros((), dtype=x.dtype)
    for x_i, c in zip(n * x / x.norm(dim=1, keepdim=True), labels, strict=True):
        d = [(x_i - n * p / p.norm()).square().sum() for p in proxies]
        below = sum(torch.exp(-d[z]) for z in range(len(d)) if softmax or z != c)
        total = total - torch.log(torch.exp(-d[c]) / below)
    return total / len(x)


def test_worked_by_hand() -> None:
    below = math.exp(-2) + math.exp(-4)  # the positive, at distance 0, is not in the sum
    assert proxy_nca(ANCHOR, LABEL, COMPASS, scale=2).item() == pytest.approx(math.log(below))
    softmax = proxy_nca(ANCHOR, LABEL, COMPASS, scale=2, include_positive=True)
    assert softmax.item() == pytest.approx(math.log(1 + below))


def test_free_norms_worked_by_hand() -> None:
    # |x − p|² = 4, 13, 16 of the vectors as they are.
    loss = proxy_nca(ANCHOR, LABEL, COMPASS, scale=None)
    assert loss.item() == pytest.approx(4 + math.log(math.exp(-13) + math.exp(-16)))


def test_default_scale_is_norms_of_three(batch: tuple[Tensor, Tensor]) -> None:
    criterion = ProxyNCA(4, 5, seed=0).double()
    torch.testing.assert_close(criterion(*batch), slow(*batch, criterion.proxies, 3))


def test_it_goes_below_zero_and_the_softmax_form_does_not() -> None:
    settings = {"scale": 18.0}
    assert proxy_nca(ANCHOR, LABEL, COMPASS, **settings) < -17
    assert proxy_nca(ANCHOR, LABEL, COMPASS, **settings, include_positive=True) >= 0


def test_softmax_form_is_softplus_of_the_paper(
    batch: tuple[Tensor, Tensor], proxies: Tensor
) -> None:
    for x, label in zip(*batch, strict=True):
        paper = proxy_nca(x[None], label[None], proxies)
        softmax = proxy_nca(x[None], label[None], proxies, include_positive=True)
        torch.testing.assert_close(softmax, torch.nn.functional.softplus(paper))
