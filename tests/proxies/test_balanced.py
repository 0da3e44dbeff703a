"""Balanced assignment: even, remembered, and the same from all ways into the loss."""

import pytest
import torch
from torch import Tensor

from nofuss import ProxyAnchor, ProxyNCA, ProxyTriplet
from nofuss.proxies.balanced import FREE, Balanced


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def uses(assignment: Balanced) -> list[int]:
    held = assignment.proxy_of_label
    return torch.bincount(held[held != FREE], minlength=assignment.num_proxies).tolist()


@pytest.mark.parametrize(("classes", "proxies"), [(6, 6), (7, 3), (12, 5), (9, 2)])
def test_no_proxy_is_held_by_more_than_one_label_more_than_another(
    classes: int, proxies: int
) -> None:
    assignment, p = Balanced(classes, proxies), numbers(proxies, 4, seed=1)
    for step in range(40):  # points in one corner: Eq. 5 would give them all to one proxy
        labels = torch.randint(classes, (5,), generator=torch.Generator().manual_seed(step))
        assignment.settle(numbers(5, 4, seed=step) + 100, labels, p)
        assert max(uses(assignment)) - min(uses(assignment)) <= 1
    assert assignment.is_settled(torch.arange(classes))
    assert assignment.share_in_use() == 1


def test_a_choice_worked_by_hand() -> None:
    """Around their mean the labels lie east, west and a little north of west."""
    assignment = Balanced(3, 2)
    x = torch.tensor([[12.0, 10.0], [9.0, 10.0], [9.0, 10.5], [12.0, 10.0]])
    p = torch.tensor([[-1.0, 0.0], [5.0, 0.0]])
    assignment.settle(x, torch.tensor([0, 1, 2, 0]), p)
    assert assignment.proxy_of_label.tolist() == [1, 0, 0]
    assert assignment.of(x, torch.tensor([2, 0]), p).tolist() == [0, 1]


def test_a_label_keeps_its_proxy() -> None:
    criterion = ProxyNCA(6, 4, proxies_per_class=0.5, assignment="balanced", seed=0)
    criterion(numbers(8, 4), torch.arange(8) % 6)
    assert isinstance(criterion.assignment, Balanced)
    before = criterion.assignment.proxy_of_label.clone()
    criterion(-numbers(8, 4), torch.arange(8) % 6)
    assert torch.equal(criterion.assignment.proxy_of_label, before)
    again = ProxyNCA(6, 4, proxies_per_class=0.5, assignment="balanced", seed=1)
    again.load_state_dict(criterion.state_dict())
    assert torch.equal(
        again(numbers(8, 4), torch.arange(8) % 6), criterion(numbers(8, 4), torch.arange(8) % 6)
    )


@pytest.mark.parametrize("loss", [ProxyNCA, ProxyTriplet, ProxyAnchor])
def test_fused_is_plain(loss: type[ProxyNCA]) -> None:
    x, labels = numbers(12, 4), torch.arange(12) % 6
    options = {"proxies_per_class": 0.5, "assignment": "balanced", "seed": 0}
    plain, fused = (loss(6, 4, fused=fused, **options).double() for fused in (False, True))
    x = x.double().requires_grad_()
    values = plain(x, labels), fused(x, labels)
    torch.testing.assert_close(*values)
    torch.testing.assert_close(
        torch.autograd.grad(values[0], (x, plain.proxies)),
        torch.autograd.grad(values[1], (x, fused.proxies)),
    )


def test_with_as_many_proxies_as_labels_it_is_static_but_for_the_order() -> None:
    x, labels = numbers(12, 4), torch.arange(12) % 6
    balanced = ProxyNCA(6, 4, assignment="balanced", seed=0)
    value = balanced(x, labels)
    assert isinstance(balanced.assignment, Balanced)
    order = balanced.assignment.proxy_of_label
    assert sorted(order.tolist()) == [*range(6)]
    static = ProxyNCA(6, 4, proxies=balanced.proxies.detach()[order])
    torch.testing.assert_close(static(x, labels), value)


def test_evaluation_chooses_nothing_and_is_even() -> None:
    criterion = ProxyNCA(6, 4, proxies_per_class=0.5, assignment="balanced", seed=0).eval()
    criterion(numbers(8, 4), torch.arange(8) % 6)
    assert isinstance(criterion.assignment, Balanced)
    assert criterion.assignment.share_in_use() == 0
    assert criterion.assign(numbers(6, 4), torch.arange(6)).tolist() == [0, 1, 2, 0, 1, 2]


def test_what_it_can_t_do_is_one_line() -> None:
    with pytest.raises(ValueError, match="at most one proxy a label, got 8 for 4; lower"):
        ProxyNCA(4, 5, proxies_per_class=2, assignment="balanced")
    criterion = ProxyNCA(4, 5, assignment="balanced")
    with pytest.raises(ValueError, match="needs the groups that they link: pass labels=linked"):
        criterion(numbers(3, 5), positives=numbers(3, 5), negatives=numbers(3, 5))
