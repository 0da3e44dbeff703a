"""Untrained features, closed form or training: which of them a run keeps, decided on folds.

Every fold gets the recipe that the *other* folds chose, a closed form of the classes outside it,
and a training from there; each is scored on the fold's own classes, which none of it has seen. What
is kept has to earn it: training where its gain over the closed form is above zero beyond doubt
(95%, classes resampled, the same queries on both sides), and neither of them where it finds less
at rank 1 than the features did before.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from nofuss.config import TrainConfig
from nofuss.evaluate.intervals import Difference, paired_difference
from nofuss.geometry import normalize
from nofuss.model.start import Affine, untrained_head
from nofuss.train.closed_form import SHRINKAGES, UNTRAINED, ClosedForm, Pinned, Recipe
from nofuss.train.folds import QueryScores, class_folds, pooled, query_scores
from nofuss.train.head import DIM, composed, prepare_head
from nofuss.train.loop import Silent, Watch, train

NOTHING, CLOSED, TRAINED = "untrained features", "closed form", "trained"
SCORES = ("recall@1", "map@r")
MARKS = 8
"""Points of the curve over a fold's training, beside its start."""


@dataclass(frozen=True)
class FoldResult:
    """What one fold says: unit embeddings of its rows by each method, and their scores."""

    rows: Tensor
    embeddings: dict[str, Tensor]
    scores: dict[str, QueryScores]
    curve: list[tuple[int, float, float]] = field(default_factory=list)
    """(epoch, Recall@1, MAP@R), from epoch 0, the closed form."""


@dataclass(frozen=True)
class Choice:
    """What is kept and why; choice.json."""

    kept: str
    recipe: Recipe
    dim: int
    folds: int
    classes: int
    items: int
    scores: dict[str, dict[str, float]]
    """Method → Recall@1 and MAP@R on the folds."""
    gains: dict[str, dict[str, tuple[float, float, float]]]
    """"a over b" → score → mean difference and its 95% interval over classes."""
    curve: list[tuple[int, float, float]]

    def describe(self) -> list[str]:
        """Lines for the user: what the folds found, and what is kept."""
        if not self.scores:
            return [f"head: {self.kept} in {self.dim} dimensions, {self.recipe.describe()}"]
        shown = [
            f"{name} {100 * of['recall@1']:.2f} / {100 * of['map@r']:.2f}"
            for name, of in self.scores.items()
        ]
        return [
            f"Recall@1 / MAP@R on {self.classes:,} training classes, each held out in one of "
            f"{self.folds} folds: " + ", ".join(shown),
            self.reason(),
        ]

    def reason(self) -> str:
        """What is kept, and why, in a sentence."""
        if self.kept == NOTHING:
            gain = self.gains[f"{CLOSED} over {NOTHING}"]["recall@1"]
            why = f"the closed form changes Recall@1 by {_points(gain)}"
            return f"kept: the untrained features in {self.dim} dimensions, since {why}"
        what = f"{self.dim} dimensions ({4 * self.dim:,} bytes an item), {self.recipe.describe()}"
        pair = self.gains.get(f"{TRAINED} over {CLOSED}")
        if pair is None:
            return f"kept: the closed form in {what}"
        why = f"Recall@1 by {_points(pair['recall@1'])}, MAP@R by {_points(pair['map@r'])}"
        if self.kept == TRAINED:
            return f"kept: the trained head in {what}, since training changes {why}"
        return f"kept: the closed form in {what}, since training would change {why}"

    def as_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return asdict(self)

    @classmethod
    def of_nothing(cls, form: ClosedForm) -> "Choice":
        """The features as they are, without asking the folds."""
        classes = len(torch.unique(form.labels))
        counts = len(form.folds), classes, len(form.labels)
        return cls(NOTHING, UNTRAINED, form.dim, *counts, {}, {}, [])

    @classmethod
    def from_dict(cls, stored: dict[str, Any]) -> "Choice":
        """What `as_dict` gave; raises KeyError or TypeError for anything else."""
        gains = {
            pair: {name: (float(m), float(low), float(high)) for name, (m, low, high) in of.items()}
            for pair, of in stored["gains"].items()
        }
        curve = [(int(e), float(r), float(m)) for e, r, m in stored["curve"]]
        return cls(
            **{**stored, "recipe": Recipe(**stored["recipe"]), "gains": gains, "curve": curve}
        )


