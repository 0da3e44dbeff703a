"""Untrained features, closed form or training: which of them a run keeps, decided on folds.

Training is kept if it is significantly (95%, over classes, the same queries on both sides) better
than the closed form; neither is kept if Recall@1 is significantly below that of the untrained
features.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from nofuss.config import TrainConfig
from nofuss.model.start import Affine, untrained_head
from nofuss.run.choice import CLOSED, NOTHING, SHRINKAGES, TRAINED, UNTRAINED, Choice
from nofuss.training.closed_form import ClosedForm, Pinned
from nofuss.training.fold_results import (
    FoldResult,
    gain_of,
    mean_scores,
    pooled_scores,
    run_folds,
    winner,
)
from nofuss.training.head import composed, prepare_head
from nofuss.training.loop import run_loop
from nofuss.training.presets import head_dim

SCORES = ("recall@1", "map@r")


def untrained_choice(form: ClosedForm) -> Choice:
    """Return the choice of the features as they are, without asking the folds."""
    classes = len(torch.unique(form.labels))
    counts = len(form.folds), classes, len(form.labels)
    return Choice(NOTHING, UNTRAINED, form.dim, *counts, {}, {}, [])


def choice_of(
    form: ClosedForm,
    results: Sequence[FoldResult],
    pinned: Pinned,
    *,
    config: TrainConfig,
) -> Choice:
    """Return the verdict of all folds and the scores behind it.

    Features that are kept as they are keep their own dimension, unless the user asks for
    another. With too few classes for folds the closed form of the likeliest recipe is kept; with
    `folds` 0, training.
    """
    kept = CLOSED
    if results:
        kept = winner(results)
    elif not config.folds and config.epochs != 0:
        kept = TRAINED
    recipe = form.best() if results else next(iter(pinned.candidates(SHRINKAGES)))
    scores = pooled_scores(results) if results else {}
    return Choice(
        kept=kept,
        recipe=UNTRAINED if kept == NOTHING else recipe,
        dim=form.features.shape[1] if config.dim is None and kept == NOTHING else form.best_dim(),
        folds=len(results),
        classes=len(torch.unique(form.labels)),
        items=len(form.labels),
        scores={
            name: dict(zip(SCORES, mean_scores(of), strict=True)) for name, of in scores.items()
        },
        gains={
            f"{a} over {b}": {name: gain_of(scores, a, b, name) for name in SCORES}
            for a, b in ((CLOSED, NOTHING), (TRAINED, CLOSED), (TRAINED, NOTHING))
            if a in scores
        },
        curve=_mean_curve(results),
    )


def fit_head(config: TrainConfig, features: Tensor, labels: Tensor) -> tuple[Choice, Affine]:
    """Choose on folds, fit all items, train where it pays: all of it on vectors in memory.

    config: resolved. labels: (N,) of 0…C−1 without gaps. The head takes the features, or their
    roots where `choice.recipe.root`.
    """
    device = torch.device("cpu")
    if config.dim is not None:
        config = replace(config, dim=head_dim(config, features.shape[1]))
    form = ClosedForm.of(config, features, labels)
    pinned = Pinned.of(config)
    results: list[FoldResult] = []
    if form.folds:
        form.compare(pinned)
        results = run_folds(form, config, device=device)
    choice = choice_of(form, results, pinned, config=config)
    start = start_of(form, choice)
    if choice.kept != TRAINED:
        return choice, start
    inputs = start(form.inputs(choice.recipe.root))
    training, feed = prepare_head(config, inputs, labels, device=device)
    run_loop(training, feed)
    return choice, composed(training.model, start)


def start_of(form: ClosedForm, choice: Choice) -> Affine:
    """Return the chosen head, fitted to all items."""
    if choice.kept == NOTHING:
        return untrained_head(form.features, choice.dim)
    return form.fit(choice.recipe, dim=choice.dim)


def _mean_curve(results: Sequence[FoldResult]) -> list[tuple[int, float, float]]:
    """Average the curves over the folds, weighted by queries."""
    if not results:
        return []
    weights = torch.tensor([len(r.scores[CLOSED].recall) for r in results], dtype=torch.float64)
    # Folds of other sizes may take fewer epochs than there are marks: as many points of each.
    last = min(len(r.curve) for r in results) - 1
    points = [
        [r.curve[i * (len(r.curve) - 1) // max(1, last)] for i in range(last + 1)] for r in results
    ]
    curves = torch.tensor(points, dtype=torch.float64)  # (folds, points, 3)
    mean = torch.einsum("k,kpc->pc", weights / weights.sum(), curves)
    return [(round(e), r, m) for e, r, m in mean.tolist()]
