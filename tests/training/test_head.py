"""The head on fixed features: what is kept, on whose word, and how it is trained."""

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from nofuss.config import Settings, read_as, to_json
from nofuss.evaluate.intervals import paired_difference
from nofuss.evaluate.protocol import QueryScores, gains_over
from nofuss.geometry import normalize
from nofuss.model.whitening import Affine, Recipe, pca, signed_root
from nofuss.run.choice import CLOSED, NOTHING, TRAINED, UNTRAINED, Choice
from nofuss.training.callbacks import Control
from nofuss.training.criterion import build_criterion, place_proxies
from nofuss.training.folds import class_folds
from nofuss.training.head import (
    EPOCHS,
    MOST_EPOCHS,
    MOVE,
    PROXY_FACTOR,
    FoldOutcome,
    HeadFit,
    better,
    fit_head,
    head_schedule,
    train_turn,
)
from tests.asked import settings_of


def vectors(classes: int = 24, each: int = 10, noise: float = 0.5) -> tuple[Tensor, Tensor]:
    """Half of the directions separate classes, the other half only vary within them."""
    g = torch.Generator().manual_seed(0)
    labels = torch.arange(classes).repeat_interleave(each)
    x = torch.randn(classes, 16, generator=g)[labels]
    x = x + noise * torch.randn(len(labels), 16, generator=g)
    x[:, 8:] = 2 * torch.randn(len(labels), 8, generator=g)
    return x, labels


def settings(**options: Any) -> Settings:
    return settings_of(**options)


def right(e: Tensor, labels: Tensor) -> float:
    """Return Recall@1."""
    e = normalize(e)
    found = labels[(e @ e.T).fill_diagonal_(-2).argmax(1)]
    return float((found == labels).double().mean())


# What the folds keep


def outcome(recall: dict[str, float], map_at_r: dict[str, float] | None = None) -> FoldOutcome:
    """Return a fold of twenty classes, with fractions of right queries by each method."""
    labels = torch.arange(20).repeat_interleave(10)
    order = torch.arange(len(labels)) % 10  # every class has the same fraction

    def hits(fraction: float) -> Tensor:
        return (order < round(10 * fraction)).double()

    precision = map_at_r or recall
    scores = {
        name: QueryScores(hits(fraction), hits(precision[name]), labels)
        for name, fraction in recall.items()
    }
    embeddings = {name: torch.full((1, 1), fraction) for name, fraction in recall.items()}
    return FoldOutcome(torch.arange(len(labels)), embeddings, scores)


@pytest.mark.parametrize(
    ("recall", "map_at_r", "kept"),
    [
        (0.9, 0.9, CLOSED),
        (0.5, 0.5, CLOSED),
        (0.3, 0.3, NOTHING),
        (0.3, 0.9, NOTHING),
        (0.9, 0.3, NOTHING),
        (0.5, 0.3, NOTHING),
        (0.3, 0.5, NOTHING),
    ],
)
def test_the_closed_form_is_kept_unless_a_score_is_significantly_worse(
    recall: float, map_at_r: float, kept: str
) -> None:
    found = outcome({NOTHING: 0.5, CLOSED: recall}, {NOTHING: 0.5, CLOSED: map_at_r})
    assert better([found]) == kept
    assert better([found, found]) == kept


def test_noise_is_not_significant() -> None:
    """One class of twenty loses everything, which chance can do; ten of them can't."""
    start = outcome({NOTHING: 0.5, CLOSED: 0.5})

    def losing(classes: int) -> FoldOutcome:
        closed = start.scores[CLOSED]
        hits = torch.where(closed.labels < classes, 0.0, closed.recall)
        return replace(
            start, scores=start.scores | {CLOSED: QueryScores(hits, hits, closed.labels)}
        )

    assert better([losing(1)]) == CLOSED
    assert better([losing(10)]) == NOTHING


def test_gains_are_paired_differences_over_classes() -> None:
    scores = outcome({NOTHING: 0.5, CLOSED: 0.8}, {NOTHING: 0.4, CLOSED: 0.3}).scores
    a, b = scores[CLOSED], scores[NOTHING]
    gains = gains_over(a, b)
    assert [round(gain.mean, 6) for gain in gains.values()] == [0.3, -0.1]
    assert gains["map@r"] == paired_difference(a.map_at_r, b.map_at_r, a.labels)


