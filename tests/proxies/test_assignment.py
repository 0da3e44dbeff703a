import itertools

import pytest
import torch
from torch import Tensor

from nofuss.losses.proxy_anchor import ProxyAnchor
from nofuss.losses.proxy_nca import ProxyNCA
from nofuss.proxies.assignment import (
    FREE,
    Balanced,
    Dynamic,
    Fractional,
    Sampled,
    Several,
    Static,
    build_assignment,
)
from tests.proxies.drawn import numbers, unit


def test_static_is_the_label_and_z_is_the_rest() -> None:
    labels = torch.tensor([3, 0, 3])
    triplets = Static(4).from_labels(numbers(3, 2), labels, numbers(4, 2))
    assert triplets.positive.tolist() == [3, 0, 3]
    assert triplets.negative is None
    assert triplets.anchor is None


def test_algorithm_1_with_a_sampled_z_against_a_slow_loop() -> None:
    criterion = ProxyNCA(9, 3, assignment=Sampled(9), scale=2, seed=0).double()
    x, labels = unit(numbers(6, 3)), torch.tensor([4, 1, 4, 7, 7, 7])
    total = 0.0
    for x_i, c in zip(x, labels, strict=True):
        d = [(x_i - p).square().sum() for p in criterion.proxies]
        p_z = {int(z) for z in labels if z != c}  # a set: each proxy of the sample counts once
        total += d[c] + torch.log(sum(torch.exp(-d[z]) for z in p_z))
    torch.testing.assert_close(criterion(x, labels), total / 6)


def test_a_sampled_z_of_all_labels_is_static_assignment() -> None:
    sampled, static = (ProxyNCA(5, 3, assignment=a, seed=0) for a in (Sampled(5), "static"))
    x = numbers(10, 3).float().requires_grad_()
    labels = torch.arange(10) % 5
    gradients = []
    for criterion in (sampled, static):
        loss = criterion(x, labels)
        gradients.append((loss, *torch.autograd.grad(loss, (x, criterion.proxies))))
    torch.testing.assert_close(*gradients)
    assert torch.equal(sampled.assign(x, labels), labels)
    # A batch of one label has no negative: zero, with a graph.
    alone = sampled(x, torch.full((10,), 3))
    assert alone == 0
    alone.backward()
    with pytest.raises(ValueError, match=r"ProxyAnchor .*sampled"):
        ProxyAnchor(5, 3, assignment=Sampled(5))


