"""Scores of float32 embeddings are those of exact arithmetic: what float32 alone got wrong."""

from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pytorch_metric_learning.utils.accuracy_calculator import AccuracyCalculator
from pytorch_metric_learning.utils.inference import FaissKNN
from torch import Tensor

from nofuss.evaluate import (
    map_at_r,
    mean_average_precision,
    mean_reciprocal_rank,
    precision_at_k,
    r_precision,
    ranks_of_first_positive,
    recall_at_k,
)
from nofuss.evaluate.precision import precisions


def float64_ranks(x: Tensor, labels: Tensor, *, normalize: bool = True) -> list[Tensor]:
    """The ranks of all positives of each query, from differences in float64; no ties expected."""
    x = x.double()
    x = x / x.norm(dim=1, keepdim=True) if normalize else x
    ranks = []
    for i in range(len(x)):
        squared = (x - x[i]).square().sum(1)
        is_right = (labels == labels[i]).index_fill(0, torch.tensor(i), False)
        wrong = squared[labels != labels[i]].sort().values
        right = squared[is_right].sort().values
        closer = torch.searchsorted(wrong, right, right=True)
        ranks.append(closer + torch.arange(1, len(right) + 1))
    return ranks


def assert_equal_ranks(x: Tensor, labels: Tensor, *, normalize: bool = True) -> float:
    """Compare every score of every query with the float64 loop; Recall@1."""
    expected = [r for r in float64_ranks(x, labels, normalize=normalize) if len(r)]
    first = ranks_of_first_positive(x, labels, normalize=normalize)
    assert first[first > 0].tolist() == [int(r[0]) for r in expected]
    found = precisions(x, labels, ks=(5,), all_ranks=True, normalize=normalize)
    share = [torch.arange(1, len(r) + 1) / r.double() for r in expected]
    at_r = [(s * (r <= len(r))).mean() for s, r in zip(share, expected, strict=True)]
    by_name = {
        "map_at_r": torch.stack(at_r),
        "r_precision": torch.stack([(r <= len(r)).double().mean() for r in expected]),
        "average": torch.stack([s.mean() for s in share]),
    }
    for name, values in by_name.items():
        scores = getattr(found, name)
        torch.testing.assert_close(scores[~scores.isnan()], values, rtol=0, atol=1e-12)
    at_5 = torch.stack([(r <= 5).double().sum() / 5 for r in expected])
    scores = found.precision[5]
    torch.testing.assert_close(scores[~scores.isnan()], at_5, rtol=0, atol=1e-12)
    # Up to R the shortcut counts the same.
    capped = precisions(x, labels, normalize=normalize).map_at_r
    torch.testing.assert_close(capped, found.map_at_r, rtol=0, atol=0, equal_nan=True)
    return float((first[first > 0] == 1).double().mean())


