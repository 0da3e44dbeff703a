import math

import pytest
import torch
from torch import Tensor

from nofuss.losses.lifted import lifted_structure


def test_worked_by_hand() -> None:
    x = torch.tensor([[0.0], [1.0], [3.0]])  # the negative is 3 and 2 away
    j = math.log(math.exp(1 - 3) + math.exp(1 - 2)) + 1
    loss = lifted_structure(x, torch.tensor([0, 0, 1]))
    assert loss.item() == pytest.approx(j**2 / 2)


def test_slow_loop_of_directions(batch: tuple[Tensor, Tensor]) -> None:
    x, labels = batch
    u = x / x.norm(dim=1, keepdim=True)
    n, terms = range(len(x)), []
    for i, j in [(i, j) for i in n for j in n if i < j and labels[i] == labels[j]]:
        others = [k for k in n if labels[k] != labels[i]]
        push = sum(torch.exp(1.5 - (u[e] - u[k]).norm()) for e in (i, j) for k in others)
        terms.append((torch.log(push) + (u[i] - u[j]).norm()).clamp(min=0).square())
    loss = lifted_structure(x, labels, margin=1.5, unit_norm=True)
    torch.testing.assert_close(loss, sum(terms) / (2 * len(terms)))
