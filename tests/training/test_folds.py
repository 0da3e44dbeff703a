"""Folds hold out whole classes, neighbours together, and score what was not seen."""

import pytest
import torch
from torch import Tensor

from nofuss.evaluate import per_query
from nofuss.evaluate.protocol import pooled
from nofuss.model.whitening import ClassSums, Recipe, closed_form
from nofuss.training.folds import (
    EMPHASES,
    SAMPLE,
    SHRINKAGES,
    Recipes,
    class_folds,
    query_scores,
    sample_rows,
)


def test_folds_hold_out_every_class_once_and_neighbours_together() -> None:
    labels = torch.arange(10).repeat(3)
    folds = class_folds(labels, 4)
    held_out = [sorted(set(labels[fold.held_out].tolist())) for fold in folds]
    assert held_out == [[0, 1, 2], [3, 4, 5], [6, 7], [8, 9]]
    for fold in folds:
        assert torch.equal(torch.cat([fold.held_out, fold.others]).sort().values, torch.arange(30))
        assert not set(labels[fold.held_out].tolist()) & set(labels[fold.others].tolist())


@pytest.mark.parametrize(("classes", "expected"), [(2, 0), (3, 0), (4, 2), (5, 2), (6, 3), (9, 4)])
def test_few_classes_make_fewer_folds_or_none(classes: int, expected: int) -> None:
    assert len(class_folds(torch.arange(classes).repeat(2), 4)) == expected


def test_classes_of_one_item_make_no_folds() -> None:
    assert class_folds(torch.arange(40), 4) == []


@pytest.mark.parametrize("flip", [False, True])
def test_classes_numbered_by_frequency_are_folded_all_the_same(flip: bool) -> None:
    sizes = torch.cat([torch.full((10,), 4), torch.ones(30, dtype=torch.long)])
    labels = torch.arange(40).repeat_interleave(sizes.flip(0) if flip else sizes)
    folds = class_folds(labels, 4)
    several = torch.bincount(labels) > 1
    found = [int(several[labels[fold.held_out].unique()].sum()) for fold in folds]
    assert sorted(found) == [2, 2, 3, 3]
    assert sum(len(fold.held_out) for fold in folds) == len(labels)
    rows = sample_rows(labels, torch.arange(len(labels)), 20)
    assert several[labels[rows]].all(), "those that can be searched for come first"
    assert len(query_scores(torch.randn(len(rows), 3), labels[rows]).recall) == len(rows)


def test_a_sample_keeps_classes_whole_as_far_as_it_can() -> None:
    labels = torch.arange(10).repeat_interleave(30)
    rows = torch.arange(300)
    some = sample_rows(labels, rows, 50)
    assert torch.equal(torch.bincount(labels[some]), torch.full((10,), 5))
    many = sample_rows(torch.arange(1000).repeat_interleave(2), torch.arange(2000), 100)
    assert len(many) == 100
    assert torch.equal(sample_rows(labels, rows, 300), rows)


def test_scores_are_of_each_query() -> None:
    x = torch.tensor([[1.0, 0], [0.99, 0.1], [0, 1], [0.1, 0.99], [-1, 0]])
    labels = torch.tensor([0, 0, 1, 1, 2])  # the last one is alone: no query
    found = query_scores(x, labels)
    assert found.recall.tolist() == [1, 1, 1, 1]
    assert found.labels.tolist() == [0, 0, 1, 1]
    both = pooled([found, found])
    assert len(both.objective) == 8
    assert both.objective.tolist() == [1] * 8


def test_a_sample_is_filled_up_with_classes_of_one_item() -> None:
    """They are what the others can be confused with."""
    labels = torch.cat([torch.zeros(3, dtype=torch.long), torch.arange(1, 900)])
    rows = sample_rows(labels, torch.arange(len(labels)), 800)
    assert len(rows) > 390
    assert int((labels[rows] == 0).sum()) == 2


def test_scores_are_those_of_the_evaluation() -> None:
    """Where nothing is close to a tie; blocks of queries are walked over."""
    g = torch.Generator().manual_seed(0)
    labels = torch.arange(300).repeat_interleave(4)[:-1]  # 1,199: two blocks
    x = torch.randn(300, 6, generator=g)[labels] + 0.6 * torch.randn(1199, 6, generator=g)
    found, expected = query_scores(x, labels), per_query(x, labels)
    torch.testing.assert_close(found.recall, torch.as_tensor(expected.recall1).double())
    torch.testing.assert_close(found.map_at_r, torch.as_tensor(expected.map_at_r).double())
    assert 0.1 < float(found.recall.mean()) < 0.95


# The recipe of the closed form


def vectors(noise: float = 0.5) -> tuple[Tensor, Tensor]:
    """Half of the directions separate 24 classes, the other half only vary within them."""
    g = torch.Generator().manual_seed(0)
    labels = torch.arange(24).repeat_interleave(10)
    x = torch.randn(24, 16, generator=g)[labels] + noise * torch.randn(240, 16, generator=g)
    x[:, 8:] = 2 * torch.randn(240, 8, generator=g)
    return x, labels


def recipes_of(x: Tensor, labels: Tensor, dim: int | None = None) -> Recipes:
    return Recipes(x, labels, class_folds(labels), False, dim)


def test_the_recipe_that_fits_is_found() -> None:
    recipe, dim = recipes_of(*vectors()).best()
    assert recipe.shrinkage < 0.3
    assert not recipe.root
    assert dim == 16


