"""What the folds say of untrained features, closed form and training, and which of them wins.

Every fold gets the recipe that scored best on the *other* folds, a closed form of the classes
outside it, and a training from there; each is scored on the fold's own classes, which neither of
them has seen. (The recipe has, a little: on the other folds it was fitted to these classes too.
What that adds to scores is within noise, LOG.md.)
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from nofuss.config import TrainConfig
from nofuss.evaluate.intervals import Difference, paired_difference
from nofuss.evaluate.protocol import QueryScores, pooled
from nofuss.geometry import normalize
from nofuss.model.start import untrained_head
from nofuss.progress import Progress, silent, working
from nofuss.run.choice import CLOSED, NOTHING, TRAINED
from nofuss.training.callbacks import as_progress
from nofuss.training.closed_form import ClosedForm
from nofuss.training.folds import query_scores, sample_rows
from nofuss.training.head import prepare_head
from nofuss.training.loop import run_loop
from nofuss.training.step import NonFiniteLoss

SCORED_ITEMS = 3000
"""Items of a fold that the methods are compared on."""
MARKS = 8
"""Points of the curve over a fold's training, beside its start."""


@dataclass(frozen=True)
class FoldResult:
    """What one fold says: embeddings of its rows by each method, and their scores."""

    rows: Tensor
    embeddings: dict[str, Tensor]
    scores: dict[str, QueryScores]
    curve: list[tuple[int, float, float]] = field(default_factory=list)
    """(epoch, Recall@1, MAP@R), from epoch 0, the closed form."""


def run_folds(
    form: ClosedForm,
    config: TrainConfig,
    *,
    device: torch.device,
    progress: Progress = silent,
    stop: Callable[[], bool] = lambda: False,
) -> list[FoldResult]:
    """Fit, train and score on every fold, with the recipe that the others chose.

    form: has compared the recipes. config: resolved.
    """
    results = []
    for k, fold in enumerate(form.folds):
        recipe = form.best(without=k)
        with working(progress, f"fitting the closed form on fold {k + 1} of {len(form.folds)}"):
            start = form.fit(recipe, without=k)
        inputs, labels = form.inputs(recipe.root), form.labels[fold.held_out]
        some = sample_rows(labels, torch.arange(len(labels)), SCORED_ITEMS)
        found = {NOTHING: form.features[fold.held_out]}
        if config.dim is not None:  # what would be kept then
            nothing = untrained_head(form.features[fold.others], config.dim)
            found[NOTHING] = nothing(form.features[fold.held_out])
        found[CLOSED] = normalize(start(inputs[fold.held_out]))
        scores = {name: query_scores(x[some], labels[some]) for name, x in found.items()}
        curve = [(0, *mean_scores(scores[CLOSED]))]
        if config.epochs != 0:
            try:
                trained, later = _train_fold(
                    config,
                    start(inputs[fold.others]),
                    form.labels[fold.others],
                    start(inputs[fold.held_out]),
                    labels,
                    some,
                    device=device,
                    what=f"training on fold {k + 1} of {len(form.folds)}",
                    progress=progress,
                    stop=stop,
                )
            except NonFiniteLoss as error:  # its rows are those outside the fold
                raise NonFiniteLoss(str(error), fold.others[error.indices]) from None
            curve += later
            found[TRAINED] = trained
            scores[TRAINED] = query_scores(trained[some], labels[some])
        results.append(FoldResult(fold.held_out, found, scores, curve))
    return results


def _train_fold(
    config: TrainConfig,
    inputs: Tensor,
    labels: Tensor,
    held_out: Tensor,
    held_out_labels: Tensor,
    some: Tensor,
    *,
    device: torch.device,
    what: str,
    progress: Progress,
    stop: Callable[[], bool],
) -> tuple[Tensor, list[tuple[int, float, float]]]:
    """Train, and return unit embeddings of the held-out items and the curve."""
    compact = torch.unique(labels, return_inverse=True)[1]
    training, feed = prepare_head(config, inputs, compact, device=device)
    marks = {round(training.epochs * (i + 1) / MARKS) for i in range(MARKS)}
    curve: list[tuple[int, float, float]] = []

    @torch.no_grad()
    def embed(x: Tensor) -> Tensor:
        return normalize(training.model(x.to(device)).cpu())

    def look() -> dict[str, float]:
        if training.epoch + 1 in marks:
            scores = query_scores(embed(held_out[some]), held_out_labels[some])
            curve.append((training.epoch + 1, *mean_scores(scores)))
        return {}

    tell = as_progress(progress, what, training.epochs * len(feed))
    run_loop(training, feed, tell=tell, validate=look, stop=stop)
    return embed(held_out), curve


def untrained_folds(form: ClosedForm) -> list[Tensor]:
    """Return unit embeddings of each fold's rows by a PCA on the other folds."""
    return [
        normalize(untrained_head(form.features[f.others], form.dim)(form.features[f.held_out]))
        for f in form.folds
    ]


def winner(results: Sequence[FoldResult]) -> str:
    """Return the method that these folds keep."""
    scores, kept = pooled_scores(results), CLOSED
    if TRAINED in scores:
        gain = gain_of(scores, TRAINED, CLOSED, "objective")
        kept = TRAINED if gain.low > 0 else CLOSED
    gain = gain_of(scores, kept, NOTHING, "recall@1")
    return NOTHING if gain.high < 0 else kept


def held_out_embeddings(results: Sequence[FoldResult]) -> list[Tensor]:
    """Return embeddings of each fold's rows by the method that the *other* folds would keep.

    The choice of a method for a class therefore never depends on that class's scores.
    """
    found = []
    for k, result in enumerate(results):
        kept = winner([*results[:k], *results[k + 1 :]])
        found.append(result.embeddings[kept])
    return found


def pooled_scores(results: Sequence[FoldResult]) -> dict[str, QueryScores]:
    """Return the queries of all folds, by method."""
    return {name: pooled([r.scores[name] for r in results]) for name in results[0].scores}


def gain_of(scores: dict[str, QueryScores], method: str, other: str, name: str) -> Difference:
    """Return the paired difference of a score between two methods."""
    a, b = scores[method], scores[other]
    pair = {
        "recall@1": (a.recall, b.recall),
        "map@r": (a.map_at_r, b.map_at_r),
        "objective": (a.objective, b.objective),
    }[name]
    return paired_difference(*pair, a.labels)


def mean_scores(scores: QueryScores) -> tuple[float, float]:
    """Recall@1 and MAP@R."""
    return float(scores.recall.mean()), float(scores.map_at_r.mean())