def test_a_class_is_scored_by_what_the_other_folds_keep() -> None:
    good, bad = outcome({NOTHING: 0.5, CLOSED: 0.9}), outcome({NOTHING: 0.6, CLOSED: 0.1})
    affine, criterion = Affine(torch.eye(1), torch.zeros(1)), torch.nn.Identity()
    choice = Choice(CLOSED, Recipe(), 1)
    fit = HeadFit(affine, choice, criterion, outcomes=(good, good, bad))
    assert (better([bad]), better([good, good])) == (NOTHING, CLOSED)
    assert [float(e) for e in fit.held_out()] == pytest.approx([0.5, 0.5, 0.1])
    pinned = replace(fit, pinned=CLOSED)
    assert [float(e) for e in pinned.held_out()] == pytest.approx([0.9, 0.9, 0.1])


# Fitted to vectors


def test_the_head_beats_the_input_on_unseen_classes() -> None:
    x, labels = vectors(48)
    seen = labels < 24
    fit = fit_head(x[seen], labels[seen], settings())
    assert (fit.choice.kept, fit.choice.folds, fit.choice.classes) == (CLOSED, 4, 24)
    assert fit.choice.items == 240
    assert right(fit.embed(x[~seen]), labels[~seen]) > right(x[~seen], labels[~seen]) + 0.1
    gain = fit.choice.gains[f"{CLOSED} over {NOTHING}"]["recall@1"]
    assert gain[1] > 0


def test_features_that_are_best_as_they_are_are_kept() -> None:
    """Means that differ in their lengths' direction alone: centring takes that away."""
    g = torch.Generator().manual_seed(0)
    labels = torch.arange(40).repeat_interleave(8)
    angle = torch.linspace(0, 1.5, 40)[labels] + 0.002 * torch.randn(320, generator=g)
    length = 1 + 9 * torch.rand(320, generator=g)
    x = torch.stack([length * angle.cos(), length * angle.sin()], 1)
    x = torch.cat([x, -x], 1)  # so that no roots are taken
    fit = fit_head(x, labels, settings())
    assert fit.choice.kept == NOTHING
    assert (fit.choice.recipe, fit.choice.dim) == (UNTRAINED, 4)
    torch.testing.assert_close(fit.embed(x), normalize(x), rtol=0, atol=1e-5)
    for held_out, found in zip(fit.held_out(), class_folds(labels), strict=True):
        torch.testing.assert_close(held_out, normalize(x[found.held_out]), rtol=0, atol=1e-5)


@pytest.mark.parametrize("root", [False, True])
def test_outputs_have_length_one_on_average(root: bool) -> None:
    x, labels = vectors()
    x = x.abs() if root else x
    fit = fit_head(x, labels, settings(head="closed-form"))
    assert fit.choice.recipe.root == root
    z = fit.head(signed_root(x) if root else x)
    assert float(z.norm(dim=1).mean()) == pytest.approx(1, abs=1e-4)
    torch.testing.assert_close(fit.embed(x), normalize(z))


def test_the_scale_of_the_features_does_not_matter() -> None:
    x, labels = vectors()
    small, large = (fit_head(k * x, labels, settings()).embed(k * x) for k in (1.0, 1000.0))
    torch.testing.assert_close(small, large, rtol=0, atol=1e-3)


@pytest.mark.parametrize(
    ("head", "kept"), [("untrained", NOTHING), ("closed-form", CLOSED), ("trained", TRAINED)]
)
def test_a_head_that_is_asked_for_is_kept(head: str, kept: str) -> None:
    x, labels = vectors()
    options = {"epochs": 2} if head == "trained" else {}
    fit = fit_head(x, labels, settings(head=head, **options))
    assert fit.choice.kept == fit.pinned == kept
    assert fit.choice.folds == 4, "its scores are still those of held-out classes"
    assert set(fit.choice.scores) == {NOTHING, CLOSED} | ({TRAINED} if kept == TRAINED else set())
    held_out = [each.embeddings[kept] for each in fit.outcomes]
    for found, expected in zip(fit.held_out(), held_out, strict=True):
        assert torch.equal(found, expected)


