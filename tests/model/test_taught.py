"""What marked pairs teach: the pairs move, everything else stays where it was."""

import pytest
import torch
from torch import Tensor

from nofuss.geometry import normalize
from nofuss.model.manifest import mapped
from nofuss.model.taught import SLACK, SWEEPS, MarkedPairs, taught_map


def directions(count: int, dim: int, seed: int = 0) -> Tensor:
    return normalize(torch.randn(count, dim, generator=torch.Generator().manual_seed(seed)))


def pairs(*given: tuple[int, int, bool]) -> MarkedPairs:
    first, second, same = zip(*given, strict=True) if given else ((), (), ())
    whole = torch.int64
    return MarkedPairs(
        torch.tensor(first, dtype=whole),
        torch.tensor(second, dtype=whole),
        torch.tensor(same, dtype=torch.bool),
    )


def slowly(x: Tensor, marked: MarkedPairs, near: float, far: float) -> Tensor:
    """The metric in all D dimensions, one projection after the other, as in the paper."""
    a = torch.eye(x.shape[1], dtype=torch.float64)
    targets = [near**2 if same else far**2 for same in marked.same]
    weights = [0.0] * len(targets)
    for _ in range(SWEEPS):
        for i, (p, q, same) in enumerate(
            zip(marked.first, marked.second, marked.same, strict=True)
        ):
            v = (x[p] - x[q]).double()
            distance, sign = float(v @ a @ v), 1 if same else -1
            step = min(weights[i], sign * (1 / distance - 1 / targets[i]) * SLACK / (SLACK + 1))
            weights[i] -= step
            targets[i] = 1 / (1 / targets[i] + sign * step / SLACK)
            a += sign * step / (1 - sign * step * distance) * torch.outer(a @ v, a @ v)
    return a


def test_no_marks_change_nothing() -> None:
    x = directions(20, 6)
    assert torch.equal(taught_map(x, pairs(), near=0.5, far=1.4), torch.eye(6).double())


def test_it_is_the_metric_of_a_slow_loop() -> None:
    x = directions(20, 9)
    marked = pairs((0, 1, True), (0, 2, False), (3, 4, True), (3, 0, False), (5, 1, True))
    matrix = taught_map(x, marked, near=0.6, far=1.5)
    torch.testing.assert_close(matrix, matrix.T)
    expected = slowly(x, marked, 0.6, 1.5)
    torch.testing.assert_close(matrix.T @ matrix, expected, atol=5e-3, rtol=5e-3)


def test_pairs_move_and_other_directions_stay() -> None:
    x = directions(40, 30)
    x[2] = normalize(x[:1] + 0.8 * x[2:3])[0]  # alike, and not the same
    marked = pairs((0, 1, True), (0, 2, False))
    matrix = taught_map(x, marked, near=0.5, far=1.6)
    before, after = x, mapped(x, matrix)

    def apart(v: Tensor, a: int, b: int) -> float:
        return float((v[a] - v[b]).norm())

    assert apart(after, 0, 1) < apart(before, 0, 1) - 0.1
    assert apart(after, 0, 2) > apart(before, 0, 2) + 0.1
    touched = torch.stack([x[0] - x[1], x[0] - x[2]]).double()
    basis = torch.linalg.qr(touched.T).Q
    free = directions(1, 30, seed=1)[0].double()
    free -= basis @ (basis.T @ free)
    torch.testing.assert_close(matrix @ free, free)


def test_a_pair_that_is_right_already_teaches_nothing() -> None:
    x = directions(10, 8)
    distance = float((x[0] - x[1]).norm())
    matrix = taught_map(x, pairs((0, 1, True)), near=distance + 0.1, far=1.6)
    torch.testing.assert_close(matrix, torch.eye(8).double())


@pytest.mark.parametrize("count", [1, 30])
def test_contradictions_and_copies_are_survived(count: int) -> None:
    x = directions(10, 8)
    x[5] = x[4]
    given = [(0, 1, True), (1, 0, False), (4, 5, False), (4, 5, True)] * count
    matrix = taught_map(x, pairs(*given), near=0.5, far=1.6)
    assert matrix.isfinite().all()
    assert float(torch.linalg.eigvalsh(matrix).min()) > 0


def test_zero_vectors_stay_zero() -> None:
    x = torch.cat([directions(2, 4), torch.zeros(1, 4)])
    after = mapped(x, 3 * torch.eye(4).double())
    torch.testing.assert_close(after, x)
