"""What a run keeps: decided on folds, by classes that nothing was fitted on."""

import dataclasses
import json

import pytest
import torch

from nofuss.config import TrainConfig
from nofuss.evaluate.protocol import QueryScores
from nofuss.geometry import normalize
from nofuss.run.choice import SHRINKAGES, UNTRAINED, Choice, Recipe
from nofuss.training.choice import _mean_curve, choice_of, fit_head
from nofuss.training.closed_form import ClosedForm, Pinned
from nofuss.training.fold_results import (
    CLOSED,
    NOTHING,
    TRAINED,
    FoldResult,
    held_out_embeddings,
    winner,
)
from nofuss.training.folds import class_folds
from nofuss.training.presets import resolve


def vectors(classes: int = 24, each: int = 10, noise: float = 0.5) -> tuple[torch.Tensor, ...]:
    """Half of the directions tell classes apart, the other half only vary within them."""
    g = torch.Generator().manual_seed(0)
    labels = torch.arange(classes).repeat_interleave(each)
    x = torch.randn(classes, 16, generator=g)[labels]
    x = x + noise * torch.randn(len(labels), 16, generator=g)
    x[:, 8:] = 2 * torch.randn(len(labels), 8, generator=g)
    return x, labels


def config(**options: object) -> TrainConfig:
    return resolve(TrainConfig(**options), kind="vectors", small=False)  # type: ignore[arg-type]


def result(
    *, closed: float, trained: float, untrained: float = 0.5, classes: int = 20
) -> FoldResult:
    """Shares of right queries by each method; the same queries are right first."""
    labels = torch.arange(classes).repeat_interleave(10)
    order = torch.arange(len(labels)) % 10  # so that every class has its share

    def scores(share: float) -> QueryScores:
        hits = (order < round(10 * share)).double()
        return QueryScores(hits, hits, labels)

    shares = {NOTHING: untrained, CLOSED: closed, TRAINED: trained}
    found = {name: torch.full((1, 1), share) for name, share in shares.items()}
    curve = [(0, closed, closed), (5, trained, trained)]
    return FoldResult(
        torch.arange(len(labels)), found, {n: scores(s) for n, s in shares.items()}, curve
    )


@pytest.mark.parametrize(
    ("closed", "trained", "kept"),
    [(0.7, 0.9, TRAINED), (0.7, 0.7, CLOSED), (0.9, 0.7, CLOSED), (0.3, 0.2, NOTHING)],
)
def test_what_is_kept_has_to_earn_it(closed: float, trained: float, kept: str) -> None:
    assert winner([result(closed=closed, trained=trained)]) == kept


def test_a_class_is_scored_by_what_the_other_folds_keep() -> None:
    liars = [result(closed=0.6, trained=0.9), result(closed=0.6, trained=0.9)]
    odd = result(closed=0.9, trained=0.4)
    found = held_out_embeddings([*liars, odd])
    assert float(found[2]) == pytest.approx(0.4)  # trained, by the others; it would not say so


def test_the_recipe_that_fits_is_found() -> None:
    x, labels = vectors()
    form = ClosedForm(x, labels, class_folds(labels), dim=16)
    form.compare(Pinned())
    assert form.best().shrinkage < 0.5
    assert not form.best().root
    pinned = ClosedForm(x, labels, class_folds(labels), dim=16)
    pinned.compare(Pinned(root=True, center=False, shrinkage=0.95))
    assert pinned.best() == Recipe(root=True, center=False, shrinkage=0.95)


def test_of_equal_recipes_the_strongest_candidate_wins() -> None:
    x, labels = vectors(noise=0.0)
    x = torch.cat([x[:, :8], x[:, :8]], 1)  # classes are points: every shrinkage finds all
    form = ClosedForm(x, labels, class_folds(labels), dim=16)
    form.compare(Pinned(root=False, center=True))
    assert len({tuple(scores) for scores in form._scores.values()}) == 1
    assert form.best().shrinkage == SHRINKAGES[0]
    weaker = [r for s in (0.03, 0.5, 0.3) for r in form._scores if r.shrinkage == s]
    assert form.best(among=weaker).shrinkage == 0.5


