import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nofuss.losses.nca import nca
from nofuss.losses.proxy_nca import proxy_nca
from nofuss.proxies.bounds import ROUNDING, Bounds, _triplets, proxy_bounds
from nofuss.proxies.counting import count_triplets
from tests.proxies.drawn import numbers, unit

NAMES = ("ranking", "expected_ranking", "nca", "triplet", "total")


def near_tight(root: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, y | z with proxies moved by √ε along x: y's towards x, z's away from it."""
    half, up = root / 2, math.sqrt(1 - root**2 / 4)
    x = torch.tensor([[1.0, 0.0], [-half, up], [half, up]]).double()
    p = torch.tensor([[1.0, 0.0], [half, up], [-half, up]]).double()
    return x, torch.tensor([0, 0, 1]), p, torch.arange(3)


def test_epsilon_by_hand() -> None:
    angles = torch.deg2rad(torch.tensor([0.0, 60.0, 90.0]).double())
    x = 5 * torch.stack([angles.cos(), angles.sin()], 1)  # lengths do not count
    p = torch.tensor([[2.0, 0.0], [0.0, 3.0]])
    found = proxy_bounds(x, torch.tensor([0, 0, 1]), p, torch.tensor([0, 0, 1]))
    # Static, not the closest: the point at 60° keeps the proxy at 0°, |x − p|² = 1.
    assert found.epsilon == pytest.approx(1)
    assert found.epsilon_mean == pytest.approx(1 / 3)
    assert found.epsilon_95 == pytest.approx(0.9)


@pytest.mark.parametrize("printed", [False, True])
def test_slow_loop(printed: bool) -> None:
    n_x, n_p, margin = 2.0, 1.5, 0.3
    alpha, labels, own = 1 / 3, [0, 0, 0, 1, 1, 2, 1], torch.tensor([0, 3, 0, 1, 1, 2, 3])
    x, p = unit(numbers(7, 3)), unit(numbers(4, 3, seed=1))
    epsilon = max(float((x[i] - p[own[i]]).square().sum()) for i in range(7))
    root, n = math.sqrt(epsilon), range(7)
    ranking, nca, hinge, h, h_p, unsure = [], [], [], [], [], []
    for i, j in [(i, j) for i in n for j in n if i != j and labels[i] == labels[j]]:
        p_y = p[own[j]]
        zs = [z for z in n if labels[z] != labels[i]]
        for z in zs:
            p_z = p[own[z]]
            apart = float((x[i] - x[j]).norm() - (x[i] - x[z]).norm())
            apart_p = float((x[i] - p_y).norm() - (x[i] - p_z).norm())
            ranking.append((abs(apart - apart_p), 2 * root))
            h.append(apart > 0)
            h_p.append(apart_p > 0)
            unsure.append(abs(apart_p) <= 2 * root)
            left = max(
                0, float((x[i] - x[j]).square().sum() - (x[i] - x[z]).square().sum()) + margin
            )
            d_y = float((n_x * x[i] - n_p * p_y).square().sum())
            d_z = float((n_x * x[i] - n_p * p_z).square().sum())
            right = alpha * max(0, d_y - d_z + margin) + (1 - alpha) * margin
            hinge.append((left, right + (2 if printed else 4) * root))
        # |·|² in both, the positive out of the denominator.
        d = lambda a, b: float((a - b).square().sum())  # noqa: E731
        left = d(x[i], x[j]) + math.log(sum(math.exp(-d(x[i], x[z])) for z in zs))
        over = [math.exp(-d(n_x * x[i], n_p * p[own[z]])) for z in zs]
        right = alpha * (d(n_x * x[i], n_p * p_y) + math.log(sum(over)))
        loose = 2 * math.sqrt(2 * epsilon) if printed else 4 * root
        nca.append((left, right + (1 - alpha) * math.log(len(zs)) + loose))
    found = proxy_bounds(
        x, torch.tensor(labels), p, own, norm_x=n_x, norm_p=n_p, margin=margin, printed=printed
    )
    for bound, pairs in ((found.ranking, ranking), (found.nca, nca), (found.triplet, hinge)):
        left, right = np.array(pairs).T
        assert bound.left == pytest.approx(left.mean())
        assert bound.right == pytest.approx(right.mean())
        assert bound.slack == pytest.approx((right - left).mean())
        assert bound.least_slack == pytest.approx((right - left).min())
        assert bound.violations == pytest.approx((left > right).mean())
        assert bound.triplets == len(pairs)
    # Eq. 7: every (x, p_y, p_z) times the number of triplets that it stands for.
    total = 0.0
    for i, a, b in [(i, a, b) for i in n for a in range(4) for b in range(4)]:
        ys = [j for j in n if j != i and labels[j] == labels[i] and own[j] == a]
        zs = [z for z in n if labels[z] != labels[i] and own[z] == b]
        d_y, d_z = (float((n_x * x[i] - n_p * p[row]).square().sum()) for row in (a, b))
        total += len(ys) * len(zs) * max(0, d_y - d_z + margin)
    right = alpha * total / len(hinge) + (1 - alpha) * margin + (2 if printed else 4) * root
    assert found.total.right == pytest.approx(right)
    assert found.total.right == pytest.approx(found.triplet.right)
    assert found.total.left == found.triplet.left
    assert found.total.triplets == len(hinge) == count_triplets(torch.tensor(labels))
    assert found.expected_ranking.left == pytest.approx(np.mean(h))
    assert found.expected_ranking.right == pytest.approx(np.mean(h_p) + np.mean(unsure))


def _no_violations(found: Bounds) -> None:
    for name in NAMES:
        bound = getattr(found, name)
        assert bound.violations == 0, name
        assert bound.least_slack >= -ROUNDING, name


@pytest.mark.slow
@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**31),
    dim=st.integers(1, 6),
    labels=st.lists(st.integers(0, 3), min_size=4, max_size=24).filter(
        lambda c: 1 < len({*c}) < len(c)
    ),
    closeness=st.sampled_from([0.0, 1e-6, 1e-2, 0.3, 1.0, 10.0]),
    static=st.booleans(),
    norms=st.tuples(st.floats(1.0, 8), st.floats(1.0, 8)),
    margin=st.floats(0, 4),
)
def test_corrected_bounds_hold(
    seed: int,
    dim: int,
    labels: list[int],
    closeness: float,
    static: bool,
    norms: tuple[float, float],
    margin: float,
) -> None:
    c = torch.tensor(labels)
    p = numbers(4, dim, seed=seed)
    x = unit(p)[c] + closeness * numbers(len(c), dim, seed=seed + 1)
    own = c if static else torch.cdist(unit(x), unit(p)).argmin(1)
    found = proxy_bounds(x, c, p, own, norm_x=norms[0], norm_p=norms[1], margin=margin)
    _no_violations(found)


def test_printed_proposition_4_2_is_false() -> None:
    case = near_tight(0.1)
    settings = {"norm_x": 1.1, "norm_p": 1.0, "margin": 4.0}
    printed = proxy_bounds(*case, printed=True, **settings)
    assert printed.triplet.violations == 0.5  # of the two anchors that have a positive
    assert printed.triplet.least_slack == pytest.approx(-2 * 0.1, abs=1e-3)
    corrected = proxy_bounds(*case, **settings)
    _no_violations(corrected)
    assert corrected.triplet.least_slack < 1e-3  # and 4√ε is reached


def test_printed_proposition_4_1_is_false_for_the_paper_s_own_distance() -> None:
    case, settings = near_tight(0.1), {"norm_x": 1.0001, "norm_p": 1.0}
    printed = proxy_bounds(*case, printed=True, **settings)
    assert printed.nca.violations == 0.5
    assert printed.nca.least_slack == pytest.approx((2 * 2**0.5 - 4) * 0.1, abs=1e-3)
    corrected = proxy_bounds(*case, **settings)
    _no_violations(corrected)
    assert corrected.nca.least_slack < 1e-3  # 4√ε is reached


@pytest.mark.parametrize(("factor", "constant"), [(2, 4.0), (1, 2.0)])
def test_no_smaller_constant_of_proposition_4_1_will_do(factor: int, constant: float) -> None:
    """Climb to the worst case: 4√ε for d = |x − y|² (factor 2), 2√ε for the appendix's half."""
    start = [numbers(16, 1, 4, seed=s) for s in range(5)]
    x, y, z = start[:3]
    free = [x, y, y + 0.3 * start[3], z, z + 0.3 * start[4]]
    free = [vectors.requires_grad_() for vectors in free]
    optimizer = torch.optim.Adam(free, lr=0.02)
    most = 0.0
    for _ in range(400):
        x, y, p_y, z, p_z = (unit(vectors) for vectors in free)
        root = torch.maximum((y - p_y).norm(dim=-1), (z - p_z).norm(dim=-1))
        loss = lambda y, z: factor * ((x * z).sum(-1) - (x * y).sum(-1))  # noqa: B023, E731
        needed = (loss(y, z) - loss(p_y, p_z)) / root
        most = max(most, float(needed.detach().max()))
        optimizer.zero_grad()
        (-needed.sum()).backward()
        optimizer.step()
    assert constant - 0.01 < most <= constant + 1e-9


def test_proposition_4_1_bounds_the_loss_that_is_trained() -> None:
    """Left is `nca` on the unit sphere, right α times `proxy_nca`: a class is one negative here."""
    x, labels = numbers(5, 3), torch.tensor([0, 0, 1, 2, 3])
    p, norm = numbers(4, 3, seed=1), 3.0
    found = proxy_bounds(x, labels, p, labels, norm_x=norm, norm_p=norm)
    assert found.nca.left == pytest.approx(float(nca(x, labels, scale=2.0)))
    trained = float(proxy_nca(x[:2], labels[:2], p, scale=2 * norm**2))
    alpha, root = 1 / norm**2, found.epsilon**0.5
    right = alpha * trained + (1 - alpha) * math.log(3) + 4 * root
    assert found.nca.right == pytest.approx(right, rel=1e-5)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**31), margin=st.floats(0, 4), far=st.booleans())