@pytest.mark.parametrize(("classes", "proxies"), [(10, 5), (10, 3), (98, 49), (7, 6)])
def test_fractional_deal_is_even_and_seeded(classes: int, proxies: int) -> None:
    deals = [
        Fractional(classes, proxies, generator=torch.Generator().manual_seed(seed)).proxy_of_label
        for seed in (1, 1, 2)
    ]
    counts = torch.bincount(deals[0], minlength=proxies)
    assert counts.sum() == classes
    assert {*counts.tolist()} <= {classes // proxies, -(-classes // proxies)}
    assert torch.equal(deals[0], deals[1])
    assert not torch.equal(deals[0], deals[2])
    assert deals[0].tolist() != sorted(deals[0].tolist())  # at random, not in runs


@pytest.mark.parametrize(("classes", "proxies"), [(4, 12), (4, 10), (5, 7)])
def test_several_owns_neighbouring_rows_evenly(classes: int, proxies: int) -> None:
    owner = Several(classes, proxies).label_of_proxy
    counts = torch.bincount(owner)
    assert owner.tolist() == sorted(owner.tolist())
    assert len(counts) == classes
    assert {*counts.tolist()} <= {proxies // classes, -(-proxies // classes)}


@pytest.mark.parametrize("free", [False, True])
@pytest.mark.parametrize("ratio", [1.5, 0.5])
def test_matched_against_all_matchings(ratio: float, free: bool) -> None:
    """Every way to give the labels proxies is tried; 4 labels share 2 proxies two by two."""
    scale = None if free else 2.0
    criterion = ProxyNCA(4, 3, proxies_per_class=ratio, assignment="matched", scale=scale, seed=0)
    criterion.double()
    x, labels = numbers(9, 3), torch.tensor([0, 1, 2, 3, 3, 2, 1, 0, 0])
    if not free:
        x = unit(x)
    p = [*criterion.proxies.detach()]
    means = [x[labels == c].mean(0) for c in range(4)]
    slots = [*range(len(p))] * max(1, 4 // len(p))
    best = min(
        itertools.permutations(slots, 4),
        key=lambda way: sum((m - p[j]).square().sum() for m, j in zip(means, way, strict=True)),
    )
    total = 0.0
    for x_i, c in zip(x, labels, strict=True):
        d = [(x_i - p_j).square().sum() for p_j in p]
        p_z = {*best} - {best[c]}
        total += d[best[c]] + torch.log(sum(torch.exp(-d[z]) for z in p_z))
    torch.testing.assert_close(criterion(x, labels), total / 9)
    with pytest.raises(ValueError, match="matched"):
        criterion(x, positives=x, negatives=x)


@pytest.mark.parametrize("assignment", ["dynamic", "matched"])
def test_only_matched_labels_learn_from_one_proxy_that_is_closest_to_all(assignment: str) -> None:
    """The start of a fresh network: all items in nearly one direction."""
    labels = torch.arange(32) // 4
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(8, 4, generator=generator)[labels]
    x = 100 + x + 0.3 * torch.randn(32, 4, generator=generator)
    head = torch.nn.Linear(4, 4)
    criterion = ProxyNCA(8, 4, assignment=assignment, scale=16, seed=0)
    with torch.no_grad():
        head.weight.copy_(torch.eye(4))
        head.bias.zero_()
    assert len(criterion.assign(head(x)).unique()) == 1
    rates = [{"params": m.parameters(), "lr": lr} for m, lr in ((head, 0.01), (criterion, 0.05))]
    optimizer = torch.optim.Adam(rates)
    for _ in range(200):
        optimizer.zero_grad()
        criterion(head(x), labels).backward()
        optimizer.step()
    used = criterion.assign(head(x)).unique()
    assert isinstance(criterion.assignment, Dynamic)
    assert (len(used) >= 6) == (assignment == "matched")
    assert (criterion.assignment.fraction_in_use() == 1) == (assignment == "matched")


def nearest(v: Tensor, proxies: Tensor) -> int:
    """Eq. 5."""
    return min(range(len(proxies)), key=lambda p: (v - proxies[p]).square().sum())


def test_dynamic_from_bare_triplets_against_a_slow_loop() -> None:
    criterion = ProxyNCA(6, 3, assignment="dynamic", scale=2, seed=0).double()
    x, y, z = unit(numbers(8, 3)), unit(numbers(8, 3, seed=1)), unit(numbers(8, 4, 3, seed=2))
    terms = []
    for x_i, y_i, z_i in zip(x, y, z, strict=True):
        d = [(x_i - p).square().sum() for p in criterion.proxies]
        p_y = nearest(y_i, criterion.proxies)
        if others := {nearest(v, criterion.proxies) for v in z_i} - {p_y}:
            terms.append(d[p_y] + torch.log(sum(torch.exp(-d[v]) for v in others)))
    loss = criterion(x, positives=y, negatives=z)
    torch.testing.assert_close(loss, sum(terms) / len(terms))


def test_instances_only_choose_proxies() -> None:
    criterion = ProxyNCA(6, 3, assignment="dynamic", seed=0).double()
    x, y, z = (numbers(8, 3, seed=s).requires_grad_() for s in (0, 1, 2))
    criterion(x, positives=y, negatives=z).backward()
    assert x.grad is not None
    assert x.grad.any()
    assert y.grad is None
    assert z.grad is None
    chosen = {*criterion.assign(y).tolist(), *criterion.assign(z).tolist()}
    assert criterion.proxies.grad is not None
    moved = {*criterion.proxies.grad.any(1).nonzero().squeeze(1).tolist()}
    assert moved <= chosen


def test_negatives_that_share_the_positive_s_proxy_say_nothing() -> None:
    criterion = ProxyNCA(3, 2, assignment=Dynamic(3), scale=2)
    criterion.proxies.data = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]])
    east, north = torch.tensor([[1.0, 0.1]]), torch.tensor([[0.1, 1.0]])
    x = torch.tensor([[1.0, 1.0]], requires_grad=True)
    silent = criterion(x, positives=east, negatives=torch.stack([east, 2 * east], 1))
    assert silent == 0
    silent.backward()
    assert x.grad is not None
    assert not x.grad.any()
    # Beside another negative the shared one is left out: p(Z) is the north alone.
    alone = criterion(x, positives=east, negatives=north)
    assert torch.equal(criterion(x, positives=east, negatives=torch.stack([east, north], 1)), alone)