def random_points(items: int, dim: int, classes: int, *, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(items, dim, generator=generator)
    return x, torch.randint(classes, (items,), generator=generator)


@pytest.mark.parametrize("normalize", [True, False])
def test_random_points_on_a_circle(normalize):
    # Neighbours are 1e-2 apart and less: their cosines agree to more digits than float32 has.
    x, labels = random_points(800, 2, 20)
    assert_equal_ranks(x, labels, normalize=normalize)


@pytest.mark.parametrize("offset", [0.0, 20.0])
def test_tight_clusters_of_several_classes(offset):
    # Clusters of radius 3e-4 on the unit sphere in 64 dimensions hold 20 classes of 3 each.
    generator = torch.Generator().manual_seed(1)
    centers = torch.randn(10, 64, generator=generator) + offset
    centers = (centers / centers.norm(dim=1, keepdim=True)).repeat_interleave(20, 0)
    classes = centers + 3e-4 / 8 * torch.randn(200, 64, generator=generator)
    x = classes.repeat(3, 1) + 3e-5 / 8 * torch.randn(600, 64, generator=generator)
    assert assert_equal_ranks(x, torch.arange(200).repeat(3)) == 1.0


@pytest.mark.parametrize("scale", [1e30, 1e-30, 1e-40, 1.0])
@pytest.mark.parametrize("normalize", [True, False])
def test_lengths_far_from_one(scale, normalize):
    x, labels = random_points(400, 16, 40)
    assert_equal_ranks(x * scale, labels, normalize=normalize)


@pytest.mark.parametrize(("normalize", "decades"), [(True, 60), (False, 12)])
def test_lengths_over_many_decades(normalize, decades):
    # As given, more decades than float64 has digits would make ties of what differs.
    x, labels = random_points(400, 16, 40)
    spread = torch.rand(400, 1, generator=torch.Generator().manual_seed(2)) - 0.5
    assert_equal_ranks(x * 10 ** (decades * spread), labels, normalize=normalize)


@pytest.mark.parametrize(("dim", "classes"), [(1, 5), (3, 2), (512, 60), (2000, 60)])
def test_other_widths(dim, classes):
    x, labels = random_points(300, dim, classes)
    assert_equal_ranks(x, labels, normalize=dim > 1)


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 10_000), st.integers(2, 40), st.integers(1, 4), st.booleans())
def test_ties_are_what_is_equal_in_exact_arithmetic(seed, items, dim, half):
    # Points of a small grid, many at the same place or distance, at a scale that is no power of 2.
    generator = torch.Generator().manual_seed(seed)
    grid = torch.randint(-3, 4, (items, dim), generator=generator)
    labels = torch.randint(3, (items,), generator=generator)
    labels[:2] = 0
    scale = 0.5 if half else 3.0
    expected = []
    for i in range(items):
        d = [
            sum((Fraction(int(a)) - int(b)) ** 2 for a, b in zip(grid[i], y, strict=True))
            for y in grid
        ]
        right = [d[j] for j in range(items) if labels[j] == labels[i] and j != i]
        wrong = [d[j] for j in range(items) if labels[j] != labels[i]]
        expected.append(1 + sum(w <= min(right) for w in wrong) if right else 0)
    found = ranks_of_first_positive(grid * scale, labels, normalize=False)
    assert found.tolist() == expected


def test_multiples_of_one_direction_tie_on_the_sphere():
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(50, 7, generator=generator)
    # Each direction four times, at lengths 1, 3, 0.1 and 7: twice in each of two classes.
    lengths = torch.tensor([1.0, 3.0, 5.0, 7.0]).repeat_interleave(50)[:, None]
    exact = x.mul(2**12).round().repeat(4, 1) * lengths  # whole numbers: multiples without rounding
    labels = torch.cat([torch.arange(50).repeat(2), torch.arange(50, 100).repeat(2)])
    assert ranks_of_first_positive(exact, labels).tolist() == [3] * 200
    assert map_at_r(exact, labels) == 0.0


@pytest.mark.parametrize("among_all", [True, False])
@pytest.mark.parametrize("classes", [2, 11, 103])
def test_all_ranks_as_pytorch_metric_learning_tests_its_own(among_all, classes):
    """Random features in 5 dimensions as given, k as large as it can be, and a plain loop."""
    random = np.random.default_rng(493)
    x = torch.from_numpy(random.random((1000, 5), dtype=np.float32))
    labels = torch.from_numpy(random.integers(classes, size=1000))
    names = ("precision_at_1", "mean_average_precision", "mean_average_precision_at_r")
    peer = AccuracyCalculator(
        include=names, device=torch.device("cpu"), knn_func=FaissKNN(), k=999 if among_all else 1000
    )
    if among_all:
        scores, options = peer.get_accuracy(x, labels), {"normalize": False}
    else:  # the gallery is a copy: each query finds itself first
        scores = peer.get_accuracy(x, labels, x, labels, ref_includes_query=False)
        options = {"normalize": False, "gallery": x, "gallery_labels": labels}
    assert recall_at_k(x, labels, (1,), **options)[1] == pytest.approx(scores[names[0]], abs=1e-5)
    assert mean_average_precision(x, labels, **options) == pytest.approx(scores[names[1]], abs=1e-5)
    assert map_at_r(x, labels, **options) == pytest.approx(scores[names[2]], abs=1e-5)


@pytest.mark.parametrize("normalize", [True, False])
def test_a_gallery_that_holds_the_queries(normalize):
    x, labels = random_points(300, 8, 30)
    rows = torch.randperm(300, generator=torch.Generator().manual_seed(4))[:120]
    options = {"gallery": x, "gallery_labels": labels, "query_rows": rows, "normalize": normalize}
    expected = ranks_of_first_positive(x, labels, normalize=normalize)[rows]
    assert torch.equal(ranks_of_first_positive(x[rows], labels[rows], **options), expected)
    alone = precisions(x, labels, all_ranks=True, normalize=normalize)
    found = precisions(x[rows], labels[rows], all_ranks=True, **options)
    for name in ("map_at_r", "r_precision", "average"):
        torch.testing.assert_close(getattr(found, name), getattr(alone, name)[rows], equal_nan=True)
    # A query of which the gallery has no copy searches all of it.
    some = torch.where(torch.arange(120) < 60, rows, -1)
    partly = ranks_of_first_positive(x[rows], labels[rows], **(options | {"query_rows": some}))
    assert torch.equal(partly[:60], expected[:60])
    assert partly[60:].tolist() == [1] * 60


