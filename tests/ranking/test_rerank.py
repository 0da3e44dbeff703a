"""Re-ranking: equal to a loop over vectors, blind to the query, off where it does not help."""

import pytest
import torch
from torch import Tensor

from nofuss.evaluate import map_at_r, recall_at_k
from nofuss.geometry import normalize
from nofuss.ranking.neighbours import Gallery, leave_one_out, vicinity_of
from nofuss.ranking.rerank import (
    CANDIDATES,
    Rerank,
    Weighting,
    choose_reranking,
    fitting,
    of_folds,
    rerank,
    rerank_by_each,
    rerank_folds,
    reranked_scores,
    summary,
)


def unit(items: int, dim: int = 6, seed: int = 0) -> Tensor:
    return normalize(torch.randn(items, dim, generator=torch.Generator().manual_seed(seed)))


def clumps(classes: int, each: int, *, noise: float, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(classes).repeat_interleave(each)
    centers = torch.randn(classes, 32, generator=generator)
    return centers[labels] + noise * torch.randn(len(labels), 32, generator=generator), labels


def mean_of(x: Tensor, others: Tensor, k: int, power: float) -> Tensor:
    """X and its k nearest among the others, weighted: the definition."""
    cosines = others @ x
    total = x.clone()
    for j in cosines.argsort(descending=True)[:k].tolist():
        total += max(0.0, float(cosines[j])) ** power * others[j]
    return total / total.norm()


@pytest.mark.parametrize("weighting", [Weighting(1, 0.0), Weighting(3, 3.0), Weighting(50, 1.0)])
def test_cosines_of_the_means_by_a_loop(weighting: Weighting) -> None:
    query, items = unit(1, seed=1), unit(12)
    order = (items @ query[0]).argsort(descending=True)
    around = vicinity_of(query, items[order[None]], order[None])
    k, power = min(weighting.neighbours, 11), weighting.power
    expected = []
    for i in order.tolist():
        others = torch.cat([items[:i], items[i + 1 :]])
        q = mean_of(query[0], items, min(weighting.neighbours, 12), power)
        expected.append(float(mean_of(items[i], others, k, power) @ q))
    found = rerank(around, weighting)[0].tolist()
    assert found == pytest.approx(expected, abs=1e-5)


def test_a_worked_case() -> None:
    """Two at the same distance: the one with a friend that is near the query comes first."""
    degrees = torch.tensor([0.0, 40.0, -40.0, 20.0]).deg2rad()
    x = torch.stack([degrees.cos(), degrees.sin()], 1)
    around = vicinity_of(x[:1], x[torch.tensor([[3, 1, 2]])], torch.tensor([[2, 0, 1]]))
    place = rerank(around, Weighting(1, 1.0))[0]
    assert place[1] > place[2] + 0.01


def test_missing_items_are_last_and_change_nothing() -> None:
    query, items = unit(1, seed=1), unit(5)
    rows = torch.tensor([[0, 1, 2, 3, 4]])
    whole = rerank(vicinity_of(query, items[rows], rows), Weighting(2, 1.0))
    padded = torch.tensor([[0, 1, 2, 3, 4, -1, -1]])
    found = rerank(vicinity_of(query, items[padded.clamp_min(0)], padded), Weighting(2, 1.0))
    assert torch.allclose(found[:, :5], whole, atol=1e-6)
    assert found[0, 5:].tolist() == [-torch.inf, -torch.inf]


def test_a_query_of_the_gallery_is_as_one_from_outside() -> None:
    """Left out before anything is averaged: the same scores as in a gallery without it."""
    x, labels = clumps(6, 10, noise=2.0, seed=0)
    weighting = Weighting(3, 1.0)
    (inside,) = reranked_scores(x, labels, [weighting])
    for i in range(60):
        others = torch.arange(60) != i
        (alone,) = reranked_scores(
            x[i : i + 1],
            labels[i : i + 1],
            [weighting],
            gallery=x[others],
            gallery_labels=labels[others],
        )
        assert float(alone.map_at_r[0]) == pytest.approx(float(inside.map_at_r[i]))
        assert alone.hits[0].tolist() == inside.hits[i].tolist()


def test_without_a_weighting_scores_are_the_usual_ones() -> None:
    x, labels = clumps(9, 33, noise=2.0, seed=0)
    (found,) = reranked_scores(x, labels, [None])
    assert float(found.hits[:, 0].mean()) == pytest.approx(recall_at_k(x, labels, ks=(1,))[1])
    assert float(found.map_at_r.mean()) == pytest.approx(map_at_r(x, labels))


def test_all_at_one_point_scores_nothing() -> None:
    for found in reranked_scores(
        torch.ones(40, 4), torch.arange(40) % 4, [None, Weighting(3, 1.0)]
    ):
        assert float(found.hits.sum()) == 0


def test_a_gallery_picks_from_all_cosines_what_it_would_compute() -> None:
    query, items = unit(3, seed=1), unit(40)
    near, rows = (query @ items.T).topk(12)
    rows[1, 10:] = -1
    expected = vicinity_of(query, items[rows.clamp_min(0)], rows)
    for queries in (0, 40**2):  # cosines of each vicinity, or of all items at once
        found = Gallery(items, queries).vicinity(near, rows)
        assert torch.equal(found.exists, expected.exists)
        assert torch.allclose(found.near, expected.near, atol=1e-6)
        assert torch.allclose(found.gram, expected.gram, atol=1e-6)


def test_several_weightings_at_once_give_what_each_gives_alone() -> None:
    query, items = unit(2, seed=1), unit(60)
    rows = (query @ items.T).topk(40).indices
    around = vicinity_of(query, items[rows], rows)
    for weighting, found in zip(CANDIDATES, rerank_by_each(around, CANDIDATES), strict=True):
        assert torch.allclose(found, rerank(around, weighting), atol=1e-6)
    assert rerank_by_each(around, []) == []


def test_leaving_out_a_class_leaves_the_others() -> None:
    x, labels = clumps(5, 16, noise=2.0, seed=0)
    x = normalize(x)
    rows = torch.arange(3, 80, 2)
    parts = list(leave_one_out(x, rows, labels, labels[rows], size=30))
    near, exists = (torch.cat([getattr(p, name) for p in parts]) for name in ("near", "exists"))
    for place, row in enumerate(rows.tolist()):
        others = (labels != labels[row]).nonzero()[:, 0]
        best = (x[others] @ x[row]).sort(descending=True).values[:30]
        assert near[place][exists[place]].tolist() == pytest.approx(best.tolist(), abs=1e-5)


def test_on_where_items_of_a_class_lie_together() -> None:
    folds = [clumps(8, 12, noise=1.3, seed=seed) for seed in range(4)]
    found = choose_reranking([x for x, _ in folds], [y for _, y in folds])
    assert found is not None
    assert found.on
    assert found.weighting in CANDIDATES
    assert found.gains["map@r"][1] > 0
    assert "re-ranks" in found.describe()
    assert Rerank.from_dict(found.as_dict()) == found


def test_a_fold_is_scored_by_what_the_others_prefer() -> None:
    """What is chosen on a class is not reported on it: in scores.json as in the decision."""
    folds = [clumps(8, 12, noise=1.3, seed=seed) for seed in range(4)]
    embeddings, labels = [x for x, _ in folds], [y for _, y in folds]
    decided = choose_reranking(embeddings, labels)
    assert decided is not None
    assert decided.by_fold is not None

    def average(weightings: list[Weighting]) -> float:
        return float(rerank_folds(embeddings, labels, weightings)["map@r"])

    assert average(decided.by_fold) == pytest.approx(decided.scores["with"][1], abs=1e-6)
    mixed = [CANDIDATES[0], CANDIDATES[-1], CANDIDATES[0], CANDIDATES[2]]
    found = [reranked_scores(x, y, [w])[0] for (x, y), w in zip(folds, mixed, strict=True)]
    assert average(mixed) == pytest.approx(float(of_folds(found).map_at_r.mean()), abs=1e-6)


def test_off_where_classes_are_noise() -> None:
    folds = [(unit(96, 32, seed), torch.arange(96) % 8) for seed in range(4)]
    found = choose_reranking([x for x, _ in folds], [y for _, y in folds])
    assert found is not None
    assert not found.on
    assert found.weighting is None
    assert "by distance alone" in found.describe()


def test_one_held_out_set_is_halved_by_class() -> None:
    x, labels = clumps(8, 12, noise=1.3, seed=0)
    assert choose_reranking([x], [labels]) is not None
    assert choose_reranking([x[:72]], [labels[:72]]) is None  # three in a half: too few


def test_scores_are_of_as_many_neighbours_as_search_takes() -> None:
    x, labels = clumps(8, 10, noise=1.3, seed=0)
    many, fitted = reranked_scores(x, labels, [Weighting(16, 2.0), Weighting(9, 2.0)])
    assert torch.equal(many.map_at_r, fitted.map_at_r)
    assert fitting(Weighting(16, 2.0), [10] * 8) == Weighting(9, 2.0)
    assert fitting(Weighting(16, 2.0), [1, 1, 1]) is None


def test_folds_with_the_same_numbers_have_different_classes() -> None:
    folds = [reranked_scores(*clumps(4, 5, noise=0.5, seed=s), [None])[0] for s in range(3)]
    assert len(torch.unique(of_folds(folds).labels)) == 12


def test_the_summary_states_means_and_gain() -> None:
    x, labels = clumps(8, 12, noise=1.3, seed=0)
    plain, after = reranked_scores(x, labels, (None, Weighting(8, 1.0)))
    content = summary(after, plain)
    gap = float((after.map_at_r - plain.map_at_r).mean())
    assert content["gain"]["map@r"][0] == pytest.approx(gap)
    assert content["recall@1_interval"][0] <= content["recall@1"] <= content["recall@1_interval"][1]


@pytest.mark.parametrize(
    "change",
    [
        {"neighbours": 0},
        {"neighbours": 2.5},
        {"neighbours": True},
        {"power": float("nan")},
        {"power": -1},
        {"on": 1},
        {"scores": {}},
        {"gains": {"recall@1": [0, 0, 0], "map@r": [0, 0, float("inf")]}},
        {"of_others": [[0, 1.0]]},
        {"of_others": [["8", 1.0]]},
    ],
)
def test_foreign_values_are_refused(change: dict[str, object]) -> None:
    good = Rerank(
        8,
        1.0,
        on=True,
        scores={"without": [0.1, 0.2], "with": [0.1, 0.3]},
        gains={"recall@1": [0.0, 0.0, 0.0], "map@r": [0.1, 0.0, 0.2]},
    ).as_dict()
    Rerank.from_dict(good)
    with pytest.raises(ValueError, match=next(iter(change))):
        Rerank.from_dict(good | change)
