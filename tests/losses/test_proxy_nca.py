import math

import pytest
import torch
from torch import Tensor

from nofuss.losses.proxy_nca import proxy_nca

ANCHOR, LABEL = torch.tensor([[3.0, 0.0]]), torch.tensor([0])
COMPASS = torch.tensor([[1.0, 0.0], [0.0, 2.0], [-1.0, 0.0]])  # distances² 0, 2, 4 on the sphere


def test_worked_by_hand() -> None:
    below = math.exp(-2) + math.exp(-4)  # the positive, at distance 0, is not in the sum
    assert proxy_nca(ANCHOR, LABEL, COMPASS, scale=2).item() == pytest.approx(math.log(below))
    softmax = proxy_nca(ANCHOR, LABEL, COMPASS, scale=2, include_positive=True)
    assert softmax.item() == pytest.approx(math.log(1 + below))


def test_free_norms_worked_by_hand() -> None:
    # |x − p|² = 4, 13, 16 of the vectors as they are.
    loss = proxy_nca(ANCHOR, LABEL, COMPASS, scale=None)
    assert loss.item() == pytest.approx(4 + math.log(math.exp(-13) + math.exp(-16)))


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