def test_a_closed_form_of_folds_does_not_know_the_held_out_classes() -> None:
    x, labels = vectors()
    form = ClosedForm(x, labels, class_folds(labels), dim=8)
    fold = form.folds[1]
    other = x.clone()
    other[fold.held_out] = 100.0
    again = ClosedForm(other, labels, class_folds(labels), dim=8)
    for recipe in (Recipe(), UNTRAINED):
        assert torch.equal(form.fit(recipe, without=1).weight, again.fit(recipe, without=1).weight)
        assert not torch.equal(form.fit(recipe).weight, again.fit(recipe).weight)


def test_outputs_have_length_one_whatever_the_scale() -> None:
    x, labels = vectors()
    heads = [ClosedForm(k * x, labels, [], dim=8).fit(Recipe(root=False)) for k in (1.0, 1000.0)]
    for head, k in zip(heads, (1.0, 1000.0), strict=True):
        assert float(head(k * x).norm(dim=1).mean()) == pytest.approx(1, abs=1e-4)
    torch.testing.assert_close(heads[0](x), heads[1](1000 * x), rtol=0, atol=1e-4)


def test_fit_head_beats_the_input_on_unseen_classes() -> None:
    x, labels = vectors(48)
    seen = labels < 24
    choice, head = fit_head(config(), x[seen], labels[seen])
    assert choice.kept in (CLOSED, TRAINED)
    assert choice.folds == 4

    def right(e: torch.Tensor) -> float:
        y, e = labels[~seen], normalize(e)
        return float((y[(e @ e.T).fill_diagonal_(-2).argmax(1)] == y).double().mean())

    assert right(head(x[~seen])) > right(x[~seen]) + 0.1


def test_too_few_classes_for_folds_are_not_trained_on() -> None:
    x, labels = vectors(3)
    choice, head = fit_head(config(), x, labels)
    assert (choice.kept, choice.folds, choice.recipe) == (CLOSED, 0, Recipe())
    assert fit_head(config(folds=0, epochs=2), x, labels)[0].kept == TRAINED
    assert head.weight.shape == (16, 16)


def test_a_choice_survives_json() -> None:
    x, labels = vectors()
    form = ClosedForm(x, labels, class_folds(labels), dim=8)
    form.compare(Pinned())
    results = [result(closed=0.6, trained=0.9), result(closed=0.5, trained=0.8)]
    choice = choice_of(form, results, Pinned(), config=config())
    again = Choice.from_dict(json.loads(json.dumps(choice.as_dict())))
    assert again == choice
    assert again.describe() == choice.describe()
    assert "since training changes" in choice.reason()
    with pytest.raises((KeyError, TypeError)):
        Choice.from_dict({"kept": "x"})


def test_fewer_dimensions_where_folds_prefer_them() -> None:
    """Classes in eight directions among a hundred of noise: the default need not keep them all."""
    g = torch.Generator().manual_seed(0)
    labels = torch.arange(40).repeat_interleave(12)
    signal = 2 * torch.randn(40, 8, generator=g)[labels]
    x = torch.cat([signal, torch.zeros(len(labels), 112)], 1)
    x = x + torch.randn(len(labels), 120, generator=g)
    choice, head = fit_head(config(epochs=0), x, labels)
    assert choice.dim == len(head.weight) == 64
    assert fit_head(config(epochs=0, dim=100), x, labels)[0].dim == 100


def test_curves_of_folds_with_other_numbers_of_epochs_are_averaged() -> None:
    """Few epochs: the larger a fold's rest, the fewer."""
    short = result(closed=0.5, trained=0.7)
    curve = [(0, 0.5, 0.5), (1, 0.6, 0.6), (2, 0.7, 0.7)]
    longer = dataclasses.replace(short, curve=curve)
    (first, *_), last = (mean := _mean_curve([short, longer])), mean[-1]
    assert first == (0, pytest.approx(0.5), pytest.approx(0.5))
    assert last[1:] == (pytest.approx(0.7), pytest.approx(0.7))
