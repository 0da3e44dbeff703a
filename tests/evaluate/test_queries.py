"""Scores query by query, and the paired bootstrap over classes."""

import numpy as np
import pytest
import torch
from scipy import stats

from nofuss.evaluate import map_at_r, paired_difference, per_query, recall_at_k
from nofuss.evaluate.queries import QueryScores
from nofuss.evaluate.side_by_side import class_sums, from_class_sums


def test_the_means_are_the_scores(scene):
    x, labels = scene(300, 80)
    found = per_query(x, labels)
    assert float(found.recall1.mean()) == recall_at_k(x, labels, (1,))[1]
    assert float(found.map_at_r.mean()) == pytest.approx(map_at_r(x, labels), abs=1e-12)
    sizes = torch.bincount(labels)[labels]
    assert found.rows.tolist() == (sizes > 1).nonzero()[:, 0].tolist()
    assert found.labels.tolist() == labels[found.rows].tolist()


def test_names_as_labels_by_hand():
    # On a line: a a b a b, and c alone, which is no query.
    x = np.array([[0.0], [1.0], [2.1], [3.3], [4.6], [9.0]], dtype=np.float32)
    found = per_query(x, np.array([*"aabab", "c"]), normalize=False)
    assert found.rows.tolist() == [0, 1, 2, 3, 4]
    assert found.labels.tolist() == [*"aabab"]
    assert found.recall1.tolist() == [1.0, 1.0, 0.0, 0.0, 0.0]
    assert found.map_at_r.tolist() == [0.5, 0.5, 0.0, 0.0, 0.0]


def test_a_paired_difference_by_loop():
    random = np.random.default_rng(0)
    labels = random.integers(12, size=200)
    a, b = random.random(200), random.random(200)
    found = paired_difference(a, b, labels, seed=3, resamples=5_000)
    assert found.mean == pytest.approx((a - b).mean())
    groups = [np.flatnonzero(labels == c) for c in range(12)]
    means = []
    for _ in range(5_000):
        drawn = np.concatenate([groups[c] for c in random.integers(12, size=12)])
        means.append((a - b)[drawn].mean())
    wider = (12 / 11) ** 0.5 * stats.t.ppf(0.975, 11) / stats.norm.ppf(0.975)  # few classes
    ends = found.mean + wider * (np.quantile(means, [0.025, 0.975]) - found.mean)
    assert (found.low, found.high) == pytest.approx(tuple(ends), abs=4e-3)
    assert found == paired_difference(a, b, labels, seed=3, resamples=5_000)
    assert paired_difference(b, a, labels, seed=3).mean == -found.mean


def test_pairing_takes_out_what_is_hard_for_both():
    # Classes differ by far more than the models do; b is better by 0.01 in every class.
    random = np.random.default_rng(1)
    labels = np.repeat(np.arange(50), 10)
    a = random.random(50)[labels]
    mean, low, high = paired_difference(a + 0.01, a, labels)
    assert (mean, low, high) == pytest.approx((0.01, 0.01, 0.01))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda a, y: paired_difference(a, a[:-1], y), "one score a query"),
        (lambda a, y: paired_difference(a / 0, a, y), "NaN or infinity"),
        (lambda a, y: paired_difference(a, a, y[:-1]), "one an embedding"),
        (lambda a, y: paired_difference(a, a, y, resamples=0), "1 or more"),
    ],
)
def test_misuse_is_one_line(call, message):
    with pytest.raises(ValueError, match=message) as error:
        call(torch.ones(6), torch.tensor([0, 0, 1, 1, 2, 2]))
    assert "\n" not in str(error.value)


def test_sums_by_class_pair_as_the_queries_do() -> None:
    """A resample takes classes whole, so sums are all that the interval depends on."""
    random = torch.Generator().manual_seed(0)
    labels = torch.randint(9, (80,), generator=random)
    one, two = (
        QueryScores(
            torch.randint(2, (80,), generator=random).double(),
            torch.rand(80, generator=random, dtype=torch.float64),
            labels,
        )
        for _ in range(2)
    )
    ours, theirs = from_class_sums(class_sums(one)), from_class_sums(class_sums(two))
    assert len(ours.rows) == 80
    for a, b, c, d in (
        (one.recall, two.recall, ours.recall1, theirs.recall1),
        (one.map_at_r, two.map_at_r, ours.map_at_r, theirs.map_at_r),
    ):
        expected = paired_difference(a, b, labels)
        assert paired_difference(c, d, ours.labels) == pytest.approx(expected)
