import math

import pytest
import torch

from nofuss.losses.proxy_anchor import ProxyAnchor, proxy_anchor


def test_worked_by_hand() -> None:
    x, labels = torch.tensor([[1.0, 0.0]]), torch.tensor([0])
    proxies = torch.tensor([[1.0, 0.0], [0.0, 1.0]])  # cosines 1 and 0
    pull = math.log(1 + math.exp(-2 * (1 - 0.1)))  # one proxy has a positive
    push = math.log(1 + math.exp(2 * (0 + 0.1))) / 2  # two proxies, one of them with a negative
    loss = proxy_anchor(x, labels, proxies, scale=2, margin=0.1)
    assert loss.item() == pytest.approx(pull + push)


def test_refuses_dynamic_assignment_and_free_norms() -> None:
    with pytest.raises(ValueError, match="dynamic"):
        ProxyAnchor(4, 5, assignment="dynamic")
    with pytest.raises(ValueError, match="scale is None"):
        ProxyAnchor(4, 5, scale=None)  # type: ignore[arg-type]