def run_folds(
    form: ClosedForm,
    config: TrainConfig,
    *,
    device: torch.device,
    watch: Watch,
    stop: Callable[[], bool] = lambda: False,
) -> list[FoldResult]:
    """Fit, train and score on every fold, with the recipe that the others chose.

    form: has compared the recipes. config: resolved.
    """
    results = []
    for k, fold in enumerate(form.folds):
        recipe = form.best(without=k)
        start = form.fit(recipe, without=k)
        inputs, labels = form.inputs(recipe.root), form.labels[fold.held_out]
        found = {NOTHING: form.features[fold.held_out]}
        found[CLOSED] = normalize(start(inputs[fold.held_out]))
        scores = {name: query_scores(x, labels) for name, x in found.items()}
        curve = [(0, *_means(scores[CLOSED]))]
        if config.epochs != 0:
            trained, later = _train_fold(
                config,
                start(inputs[fold.others]),
                form.labels[fold.others],
                start(inputs[fold.held_out]),
                labels,
                device=device,
                watch=watch,
                stop=stop,
            )
            curve += later
            found[TRAINED] = trained
            scores[TRAINED] = query_scores(trained, labels)
        results.append(FoldResult(fold.held_out, found, scores, curve))
    return results


def _train_fold(
    config: TrainConfig,
    inputs: Tensor,
    labels: Tensor,
    held_out: Tensor,
    held_out_labels: Tensor,
    *,
    device: torch.device,
    watch: Watch,
    stop: Callable[[], bool],
) -> tuple[Tensor, list[tuple[int, float, float]]]:
    """Unit embeddings of the held-out items after training, and the curve to there."""
    compact = torch.unique(labels, return_inverse=True)[1]
    training, feed = prepare_head(config, inputs, compact, device=device)
    marks = {round(training.epochs * (i + 1) / MARKS) for i in range(MARKS)}
    curve: list[tuple[int, float, float]] = []

    @torch.no_grad()
    def embed() -> Tensor:
        return normalize(training.model(held_out.to(device)).cpu())

    def look() -> dict[str, float]:
        if training.epoch + 1 in marks:
            curve.append((training.epoch + 1, *_means(query_scores(embed(), held_out_labels))))
        return {}

    train(training, feed, watch=watch, validate=look, stop=stop)
    return embed(), curve


def untrained_folds(form: ClosedForm) -> list[Tensor]:
    """Unit embeddings of each fold's rows that nothing was learned for but a PCA on the others."""
    return [
        normalize(untrained_head(form.features[f.others], form.dim)(form.features[f.held_out]))
        for f in form.folds
    ]


def verdict(results: Sequence[FoldResult], *, seed: int = 0, resamples: int = 2000) -> str:
    """Which method is kept, by these folds."""
    scores, kept = _pooled(results), CLOSED
    if TRAINED in scores:
        gain = _gain(scores, TRAINED, CLOSED, "objective", seed, resamples)
        kept = TRAINED if gain.low > 0 else CLOSED
    gain = _gain(scores, kept, NOTHING, "recall@1", seed, resamples)
    return NOTHING if gain.high < 0 else kept