def test_nothing_exceeds_the_largest_possible_value(seed: int, margin: float, far: bool) -> None:
    c = torch.arange(12) % 3
    x, p = numbers(12, 2, seed=seed), numbers(3, 2, seed=seed + 1)
    if far:  # x opposite y and at z: every left side at its largest
        x, c = torch.tensor([[1.0, 0], [-1.0, 0], [1.0, 0]]), torch.tensor([0, 0, 1])
        p = torch.tensor([[1.0, 0], [-1.0, 0]])
    found = proxy_bounds(x, c, p, c, norm_x=1.0, norm_p=1.0, margin=margin)
    for name in NAMES:
        bound = getattr(found, name)
        assert bound.left <= bound.largest + 1e-9, name
        assert bound.says_nothing == (bound.right >= bound.largest - ROUNDING)
    if far:
        assert found.triplet.left == pytest.approx(found.triplet.largest - 2)  # 4 + M and M
        assert found.nca.says_nothing


def test_ranking_bound_holds_for_distances_not_for_their_squares() -> None:
    x, labels, p, own = near_tight(0.1)
    found = proxy_bounds(x, labels, p, own)
    assert found.ranking.violations == 0
    d = lambda a, b: (a - b).square().sum()  # noqa: E731
    left = abs((d(x[0], x[1]) - d(x[0], x[2])) - (d(x[0], p[1]) - d(x[0], p[2])))
    assert found.epsilon == pytest.approx(0.01)
    assert left > 10 * (2 * found.epsilon)  # 4√ε of difference against 2ε