def test_means_over_classes_and_reciprocal_ranks_by_hand():
    # On a line: a a b a b. Without ties.
    x, labels = torch.tensor([[0.0], [1.0], [2.1], [3.3], [4.6]]), torch.tensor([0, 0, 1, 0, 1])
    options = {"normalize": False}
    assert ranks_of_first_positive(x, labels, **options).tolist() == [1, 1, 4, 3, 2]
    assert mean_reciprocal_rank(x, labels, **options) == pytest.approx(
        (2 + 1 / 4 + 1 / 3 + 1 / 2) / 5
    )
    by_class = mean_reciprocal_rank(x, labels, average="classes", **options)
    assert by_class == pytest.approx(((2 + 1 / 3) / 3 + 0.75 / 2) / 2)
    assert recall_at_k(x, labels, (2,), average="classes", **options) == {
        2: pytest.approx((2 / 3 + 1 / 2) / 2)
    }
    # Among the two nearest: (a, b), (a, b), (a, a), (b, b), (a, b).
    assert precision_at_k(x, labels, (2,), **options) == {2: pytest.approx(1.5 / 5)}
    by_class = precision_at_k(x, labels, (2,), average="classes", **options)
    assert by_class == {2: pytest.approx((1 / 3 + 0.5 / 2) / 2)}


def test_means_over_classes_equal_pytorch_metric_learning(scene):
    x, labels = scene(900, 60, 16)
    x = x / x.norm(dim=1, keepdim=True)
    names = ("precision_at_1", "mean_average_precision_at_r", "r_precision", "mean_reciprocal_rank")
    peer = AccuracyCalculator(
        include=names, device=torch.device("cpu"), avg_of_avgs=True, k=899
    ).get_accuracy(x, labels)
    assert recall_at_k(x, labels, (1,), average="classes")[1] == pytest.approx(peer[names[0]])
    assert map_at_r(x, labels, average="classes") == pytest.approx(peer[names[1]])
    assert r_precision(x, labels, average="classes") == pytest.approx(peer[names[2]])
    assert mean_reciprocal_rank(x, labels, average="classes") == pytest.approx(peer[names[3]])


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (torch.arange(5), "one a query"),
        (torch.zeros(20), "whole numbers"),
        (torch.full((20,), 20), "0 to 19"),
        (torch.arange(20).roll(1), "labels differ"),
    ],
)
def test_wrong_rows_of_queries_are_one_line(rows, message):
    x, labels = random_points(20, 4, 6)
    with pytest.raises(ValueError, match=message) as error:
        recall_at_k(x, labels, gallery=x, gallery_labels=labels, query_rows=rows)
    assert "\n" not in str(error.value)


def test_nan_is_refused():
    x, labels = random_points(20, 4, 3)
    x[3, 2] = torch.nan
    for score in (recall_at_k, map_at_r, r_precision, mean_average_precision, precision_at_k):
        with pytest.raises(ValueError, match="1 of 20 embeddings"):
            score(x, labels)
        with pytest.raises(ValueError, match="1 of 20 gallery"):
            score(torch.ones(20, 4), labels, gallery=x, gallery_labels=labels)


def test_scores_do_not_depend_on_the_number_of_threads():
    x, labels = random_points(3000, 8, 100)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        with torch.inference_mode():
            shared = [ranks_of_first_positive(x, labels), precisions(x, labels).map_at_r]
        assert torch.get_num_threads() == 3
        with ThreadPoolExecutor(1) as pool:  # a thread that starts afterwards has as many, too
            assert pool.submit(torch.get_num_threads).result() == 3
        torch.set_num_threads(1)
        alone = [ranks_of_first_positive(x, labels), precisions(x, labels).map_at_r]
    finally:
        torch.set_num_threads(before)
    for ours, expected in zip(shared, alone, strict=True):
        torch.testing.assert_close(ours, expected, rtol=0, atol=0, equal_nan=True)
