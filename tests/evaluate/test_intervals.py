"""Intervals over classes: worked cases, slow loops, and how often they hold the truth."""

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy import stats

from nofuss.evaluate import paired_difference
from nofuss.evaluate.intervals import class_interval, class_intervals, t_interval


@pytest.mark.parametrize(
    ("sums", "sizes", "expected"),
    [
        ([4] * 3, [4] * 3, (0.677, 1)),  # 12 of 12 in three classes
        ([4, 4, 3], [4] * 3, (0.530, 1)),
        ([20], [20], (0, 1)),  # one class says nothing of others
        ([20] * 5, [20] * 5, (0.833, 1)),
        ([20] * 8 + [19] * 2, [20] * 10, (0.912, 1)),
        ([20] * 100, [20] * 100, (0.993, 1)),
    ],
)
def test_near_the_ceiling(sums: list[int], sizes: list[int], expected: tuple[float, float]) -> None:
    assert class_interval(sums, sizes) == pytest.approx(expected, abs=1e-3)
    # The floor is the ceiling upside down.
    low, high = class_interval(np.subtract(sizes, sums), sizes)
    assert (1 - high, 1 - low) == pytest.approx(expected, abs=1e-3)


def test_the_formula_by_a_loop() -> None:
    random = np.random.default_rng(0)
    sizes = random.integers(1, 30, 12)
    scores = [random.random(n) for n in sizes]
    extra = sum(n * n for n in sizes) / sizes.sum() / 4
    s = [each.sum() for each in scores] + [0, extra]
    n = [*sizes, extra, extra]
    mean = sum(s) / sum(n)
    shifts = [(sum(s) - a) / (sum(n) - b) - mean for a, b in zip(s, n, strict=True)]
    deviation = (13 / 14 * sum(d * d for d in shifts)) ** 0.5
    half = stats.t.ppf(0.975, sum(n) ** 2 / sum(b * b for b in n) - 1) * deviation
    found = class_interval([each.sum() for each in scores], sizes)
    assert found == pytest.approx((mean - half, mean + half))
    classes = torch.arange(12).repeat_interleave(torch.tensor(sizes))
    values = torch.from_numpy(np.concatenate(scores))
    assert class_intervals({"x": values}, classes)["x"] == pytest.approx(found)


def test_a_difference_of_nothing_and_of_one_more_in_each_class() -> None:
    labels = np.repeat(np.arange(20), 20)
    none = np.zeros(400)
    assert paired_difference(none, none, labels) == pytest.approx((0, -0.036, 0.036), abs=1e-3)
    one = (np.arange(400) % 20 == 0).astype(float)
    found = paired_difference(one, none, labels)
    assert found == pytest.approx((0.05, 0.013, 0.084), abs=1e-3)
    mean, low, high = paired_difference(none, one, labels)
    assert (-mean, -high, -low) == pytest.approx(tuple(found))


def test_one_class_says_nothing_of_others() -> None:
    hits, one = torch.tensor([0.0, 1.0, 1.0]).double(), torch.tensor([5, 5, 5])
    assert class_intervals({"hit": hits}, one)["hit"] == (0, 1)
    assert paired_difference(hits, 1 - hits, one) == (pytest.approx(1 / 3), -1, 1)


def test_pairing_takes_out_what_is_hard_for_both() -> None:
    """Classes differ by far more than the models do; one is better by 0.01 in every class."""
    labels = np.repeat(np.arange(50), 10)
    a = np.random.default_rng(1).random(50)[labels]
    mean, low, high = paired_difference(a + 0.01, a, labels)
    assert (mean, high) == pytest.approx((0.01, 0.01))
    assert 0.008 < low < 0.01


def test_the_largest_difference_may_be_given() -> None:
    labels = np.repeat(np.arange(10), 10)
    a = np.random.default_rng(1).random(10)[labels] / 10
    own, wider = paired_difference(a, 0 * a, labels), paired_difference(a, 0 * a, labels, largest=1)
    assert wider.mean == own.mean
    assert wider.low < own.low
    assert wider.high > own.high


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda a, y: paired_difference(a, a[:-1], y), "one score a query"),
        (lambda a, y: paired_difference(a / 0, a, y), "NaN or infinity"),
        (lambda a, y: paired_difference(a, a, y[:-1]), "one an embedding"),
    ],
)
def test_misuse_is_one_line(call, message):  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=message) as error:
        call(torch.ones(6), torch.tensor([0, 0, 1, 1, 2, 2]))
    assert "\n" not in str(error.value)


def test_t_interval_is_scipys() -> None:
    values = [0.3, 0.35, 0.28, 0.31]
    expected = stats.t.interval(0.95, 3, loc=np.mean(values), scale=stats.sem(values))
    assert t_interval(values) == pytest.approx(expected)
    assert t_interval([0.3]) is None


def chances(
    random: np.random.Generator, mean: float, alike: float, shape: tuple[int, int]
) -> NDArray[np.float64]:
    """Chances of a hit by class, whose queries have the intraclass correlation `alike`."""
    a = (1 - alike) / alike
    return random.beta(mean * a, (1 - mean) * a, shape)


def sizes_of(random: np.random.Generator, kind: str, shape: tuple[int, int]) -> NDArray[np.int64]:
    if kind == "equal":
        return np.full(shape, 20)
    return np.exp(random.normal(2, 1, shape)).round().clip(2, 300).astype(np.int64)


@pytest.mark.slow
@pytest.mark.parametrize("mean", [0.5, 0.9, 0.99])
@pytest.mark.parametrize("kind", ["equal", "long tail"])
@pytest.mark.parametrize("classes", [3, 10, 50])
def test_coverage(mean: float, kind: str, classes: int) -> None:
    random, trials = np.random.default_rng(0), 1000
    for alike in (0.02, 0.3):
        sizes = sizes_of(random, kind, (trials, classes))
        hits = random.binomial(sizes, chances(random, mean, alike, (trials, classes)))
        ends = np.array([class_interval(s, n) for s, n in zip(hits, sizes, strict=True)])
        covered = ((ends[:, 0] <= mean) & (mean <= ends[:, 1])).mean()
        assert covered >= 0.92 - 0.01  # a standard error of 1,000 trials


@pytest.mark.slow
@pytest.mark.parametrize("mean", [0.5, 0.99])
@pytest.mark.parametrize("classes", [3, 10, 50])
def test_coverage_of_differences(mean: float, classes: int) -> None:
    """Two models that find the same classes hard, one of them worse by three points."""
    random, trials, each = np.random.default_rng(0), 1000, 20
    labels = np.repeat(np.arange(classes), each)
    chance = chances(random, mean, 0.1, (trials, classes))[:, labels]
    luck = random.random((trials, classes * each))
    ours = luck < chance
    theirs = np.where(random.random(ours.shape) < 0.8, luck, random.random(ours.shape)) < (
        chance * (1 - 0.03 / mean)
    )
    covered = 0
    for a, b in zip(ours.astype(float), theirs.astype(float), strict=True):
        _, low, high = paired_difference(a, b, labels)
        covered += low <= 0.03 <= high
    assert covered / trials >= 0.92 - 0.01
