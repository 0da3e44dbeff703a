"""The share of triplets and pairs in the right order, against loops and scikit-learn."""

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

from nofuss.evaluate.triplet_accuracy import pair_accuracy, triplet_accuracy


def points(count: int = 40) -> np.ndarray:
    return np.random.default_rng(0).normal(size=(count, 5))


def unit(x: np.ndarray) -> np.ndarray:
    return x / np.linalg.norm(x, axis=1, keepdims=True)


def test_triplets_against_a_loop() -> None:
    x, random = points(), np.random.default_rng(1)
    rows = np.array([random.permutation(40)[:3] for _ in range(60)])
    u = unit(x)
    right = [np.linalg.norm(u[a] - u[p]) < np.linalg.norm(u[a] - u[n]) for a, p, n in rows]
    scores = triplet_accuracy(x, rows)
    assert scores.ordered == pytest.approx(np.mean(right))
    (part,) = scores.parts
    assert part.values.tolist() == [float(each) for each in right]
    low, high = scores.interval
    assert low < scores.ordered < high
    assert scores.as_dict()["triplets"] == 60


def test_pairs_are_the_area_under_the_curve() -> None:
    x, random = points(), np.random.default_rng(1)
    items = np.stack([np.arange(80) // 4, 20 + np.arange(80) % 20], axis=1)  # each pair once
    same = random.integers(0, 2, 80)
    gaps = np.linalg.norm(unit(x)[items[:, 0]] - unit(x)[items[:, 1]], axis=1)
    scores = pair_accuracy(x, np.c_[items, same])
    assert scores.ordered == pytest.approx(roc_auc_score(same, -gaps))
    assert scores.as_dict()["pairs"] == same.sum()


def test_equal_distances_count_as_wrong() -> None:
    x = np.array([[1.0, 0.0], [0.0, 1.0], [0.0, 2.0]])
    assert triplet_accuracy(x, np.array([[0, 1, 2]])).ordered == 0
    assert pair_accuracy(x, np.array([[0, 1, 1], [0, 2, 0]])).ordered == 0


@pytest.mark.parametrize(("alike", "different"), [(500, 20), (100, 100), (50, 500)])
def test_the_interval_of_pairs_accounts_for_both_kinds(alike: int, different: int) -> None:
    """Angles of alike pairs from N(1, 0.3), of others from N(1.3, 0.3): an area of Φ(1/√2)."""
    random, covered, truth = np.random.default_rng(0), 0, 0.76025
    for _ in range(60):
        angles = np.r_[random.normal(1, 0.3, alike), random.normal(1.3, 0.3, different)]
        ends = np.stack([np.cos(angles), np.sin(angles)], axis=1)
        x = np.stack([np.tile([1.0, 0.0], (len(ends), 1)), ends], axis=1).reshape(-1, 2)
        first = np.arange(0, len(x), 2)
        low, high = pair_accuracy(
            x, np.c_[first, first + 1, np.arange(len(first)) < alike]
        ).interval
        covered += low <= truth <= high
    assert covered >= 51  # of 57 on average; with alike pairs alone 17, 47 and 57


def test_intervals_are_over_groups() -> None:
    """One group all right, one all wrong: the interval reaches from 0 to 1."""
    x = np.array([[1.0, 0.0], [1.0, 0.1], [0.0, 1.0]])
    rows = np.array([[0, 1, 2]] * 50 + [[2, 0, 1]] * 50)
    scores = triplet_accuracy(x, rows, groups=np.array([0, 0, 1]))
    assert scores.ordered == 0.5
    assert scores.interval == (0, 1)


def test_a_gain_is_paired() -> None:
    x, random = points(), np.random.default_rng(1)
    rows = np.array([random.permutation(40)[:3] for _ in range(60)])
    ours, other = triplet_accuracy(x, rows), triplet_accuracy(x[:, :2], rows)
    gain = ours.gain_over("two", other)
    assert gain["over"] == "two"
    assert gain["ordered"][0] == pytest.approx(ours.ordered - other.ordered)
    mean, low, high = ours.gain_over("itself", ours)["ordered"]
    assert mean == 0
    assert low < 0 < high


def test_nothing_to_compare_is_one_line() -> None:
    with pytest.raises(ValueError, match="1 alike and 0 different"):
        pair_accuracy(points(), np.array([[0, 1, 1]]))
    with pytest.raises(ValueError, match=r"comparisons are \(0, 3\); expected \(T, 3\)"):
        triplet_accuracy(points(), np.empty((0, 3), dtype=np.int64))
    for wrong in ([[0, 1, -1]], [[0, 1, 40]], [[0, 1, 1.7]]):
        with pytest.raises(ValueError, match="40 embeddings"):
            triplet_accuracy(points(), np.array(wrong))
