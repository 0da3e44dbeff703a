import pytest
import torch
from torch import Tensor

from nofuss.losses.proxy_triplet import ProxyTriplet, proxy_triplet
from nofuss.proxies.assignment import Several


def test_worked_by_hand() -> None:
    x, proxies = torch.tensor([[0.0, 5.0]]), torch.tensor([[1.0, 0.0], [0.0, 2.0], [-1.0, 0.0]])
    # d² = 2, 0, 2 on the sphere: hinges 2 + 0.5 − 0 and 2 + 0.5 − 2.
    loss = proxy_triplet(x, torch.tensor([0]), proxies, margin=0.5)
    assert loss.item() == pytest.approx((2.5 + 0.5) / 2)
    # d² = 26, 9, 26 with free norms.
    loss = proxy_triplet(x, torch.tensor([0]), proxies, margin=0.5, scale=None)
    assert loss.item() == pytest.approx((17.5 + 0.5) / 2)


@pytest.mark.parametrize("norm", [1.0, 2.0])
def test_slow_loop(batch: tuple[Tensor, Tensor], proxies: Tensor, norm: float) -> None:
    x, labels = batch
    hinges = []
    for i, c in enumerate(labels):
        d = [(norm * (x[i] / x[i].norm() - p / p.norm())).square().sum() for p in proxies]
        hinges += [(d[c] + 0.3 - d[z]).clamp(min=0) for z in range(4) if z != c]
    loss = proxy_triplet(x, labels, proxies, margin=0.3, scale=2 * norm**2)
    torch.testing.assert_close(loss, sum(hinges) / len(hinges))


def test_several_proxies_a_label_against_the_slow_loop(batch: tuple[Tensor, Tensor]) -> None:
    x, labels = batch
    criterion = ProxyTriplet(4, 5, margin=1.0, proxies_per_class=2.5, seed=0).double()
    assert isinstance(criterion.assignment, Several)
    owner, losses = criterion.assignment.label_of_proxy, []
    for i, c in enumerate(labels):  # labels have two proxies or three: a mean per anchor
        d = (x[i] / x[i].norm() - criterion.proxies).square().sum(1)
        hinges = [(d[owner == c].min() + 1 - d_z).clamp(min=0) for d_z in d[owner != c]]
        losses.append(sum(hinges) / len(hinges))
    torch.testing.assert_close(criterion(x, labels), sum(losses) / len(losses))


def test_a_point_at_its_proxy_far_from_the_others_costs_nothing() -> None:
    proxies = torch.eye(3)
    assert proxy_triplet(proxies, torch.arange(3), proxies, margin=1.9) == 0
    assert proxy_triplet(proxies, torch.arange(3), proxies, margin=2.1) > 0