def test_a_sample_agrees_with_all_triplets_in_expectation() -> None:
    labels = torch.tensor(60 * [0] + 25 * [1] + 5 * [2] + [3])  # unequal on purpose
    x = numbers(91, 4) + 1.5 * numbers(4, 4, seed=1)[labels]
    p = numbers(4, 4, seed=1)
    every = proxy_bounds(x, labels, p, labels)
    draws = [proxy_bounds(x, labels, p, labels, max_triplets=20_000, seed=s) for s in range(30)]
    assert draws[0] == proxy_bounds(x, labels, p, labels, max_triplets=20_000, seed=0)
    assert draws[0] != draws[1]
    assert {draw.total.right for draw in draws} == {every.total.right}, "by counts"
    assert every.total.right == pytest.approx(every.triplet.right)
    for name in ("ranking", "triplet", "expected_ranking"):
        lefts = np.array([getattr(draw, name).left for draw in draws])
        error = lefts.std(ddof=1) / len(lefts) ** 0.5
        assert abs(lefts.mean() - getattr(every, name).left) < 4 * error
        assert all(getattr(draw, name).violations == 0 for draw in draws)
    assert {draw.epsilon for draw in draws} == {every.epsilon}


@pytest.mark.parametrize("most", [10, 1000, 10**6])
def test_triplets_are_triplets_and_fit(most: int) -> None:
    for labels in (
        torch.tensor(300 * [7] + [2, 2]),
        torch.tensor(300 * [7] + [2]),
        torch.arange(400).clamp_min(1),
        torch.arange(60) // 3,
    ):
        anchor, y, z = _triplets(labels, most, seed=0)
        real = z >= 0
        assert real.any(1).all()
        assert z.numel() <= max(most, 1000)
        assert (anchor != y).all()
        assert torch.equal(labels[anchor], labels[y])
        assert (labels[anchor][:, None] != labels[z])[real].all()


