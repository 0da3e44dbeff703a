"""Re-ranking: equal to a loop over vectors, blind to the query, off where it does not help."""

import pytest
import torch
from torch import Tensor

from nofuss.config import read_as, to_json
from nofuss.evaluate import map_at_r, recall_at_k
from nofuss.geometry import normalize
from nofuss.ranking.neighbours import vicinity_of
from nofuss.ranking.rerank import (
    NEIGHBOURS,
    STAY,
    Rerank,
    choose_reranking,
    cosines_of_means,
    fitting,
    of_folds,
    reordered,
    reranked_scores,
)


def unit(items: int, dim: int = 6, seed: int = 0) -> Tensor:
    return normalize(torch.randn(items, dim, generator=torch.Generator().manual_seed(seed)))


def clumps(classes: int, each: int, *, noise: float, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(classes).repeat_interleave(each)
    centers = torch.randn(classes, 32, generator=generator)
    return centers[labels] + noise * torch.randn(len(labels), 32, generator=generator), labels


def mean_of(x: Tensor, others: Tensor, k: int) -> Tensor:
    """X and its k nearest among the others, weighted by cosine: the definition."""
    cosines = others @ x
    total = x.clone()
    for j in cosines.argsort(descending=True)[:k].tolist():
        total += max(0.0, float(cosines[j])) * others[j]
    return total / total.norm()


@pytest.mark.parametrize("count", [1, 3, 50])
def test_cosines_of_the_means_by_a_loop(count: int) -> None:
    query, items = unit(1, seed=1), unit(12)
    order = (items @ query[0]).argsort(descending=True)
    around = vicinity_of(query, items[order[None]], order[None])
    expected = []
    for i in order.tolist():
        others = torch.cat([items[:i], items[i + 1 :]])
        q = mean_of(query[0], items, min(count, 12))
        expected.append(float(mean_of(items[i], others, min(count, 11)) @ q))
    found = cosines_of_means(around, count)[0].tolist()
    assert found == pytest.approx(expected, abs=1e-5)


def test_a_worked_case() -> None:
    """Two at the same distance: the one with a friend that is near the query comes first."""
    degrees = torch.tensor([0.0, 40.0, -40.0, 20.0]).deg2rad()
    x = torch.stack([degrees.cos(), degrees.sin()], 1)
    around = vicinity_of(x[:1], x[torch.tensor([[3, 1, 2]])], torch.tensor([[2, 0, 1]]))
    place = cosines_of_means(around, 1)[0]
    assert place[1] > place[2] + 0.01


@pytest.mark.parametrize("items", [1, 3, STAY, 30])
def test_the_nearest_stay_and_the_others_follow_their_means(items: int) -> None:
    query, x = unit(1, seed=1), unit(items)
    order = (x @ query[0]).argsort(descending=True)
    around = vicinity_of(query, x[order[None]], order[None])
    found = reordered(around, 3)[0].tolist()
    means = cosines_of_means(around, 3)[0]
    rest = sorted(range(min(STAY, items), items), key=lambda place: -float(means[place]))
    assert found == [*range(min(STAY, items)), *rest]


def test_missing_items_are_last_and_change_nothing() -> None:
    query, items = unit(1, seed=1), unit(5)
    for count in (5, 2):
        rows = torch.arange(count)[None]
        whole = cosines_of_means(vicinity_of(query, items[rows], rows), 2)
        padded = torch.cat([rows, torch.tensor([[-1, -1]])], 1)
        around = vicinity_of(query, items[padded.clamp_min(0)], padded)
        found = cosines_of_means(around, 2)
        assert torch.allclose(found[:, :count], whole, atol=1e-6)
        assert found[0, count:].tolist() == [-torch.inf, -torch.inf]
        assert reordered(around, 2)[0, count:].tolist() == [count, count + 1]


def test_a_query_of_the_gallery_is_as_one_from_outside() -> None:
    """Left out before anything is averaged: the same scores as in a gallery without it."""
    x, labels = clumps(6, 10, noise=2.0, seed=0)
    inside = reranked_scores(x, labels).after
    for i in range(60):
        others = torch.arange(60) != i
        alone = reranked_scores(x[i : i + 1], labels[i : i + 1], x[others], labels[others]).after
        assert float(alone.map_at_r[0]) == pytest.approx(float(inside.map_at_r[i]))
        assert alone.hits[0].tolist() == inside.hits[i].tolist()


def test_before_it_scores_are_the_usual_ones_and_the_first_stay() -> None:
    x, labels = clumps(9, 33, noise=2.0, seed=0)
    before, after = reranked_scores(x, labels)
    assert float(before.hits[:, 0].mean()) == pytest.approx(recall_at_k(x, labels, ks=(1,))[1])
    assert float(before.map_at_r.mean()) == pytest.approx(map_at_r(x, labels))
    assert torch.equal(before.hits[:, :3], after.hits[:, :3])  # Recall@1, @2, @4
    assert not torch.equal(before.map_at_r, after.map_at_r)


def test_all_at_one_point_scores_nothing() -> None:
    for found in reranked_scores(torch.ones(40, 4), torch.arange(40) % 4):
        assert float(found.hits.sum()) == 0


def test_on_where_items_of_a_class_lie_together() -> None:
    folds = [clumps(8, 12, noise=1.3, seed=seed) for seed in range(4)]
    found = choose_reranking([x for x, _ in folds], [y for _, y in folds])
    assert found is not None
    assert found.on
    assert found.gain[1] > 0
    assert "re-ranks" in found.describe()
    assert read_as(Rerank, to_json(found)) == found


def test_off_where_classes_are_noise() -> None:
    folds = [(unit(96, 32, seed), torch.arange(96) % 8) for seed in range(4)]
    found = choose_reranking([x for x, _ in folds], [y for _, y in folds])
    assert found is not None
    assert not found.on
    assert "by distance alone" in found.describe()


def test_one_held_out_set_is_enough_and_three_classes_are_too_few() -> None:
    x, labels = clumps(8, 12, noise=1.3, seed=0)
    assert choose_reranking([x], [labels]) is not None
    assert choose_reranking([x[:36]], [labels[:36]]) is None
    assert choose_reranking([], []) is None


def test_no_more_neighbours_than_a_typical_item_has_relatives() -> None:
    assert fitting([30] * 8) == NEIGHBOURS
    assert fitting([6] * 8) == 5
    assert fitting([1, 1, 1]) == 0
    assert fitting([]) == NEIGHBOURS
    x, labels = clumps(30, 2, noise=1.3, seed=0)
    before, after = reranked_scores(x[::2], labels[::2], x[1::2], labels[1::2])
    assert torch.equal(before.map_at_r, after.map_at_r)


def test_folds_with_the_same_numbers_have_different_classes() -> None:
    folds = [reranked_scores(*clumps(4, 5, noise=0.5, seed=s)) for s in range(3)]
    assert len(torch.unique(of_folds(folds).after.labels)) == 12


def test_few_queries_are_spread_over_all_classes() -> None:
    x, labels = clumps(8, 12, noise=1.3, seed=0)
    found = reranked_scores(x, labels, most=16)
    assert torch.bincount(found.after.labels).tolist() == [2] * 8


def test_scores_state_means_intervals_and_gain() -> None:
    x, labels = clumps(8, 12, noise=1.3, seed=0)
    found = reranked_scores(x, labels)
    content = found.as_dict()
    gap = float((found.after.map_at_r - found.before.map_at_r).mean())
    assert content["gain"]["map@r"][0] == pytest.approx(gap)
    assert content["map@r"] == pytest.approx(float(found.after.map_at_r.mean()))
    assert content["recall@1_interval"][0] <= content["recall@1"] <= content["recall@1_interval"][1]


@pytest.mark.parametrize("gain", [[0.0, 0.0], {"map@r": [0.0, 0.0, 0.0]}, None])
def test_other_gains_are_refused(gain: object) -> None:
    with pytest.raises(ValueError, match="gain"):
        read_as(Rerank, {"gain": gain})
    with pytest.raises(ValueError, match="neighbours"):
        read_as(Rerank, {"neighbours": 8})
