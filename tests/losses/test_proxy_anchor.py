import math

import pytest
import torch
from pytorch_metric_learning.losses import ProxyAnchorLoss
from torch import Tensor

from nofuss.losses.proxy_anchor import ProxyAnchor, proxy_anchor


def test_worked_by_hand() -> None:
    x, labels = torch.tensor([[1.0, 0.0]]), torch.tensor([0])
    proxies = torch.tensor([[1.0, 0.0], [0.0, 1.0]])  # cosines 1 and 0
    pull = math.log(1 + math.exp(-2 * (1 - 0.1)))  # one proxy has a positive
    push = math.log(1 + math.exp(2 * (0 + 0.1))) / 2  # two proxies, one of them with a negative
    loss = proxy_anchor(x, labels, proxies, scale=2, margin=0.1)
    assert loss.item() == pytest.approx(pull + push)


def test_slow_loop(batch: tuple[Tensor, Tensor], proxies: Tensor) -> None:
    x, labels = batch[0][:7], batch[1][:7] % 3  # class 3 is not in the batch
    pull, push = [], []
    for c, p in enumerate(proxies):
        s = [x_i @ p / (x_i.norm() * p.norm()) for x_i in x]
        own = [torch.exp(-8 * (s[i] - 0.2)) for i in range(7) if labels[i] == c]
        pull += [torch.log(1 + sum(own))] if own else []
        others = sum(torch.exp(8 * (s[i] + 0.2)) for i in range(7) if labels[i] != c)
        push.append(torch.log(1 + others))
    expected = sum(pull) / len(pull) + sum(push) / len(push)
    assert len(pull) == 3
    torch.testing.assert_close(proxy_anchor(x, labels, proxies, scale=8, margin=0.2), expected)


def test_same_as_the_other_library(batch: tuple[Tensor, Tensor]) -> None:
    x, labels = batch[0].requires_grad_(), batch[1]
    ours, theirs = ProxyAnchor(6, 5, seed=0).double(), ProxyAnchorLoss(6, 5).double()
    theirs.load_state_dict({"proxies": ours.proxies.detach()})
    losses = ours(x, labels), theirs(x, labels)
    torch.testing.assert_close(*losses)
    mine, other = (
        torch.autograd.grad(v, [x, c.proxies]) for v, c in zip(losses, (ours, theirs), strict=True)
    )
    torch.testing.assert_close(mine, other)


def test_refuses_dynamic_assignment_and_free_norms() -> None:
    with pytest.raises(ValueError, match="does not take dynamic assignment"):
        ProxyAnchor(4, 5, assignment="dynamic")
    with pytest.raises(ValueError, match="expected a number"):
        ProxyAnchor(4, 5, scale=None)  # type: ignore[arg-type]