def collapsed(batches: int) -> ProxyNCA:
    """Points in one corner of the sphere, so that one proxy of twenty is closest to all."""
    criterion = ProxyNCA(4, 2, assignment=Dynamic(20), scale=2, seed=0)
    criterion.proxies.data = torch.tensor([[1.0, 0.0]] + 19 * [[-1.0, 0.0]])
    x = torch.tensor([[1.0, 0.0], [1.0, 0.1], [1.0, 0.2], [1.0, 0.3]])
    for _ in range(batches):
        criterion(x, torch.tensor([0, 0, 1, 1]))
    return criterion


def test_fraction_in_use() -> None:
    assignment = collapsed(30).assignment
    assert isinstance(assignment, Dynamic)
    assert assignment.fraction_in_use() == pytest.approx(1 / 20)
    assert Dynamic(5).fraction_in_use() == 0  # nothing was chosen yet
    criterion = collapsed(0).eval()
    criterion(torch.ones(2, 2), torch.tensor([0, 1]))
    assert criterion.assignment.batches == 0, "evaluation does not count"
    both = Dynamic(4)
    corners = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0], [0.0, -1.0]])
    for row in (0, 1, 1, 1):
        both.from_triplets(corners[[row]], corners[[row]][:, None], corners)
    assert both.fraction_in_use() == 0.5
    assert both.fraction_in_use(window=3) == 0.25


def test_collapse_is_said_once() -> None:
    with pytest.warns(UserWarning, match=r"1 of 20 proxies .* use assignment='matched'") as seen:
        collapsed(250)
    assert len(seen) == 1


def test_labels_are_asked_for_where_needed() -> None:
    for assignment in (Static(4), Fractional(4, 2), Several(4, 8)):
        with pytest.raises(ValueError, match="got no labels"):
            assignment.of(numbers(3, 2), None, numbers(4, 2))


def test_names() -> None:
    assert build_assignment("dynamic", 10, 1.5).num_proxies == 15
    with pytest.raises(ValueError, match="unknown assignment 'fractional'"):
        build_assignment("fractional", 10, 0.5)


# Balanced assignment: even, remembered, and the same from all ways into the loss


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
    assert assignment.fraction_in_use() == 1


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
    assert criterion.assignment.fraction_in_use() == 0
    assert criterion.assign(numbers(6, 4), torch.arange(6)).tolist() == [0, 1, 2, 0, 1, 2]


def test_what_it_can_t_do_is_one_line() -> None:
    with pytest.raises(ValueError, match="8 for 4"):
        ProxyNCA(4, 5, proxies_per_class=2, assignment="balanced")
    criterion = ProxyNCA(4, 5, assignment="balanced")
    with pytest.raises(ValueError, match="labels=linked"):
        criterion(numbers(3, 5), positives=numbers(3, 5), negatives=numbers(3, 5))