def test_numpy_arrays_do_as_well() -> None:
    case = near_tight(0.2)
    assert proxy_bounds(*(v.numpy() for v in case)) == proxy_bounds(*case)


def test_points_on_their_proxies_leave_nothing() -> None:
    x, labels = numbers(12, 3), torch.arange(12) % 3
    found = proxy_bounds(x, labels, x, torch.arange(12))
    assert found.epsilon == 0
    assert found.ranking.left == 0
    assert not found.nca.says_nothing


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"norm_x": 0.9}, r"norm_x × norm_p is 0\.9; expected 1 or more"),
        ({"norm_p": math.inf}, "norm_x × norm_p is inf"),
        ({"margin": -1.0}, "margin is -1.0; expected from 0 up"),
        ({"embeddings": torch.full((4, 3), math.nan)}, "embeddings hold NaN or infinity"),
        ({"proxies": torch.full((2, 3), math.inf)}, "proxies hold NaN or infinity"),
        ({"assignment": torch.tensor([0, 1, 2, 1])}, "but there are 2 proxies; expected rows"),
        ({"assignment": torch.tensor([0, 1, -1, 1])}, "but there are 2 proxies; expected rows"),
        ({"labels": torch.arange(3)}, "got 4 embeddings, 3 labels, 4 assignments"),
        ({"labels": torch.zeros(4)}, "no triplet"),
        ({"labels": torch.arange(4)}, "no triplet"),
    ],
)
def test_what_would_hide_a_violation_is_refused(changed: dict[str, Any], message: str) -> None:
    labels = torch.arange(4) % 2
    given = {"embeddings": numbers(4, 3), "proxies": numbers(2, 3), "assignment": labels}
    given |= {"labels": labels, "norm_x": 1.0, "norm_p": 1.0}
    with pytest.raises(ValueError, match=message):
        proxy_bounds(**(given | changed))