def test_untrained_features_in_fewer_dimensions_are_their_pca() -> None:
    x, labels = vectors()
    fit = fit_head(x, labels, settings(head="untrained", dim=3))
    torch.testing.assert_close(fit.embed(x), normalize(pca(x, 3)(x)), rtol=0, atol=1e-5)
    assert fit.choice.dim == 3
    for each in fit.outcomes:
        assert each.embeddings[NOTHING].shape == (len(each.rows), 3)


@pytest.mark.parametrize("head", ["auto", "closed-form", "trained", "untrained"])
def test_what_was_decided_is_fitted_again_exactly(head: str) -> None:
    x, labels = vectors()
    asked = settings(head=head, **({"epochs": 2} if head == "trained" else {}))
    first = fit_head(x, labels, asked)
    again = fit_head(x, labels, asked, decided=first.choice)
    assert again.choice == first.choice
    assert again.outcomes == ()
    # Without folds the sums over classes are added in another order.
    torch.testing.assert_close(again.head.weight, first.head.weight, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(again.embed(x), first.embed(x), rtol=1e-4, atol=1e-4)
    once_more = fit_head(x, labels, asked, decided=first.choice)
    assert torch.equal(once_more.head.weight, again.head.weight)
    assert torch.equal(once_more.head.bias, again.head.bias)


def test_a_fold_is_embedded_without_its_classes() -> None:
    """Other items there change nothing but what is made of them."""
    x, labels = vectors()
    fold = class_folds(labels)[1]
    asked = replace(settings(head="closed-form"), dim=x.shape[1])
    changed = x.clone()
    changed[fold.held_out] *= -1  # the same scatter and, for the projection, the same directions
    first, other = (fit_head(each, labels, asked).outcomes[1] for each in (x, changed))
    assert torch.equal(first.rows, fold.held_out)
    assert not torch.equal(first.embeddings[CLOSED], other.embeddings[CLOSED])
    assert torch.equal(first.embeddings[NOTHING], -other.embeddings[NOTHING])


def test_too_few_classes_for_folds() -> None:
    x, labels = vectors(3)
    fit = fit_head(x, labels, settings())
    assert (fit.choice.kept, fit.choice.folds) == (CLOSED, 0)
    assert fit.choice.recipe == Recipe(root=False)
    assert fit.head.weight.shape == (16, 16)
    assert fit.held_out() == []
    assert fit.choice.scores == fit.choice.gains == {}
    assert fit_head(x, labels, settings(epochs=2)).choice.kept == TRAINED


def test_features_of_rank_one() -> None:
    g = torch.Generator().manual_seed(0)
    labels = torch.arange(20).repeat_interleave(10)
    x = torch.randn(200, 1, generator=g) @ torch.randn(1, 300, generator=g)
    for head in ("auto", "closed-form"):
        fit = fit_head(x, labels, settings(head=head))
        assert fit.embed(x).isfinite().all()


def test_fewer_dimensions_where_folds_prefer_them() -> None:
    """Classes in eight directions among a hundred of noise: the default need not keep them all."""
    g = torch.Generator().manual_seed(0)
    labels = torch.arange(40).repeat_interleave(12)
    signal = 2 * torch.randn(40, 8, generator=g)[labels]
    x = torch.cat([signal, torch.zeros(len(labels), 112)], 1)
    x = x + torch.randn(len(labels), 120, generator=g)
    fit = fit_head(x, labels, settings())
    assert fit.choice.dim == len(fit.head.weight) == 64
    asked = fit_head(x, labels, settings_of(dim=8))
    assert asked.choice.dim == len(asked.head.weight) == 8


def test_proxies_are_the_class_means() -> None:
    x, labels = vectors()
    fit = fit_head(x, labels, settings())
    proxies: Any = fit.criterion.proxies
    e = fit.embed(x)
    means = torch.stack([e[labels == c].mean(0) for c in range(24)])
    torch.testing.assert_close(proxies.detach(), normalize(means), rtol=0, atol=1e-5)


def test_a_choice_survives_json() -> None:
    x, labels = vectors()
    choices = [fit_head(x, labels, settings(**o)).choice for o in ({}, {"epochs": 1})]
    for choice in (*choices, fit_head(*vectors(3), settings()).choice):
        stored = json.loads(json.dumps(to_json(choice)))
        again = read_as(Choice, stored)
        assert again == choice
        assert again.describe() == choice.describe()
    closed, trained = choices
    assert closed.reason().startswith("the closed form changes Recall@1 by +")
    assert trained.reason().startswith("training changes Recall@1 by ")
    assert "shrinkage" in closed.describe()[-1]


# Trained


@pytest.mark.parametrize("items", [100, 800, 5864, 80_000, 1_000_000])
def test_rate_times_steps_is_the_same_for_any_number_of_items(items: int) -> None:
    found = head_schedule(settings(head="trained"), items, 50, 64)
    assert found.epochs is not None
    assert found.head_lr is not None
    assert found.proxy_lr == PROXY_FACTOR * found.head_lr
    steps = found.epochs * max(1, items // min(128, items))
    assert found.head_lr * steps * 64**0.5 == pytest.approx(MOVE)
    assert 1 <= found.epochs <= MOST_EPOCHS
    assert steps <= 3500 or found.epochs == 1


def test_a_few_thousand_items_have_the_usual_epochs() -> None:
    assert head_schedule(settings(), 5864, 50, 64).epochs == EPOCHS


def test_what_the_user_says_stays() -> None:
    found = head_schedule(settings(epochs=3, head_lr=0.5, proxy_lr=0.25), 1000, 10, 64)
    assert (found.epochs, found.head_lr, found.proxy_lr) == (3, 0.5, 0.25)


def unit_items() -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    labels = torch.arange(12).repeat_interleave(10)
    inputs = torch.randn(12, 6, generator=g)[labels] + torch.randn(120, 6, generator=g)
    return inputs / inputs.norm(dim=1).mean(), labels


def test_without_epochs_the_map_is_the_identity() -> None:
    inputs, labels = unit_items()
    asked = replace(settings(head="trained"), epochs=0)
    turn, criterion = train_turn(inputs, labels, asked, Control())
    assert torch.equal(turn.weight, torch.eye(6))
    assert torch.equal(turn.bias, torch.zeros(6))
    proxies: Any = criterion.proxies
    means = torch.stack([normalize(inputs[labels == c]).mean(0) for c in range(12)])
    torch.testing.assert_close(proxies.detach(), normalize(means), rtol=0, atol=1e-6)


@pytest.mark.parametrize("loss", ["proxy-nca", "proxy-anchor"])
def test_training_lowers_the_loss_of_its_start(loss: str) -> None:
    inputs, labels = unit_items()
    asked = settings(loss=loss)
    turn, trained = train_turn(inputs, labels, asked, Control())
    start = build_criterion(asked, 12, 6)
    place_proxies(start, normalize(inputs), labels, seed=asked.seed)
    with torch.no_grad():
        before, after = start(inputs, labels), trained(turn(inputs), labels)
    assert float(after) < float(before) - 0.01


def test_the_trained_map_is_behind_the_closed_form() -> None:
    x, labels = vectors()
    asked = settings(epochs=3)
    closed = fit_head(x, labels, asked, decided=Choice(CLOSED, Recipe(root=False), 8))
    trained = fit_head(x, labels, asked, decided=Choice(TRAINED, Recipe(root=False), 8))
    turn, _ = train_turn(closed.head(x), labels, asked, Control())
    torch.testing.assert_close(trained.head(x), turn(closed.head(x)), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(trained.head(x), closed.head(x), atol=1e-3)


def test_folds_train_only_where_it_is_asked_for() -> None:
    x, labels = vectors()
    seen: list[str] = []
    fit_head(x, labels, settings(), control=watching(seen))
    assert seen
    assert not [what for what in seen if "training" in what]
    seen.clear()
    fit_head(x, labels, settings(epochs=1), control=watching(seen))
    assert len({what for what in seen if what.startswith("training") and "fold" in what}) == 4


def watching(seen: list[str]) -> Control:
    """Return a control that writes down what slow work is told."""
    return Control(lambda event: seen.append(event.values.get("what", event.kind)))


def test_what_was_decided_goes_for_the_roots_too() -> None:
    """Training may move features across the rule by which roots are taken."""
    x, labels = vectors()
    positive = x.abs()
    decided = Choice(CLOSED, Recipe(root=False), 8)
    found = fit_head(positive, labels, settings(), decided=decided)
    expected = fit_head(positive - 10, labels, settings(), decided=decided)  # centred: the same
    assert torch.allclose(found.embed(positive), expected.embed(positive - 10), atol=1e-3)