def test_scores_do_not_depend_on_the_number_of_threads() -> None:
    x, labels = (
        torch.randn(96, 12, generator=torch.Generator().manual_seed(0)),
        torch.arange(96) // 4,
    )
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            recipes = recipes_of(x, labels)
            bests = recipes.best(), recipes.best(without=1)
            found.append((bests, {each: torch.cat(s) for each, s in recipes._scores.items()}))
    finally:
        torch.set_num_threads(before)
    (first, scores), (second, others) = found
    assert first == second
    torch.testing.assert_close(scores, others, rtol=0, atol=0)


def test_of_equal_recipes_the_first_wins() -> None:
    x, labels = vectors(noise=0.0)
    x = torch.cat([x[:, :8], x[:, :8]], 1)  # classes are points: every shrinkage finds all
    recipes = recipes_of(x + 1e-6 * torch.randn(240, 16), labels)
    assert recipes.best() == (Recipe(False, SHRINKAGES[0], EMPHASES[0]), 16)


def test_without_folds_the_safer_recipe_is_taken() -> None:
    x, labels = vectors()
    recipes = Recipes(x, labels, [], True, 8)
    assert recipes.best() == (Recipe(root=True), 8)
    whole = ClassSums.of(x, labels)
    assert torch.equal(recipes.sums().within, whole.within)


def test_another_recipe_has_to_be_better_by_a_standard_error() -> None:
    """Gains of four classes with mean 1: once they agree, once they don't."""
    first, other = (Recipe(False, 0.3), 16), (Recipe(False, 0.6), 16)
    start = torch.zeros(2)
    for gains, kept in (
        ([[1.0, 1.1], [0.9, 1.0]], other),
        ([[9.0, -3.0], [-4.0, 2.0]], first),
        ([[-1.0, -1.1], [-0.9, -1.0]], first),
    ):
        recipes = recipes_of(*vectors())
        recipes._scores[first] = [start, start]
        recipes._scores[other] = [torch.tensor(gain) for gain in gains]
        assert recipes._first_or_better([first, other], None) == kept


def test_a_fold_s_recipe_is_that_of_the_other_folds() -> None:
    first, other = (Recipe(False, 0.3), 16), (Recipe(False, 0.6), 16)
    recipes = recipes_of(*vectors())
    recipes._scores[first] = [torch.zeros(3)] * 3
    gains = (torch.tensor([0.3, 0.31, 0.29]), -torch.ones(3), -torch.ones(3))
    recipes._scores[other] = [-gain for gain in gains]
    assert recipes._first_or_better([first, other], 0) == other
    recipes._scores[other] = [*gains]
    assert recipes._first_or_better([first, other], 0) == first
    recipes._scores[other] = [*gains[1:], -50 * gains[1]]
    assert recipes._first_or_better([first, other], 2) == first


def test_the_closed_form_of_a_fold_does_not_know_its_classes() -> None:
    x, labels = vectors()
    fold = class_folds(labels)[1]
    other = x.clone()
    other[fold.held_out] = 100.0
    first, again = recipes_of(x, labels), recipes_of(other, labels)
    matrices = [closed_form(each.sums(without=1), Recipe(), 8) for each in (first, again)]
    assert torch.equal(*matrices)
    assert torch.equal(first.sums(without=1).mean, again.sums(without=1).mean)
    assert not torch.equal(first.sums().within, again.sums().within)
    direct = ClassSums.of(x[fold.others], labels[fold.others])
    torch.testing.assert_close(first.sums(without=1).within, direct.within, rtol=1e-5, atol=1e-3)


def test_a_fold_s_choice_does_not_know_its_classes() -> None:
    """What is held out may be anything: the other folds, scored as before, choose the same.

    Their closed forms do know it, so only its scores can be taken away, not its items.
    """
    recipes = recipes_of(*vectors())
    chosen = [recipes.best(without=k) for k in range(4)]
    whole = recipes._scores
    for k in range(4):
        g = torch.Generator().manual_seed(k)
        recipes._scores = {
            each: [torch.rand(len(s), generator=g) if i == k else s for i, s in enumerate(scores)]
            for each, scores in whole.items()
        }
        assert recipes.best(without=k) == chosen[k]


def test_scores_are_of_held_out_classes_by_the_rest() -> None:
    """A slow loop: fit on the others, search the held-out items among themselves."""
    x, labels = vectors()
    recipes = recipes_of(x, labels, dim=5)
    recipes.best()
    recipe, dim = next(iter(recipes._scores))
    assert dim == 5
    for fold, found in zip(class_folds(labels), recipes._scores[recipe, dim], strict=True):
        sums = ClassSums.of(x[fold.others], labels[fold.others])
        z = (x[fold.held_out] - sums.mean) @ closed_form(sums, recipe, dim)
        own = labels[fold.held_out]
        scores = per_query(z, own)
        objective = torch.as_tensor((scores.recall1 + scores.map_at_r) / 2).double()
        expected = torch.stack([objective[own == c].mean() for c in own.unique()])
        torch.testing.assert_close(found, expected, rtol=0, atol=0.02)


@pytest.mark.parametrize(
    ("width", "dims"), [(16, (16,)), (120, (120, 64)), (300, (300, 256, 128, 64))]
)
def test_dimensions_that_folds_may_prefer(width: int, dims: tuple[int, ...]) -> None:
    x, labels = torch.randn(20, width), torch.arange(20) % 5
    assert Recipes(x, labels, [], False, None).dims == dims
    assert Recipes(x, labels, [], False, 7).dims == (7,)


def test_large_folds_are_scored_on_a_sample() -> None:
    g = torch.Generator().manual_seed(0)
    labels = torch.arange(8).repeat_interleave(SAMPLE)
    x = torch.randn(len(labels), 3, generator=g)
    recipes = recipes_of(x, labels)
    recipes.best()
    assert all(len(part) == 2 for found in recipes._scores.values() for part in found)
