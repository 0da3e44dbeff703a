import pytest
import torch

from nofuss.losses.proxy_triplet import proxy_triplet


def test_worked_by_hand() -> None:
    x, proxies = torch.tensor([[0.0, 5.0]]), torch.tensor([[1.0, 0.0], [0.0, 2.0], [-1.0, 0.0]])
    # d² = 2, 0, 2 on the sphere: hinges 2 + 0.5 − 0 and 2 + 0.5 − 2.
    loss = proxy_triplet(x, torch.tensor([0]), proxies, margin=0.5)
    assert loss.item() == pytest.approx((2.5 + 0.5) / 2)
    # d² = 26, 9, 26 with free norms.
    loss = proxy_triplet(x, torch.tensor([0]), proxies, margin=0.5, scale=None)
    assert loss.item() == pytest.approx((17.5 + 0.5) / 2)


def test_a_point_at_its_proxy_far_from_the_others_costs_nothing() -> None:
    proxies = torch.eye(3)
    assert proxy_triplet(proxies, torch.arange(3), proxies, margin=1.9) == 0
    assert proxy_triplet(proxies, torch.arange(3), proxies, margin=2.1) > 0