def choice_of(
    form: ClosedForm,
    results: Sequence[FoldResult],
    pinned: Pinned,
    *,
    config: TrainConfig,
) -> Choice:
    """The verdict of all folds, with what led to it.

    Features that are kept as they are keep their own dimension, unless the user asks for
    another. Too few classes for folds: the closed form, by the likeliest
    recipe. The user wants no folds: training.
    """
    seed, kept = config.seed, CLOSED
    if results:
        kept = verdict(results, seed=seed)
    elif not config.folds and config.epochs != 0:
        kept = TRAINED
    recipe = form.best() if results else next(iter(pinned.candidates(SHRINKAGES)))
    scores = _pooled(results) if results else {}
    return Choice(
        kept=kept,
        recipe=UNTRAINED if kept == NOTHING else recipe,
        dim=form.features.shape[1] if config.dim is None and kept == NOTHING else form.dim,
        folds=len(results),
        classes=len(torch.unique(form.labels)),
        items=len(form.labels),
        scores={name: dict(zip(SCORES, _means(of), strict=True)) for name, of in scores.items()},
        gains={
            f"{a} over {b}": {name: _gain(scores, a, b, name, seed) for name in SCORES}
            for a, b in ((CLOSED, NOTHING), (TRAINED, CLOSED), (TRAINED, NOTHING))
            if a in scores
        },
        curve=_mean_curve(results),
    )


def held_out_embeddings(results: Sequence[FoldResult], *, seed: int) -> list[Tensor]:
    """Of each fold's rows, by the method that the *other* folds would keep.

    So no score of a class had a say in what it is scored with.
    """
    found = []
    for k, result in enumerate(results):
        kept = verdict([*results[:k], *results[k + 1 :]], seed=seed, resamples=500)
        found.append(result.embeddings[kept])
    return found


def fit_head(
    config: TrainConfig,
    features: Tensor,
    labels: Tensor,
    *,
    watch: Watch | None = None,
) -> tuple[Choice, Affine]:
    """Choose on folds, fit all items, train where it pays: all of it on vectors in memory.

    config: resolved. labels: (N,) of 0…C−1 without gaps. The head takes the features, or their
    roots where `choice.recipe.root`.
    """
    watch, device = watch or Silent(), torch.device("cpu")
    folds = class_folds(labels, config.folds) if config.folds else []
    dim = config.dim or min(DIM, features.shape[1])
    form, pinned = ClosedForm(features, labels, folds, dim=dim), Pinned.of(config)
    results: list[FoldResult] = []
    if folds:
        form.compare(pinned)
        results = run_folds(form, config, device=device, watch=watch)
    choice = choice_of(form, results, pinned, config=config)
    start = start_of(form, choice)
    if choice.kept != TRAINED:
        return choice, start
    inputs = start(form.inputs(choice.recipe.root))
    training, feed = prepare_head(config, inputs, labels, device=device)
    train(training, feed, watch=watch)
    return choice, composed(training.model, start)


def start_of(form: ClosedForm, choice: Choice) -> Affine:
    """The head of all items that the choice says."""
    if choice.kept == NOTHING:
        return untrained_head(form.features, choice.dim)
    return form.fit(choice.recipe)


def _pooled(results: Sequence[FoldResult]) -> dict[str, QueryScores]:
    return {name: pooled([r.scores[name] for r in results]) for name in results[0].scores}


def _gain(
    scores: dict[str, QueryScores],
    method: str,
    other: str,
    name: str,
    seed: int,
    resamples: int = 2000,
) -> Difference:
    """The paired difference of a score between two methods."""
    a, b = scores[method], scores[other]
    pair = {
        "recall@1": (a.recall, b.recall),
        "map@r": (a.map_at_r, b.map_at_r),
        "objective": (a.objective, b.objective),
    }[name]
    return paired_difference(*pair, a.labels, seed, resamples=resamples)


def _points(gain: tuple[float, float, float]) -> str:
    mean, low, high = (100 * value for value in gain)
    return f"{mean:+.2f} points (95%: {low:+.2f} to {high:+.2f})"


def _means(scores: QueryScores) -> tuple[float, float]:
    return float(scores.recall.mean()), float(scores.map_at_r.mean())


def _mean_curve(results: Sequence[FoldResult]) -> list[tuple[int, float, float]]:
    """Over the folds, each with the weight of its queries."""
    if not results:
        return []
    weights = torch.tensor([len(r.scores[CLOSED].recall) for r in results], dtype=torch.float64)
    curves = torch.tensor([r.curve for r in results], dtype=torch.float64)  # (folds, points, 3)
    mean = torch.einsum("k,kpc->pc", weights / weights.sum(), curves)
    return [(round(e), r, m) for e, r, m in mean.tolist()]
