"""The head on fixed features: `fit_head` decides what becomes of them, and nothing else does.

The closed form of model/whitening.py, by the recipe that folds of the classes prefer; the features
as they are, where these folds find it significantly worse; or, if that is asked for, the closed
form trained on with the paper's loss.

What is trained is a D × D matrix behind the closed form, whose outputs have length 1 on average. It
starts at the identity, with the proxies at the class means. Adam moves every entry by about its
rate a step, so that rate × steps × √D says how far an output of length 1 can move: that product is
what is fixed here, and the rates follow from the number of steps. 800 items or 80,000, 64
dimensions or 1,024 then need no other settings.
"""

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from nofuss.config import Settings, read_as, to_json
from nofuss.data.collection import Collection
from nofuss.distributed import processes
from nofuss.evaluate.protocol import QueryScores, gains_over, pooled
from nofuss.geometry import normalize
from nofuss.model.whitening import (
    DIRECTIONS,
    EXACT,
    Affine,
    closed_form,
    project,
    signed_root,
    untrained_head,
)
from nofuss.progress import working
from nofuss.ranking.open_set import class_sums, near, quantiles
from nofuss.run.choice import CLOSED, NOTHING, TRAINED, UNTRAINED, Choice
from nofuss.training.callbacks import Control
from nofuss.training.criterion import build_criterion, place_proxies
from nofuss.training.feed import Batches, batch_of
from nofuss.training.folds import Recipes, class_folds, query_scores, sample_rows
from nofuss.training.loop import Training, resume_or_begin
from nofuss.training.settings import head_dim

log = logging.getLogger("nofuss")
SCORED_ITEMS = 3000
"""Items of a fold that methods are compared on."""
PINNED = {"untrained": NOTHING, "closed-form": CLOSED, "trained": TRAINED}
MOVE = 2.0
"""Rate × steps × √D of the head; of the proxies PROXY_FACTOR times as much."""
PROXY_FACTOR = 10.0
EPOCHS = 20
FEWEST_STEPS, MOST_STEPS, MOST_EPOCHS = 300, 3000, 60


@dataclass(frozen=True)
class FoldOutcome:
    """What one fold says: unit embeddings of its rows by each method, and their scores."""

    rows: Tensor
    embeddings: dict[str, Tensor]
    scores: dict[str, QueryScores]
    unknown: dict[str, Tensor] = field(default_factory=dict)
    """How near its items, or a sample of them, are to other classes; see ranking/open_set.py."""


@dataclass(frozen=True)
class HeadFit:
    """A head on features, and how it was chosen."""

    head: Affine
    """Of the features, or of their roots where `choice.recipe.root`."""
    choice: Choice
    criterion: nn.Module
    """The loss with its proxies: trained, or at the class means."""
    pinned: str | None = None
    """The method that was asked for; None if the folds decided."""
    outcomes: tuple[FoldOutcome, ...] = ()
    """What the folds said; of several processes the first knows."""

    def embed(self, features: Tensor) -> Tensor:
        """Return the unit embeddings (N, D) of features (N, F)."""
        return normalize(self.head(signed_root(features) if self.choice.recipe.root else features))

    def held_out(self) -> list[Tensor]:
        """Return unit embeddings of each fold's rows, by what the *other* folds would keep."""
        return [of.embeddings[kept] for of, kept in zip(self.outcomes, self._kept(), strict=True)]

    def unknown(self) -> list[float] | None:
        """Return how near items are to the classes that are not theirs, by heads without theirs."""
        found = [of.unknown[kept] for of, kept in zip(self.outcomes, self._kept(), strict=True)]
        return quantiles(torch.cat(found), self.choice.classes) if found else None

    def _kept(self) -> list[str]:
        """Return the method that the other folds prefer, for each fold."""
        others = [[*self.outcomes[:k], *self.outcomes[k + 1 :]] for k in range(len(self.outcomes))]
        return [self.pinned or better(rest) for rest in others]


def fit_head(
    x: Tensor,
    labels: Tensor,
    settings: Settings,
    *,
    decided: Choice | None = None,
    compare: bool = True,
    control: Control | None = None,
) -> HeadFit:
    """Fit a head to features x (N, F) with labels (N,) of 0…C−1 without gaps, all in memory.

    decided: what folds have found before; nothing is then tried on them. compare: False does not
    try a head that is asked for on folds, where nobody wants its scores.
    """
    control = control or Control()
    dim = None if settings.dim is None else head_dim(settings, x.shape[1])
    pinned = PINNED.get(settings.head)
    sample, count = sample_rows(labels, torch.arange(len(x)), EXACT), max(DIRECTIONS, dim or 0)
    projection = project(x, sample, count, root=None if decided is None else decided.recipe.root)
    folds = class_folds(labels) if decided is None else []
    recipes = Recipes(projection(x), labels, folds, projection.root, dim)
    outcomes: list[FoldOutcome] = []

    def decide() -> str:
        if compare or pinned is None:
            outcomes.extend(run_folds(x, recipes, dim, settings, control))
        return json.dumps(to_json(_choice(x, recipes, dim, outcomes, pinned)))

    # Rounding may differ between machines: of several processes the first decides.
    choice = decided or read_as(Choice, json.loads(processes.from_first(decide)))
    for line in choice.describe() if decided is None else ():
        log.debug(line)
    with working(control.progress, "fitting the head to all items"):
        if choice.kept == NOTHING:
            head = untrained_head(x, choice.dim)
        else:
            sums = recipes.sums().double()
            head = projection.then(closed_form(sums, choice.recipe, choice.dim), sums.mean)
        inputs = head(signed_root(x) if choice.recipe.root else x)
        length = _length(inputs)
        head, inputs = head.times(1 / length), inputs / length
    if choice.kept == TRAINED:
        turn, criterion = train_turn(inputs, labels, settings, control)
        head = head.then(turn)
    else:
        criterion = build_criterion(settings, int(labels.max()) + 1, choice.dim)
        place_proxies(criterion, normalize(inputs), labels, seed=settings.seed)
    return HeadFit(head, choice, criterion, pinned, tuple(outcomes))


def _choice(
    x: Tensor,
    recipes: Recipes,
    dim: int | None,
    outcomes: Sequence[FoldOutcome],
    pinned: str | None,
) -> Choice:
    """Return what is kept, and the scores behind it.

    Features that are kept as they are keep their own dimension, unless another is asked for.
    """
    kept = pinned or (better(outcomes) if outcomes else CLOSED)
    recipe, best_dim = recipes.best()
    if kept == NOTHING:
        recipe, best_dim = UNTRAINED, dim or x.shape[1]
    scores = pooled_scores(outcomes)
    pairs = ((CLOSED, NOTHING), (TRAINED, CLOSED), (TRAINED, NOTHING))
    return Choice(
        kept,
        recipe,
        best_dim,
        folds=len(outcomes),
        classes=len(torch.unique(recipes.labels)),
        items=len(x),
        scores={
            name: {"recall@1": float(of.recall.mean()), "map@r": float(of.map_at_r.mean())}
            for name, of in scores.items()
        },
        gains={
            f"{a} over {b}": {k: [*v] for k, v in gains_over(scores[a], scores[b]).items()}
            for a, b in pairs
            if a in scores
        },
    )


# On folds


def run_folds(
    x: Tensor, recipes: Recipes, dim: int | None, settings: Settings, control: Control
) -> list[FoldOutcome]:
    """Score the features as they are and the closed form on the classes of each fold.

    Every fold gets the recipe that scored best on the *others*, and a head of the classes outside
    it; where a trained head is asked for, also a training from there. dim: as asked.
    """
    outcomes, labels, progress = [], recipes.labels, control.progress
    for k, fold in enumerate(recipes.folds):
        rows, others, of_all = fold.held_out, fold.others, f"fold {k + 1} of {len(recipes.folds)}"
        with working(progress, f"fitting the head on {of_all}"):
            sums = recipes.sums(without=k)
            matrix = closed_form(sums, *recipes.best(without=k))
            untrained = x if dim is None else untrained_head(x[others], dim)(x)
            embedded = {NOTHING: untrained, CLOSED: (recipes.z - sums.mean) @ matrix}
        if settings.head == "trained":
            inputs = embedded[CLOSED][others]
            length, compact = _length(inputs), torch.unique(labels[others], return_inverse=True)[1]
            with working(progress, f"training the head on {of_all}"):
                turn, _ = train_turn(inputs / length, compact, settings, control.quiet())
            embedded[TRAINED] = turn(embedded[CLOSED] / length)
        some = sample_rows(labels, rows, SCORED_ITEMS)
        outcome = FoldOutcome(rows, {}, {}, {})
        for name in list(embedded):
            z = normalize(embedded.pop(name))
            outcome.embeddings[name] = z[rows]
            outcome.scores[name] = query_scores(z[some], labels[some])
            means = class_sums(z, labels)
            outcome.unknown[name] = near(z[some], means, labels[some], unknown=True)
        outcomes.append(outcome)
    return outcomes


def _length(inputs: Tensor) -> float:
    """Return the mean length of rows, above 0."""
    return max(float(inputs.norm(dim=1).mean()), torch.finfo(torch.float32).tiny)


def better(outcomes: Sequence[FoldOutcome]) -> str:
    """Return what these folds keep: the closed form, unless it is significantly worse (95%)."""
    scores = pooled_scores(outcomes)
    gains = gains_over(scores[CLOSED], scores[NOTHING])
    return NOTHING if any(gain.high < 0 for gain in gains.values()) else CLOSED


def pooled_scores(outcomes: Sequence[FoldOutcome]) -> dict[str, QueryScores]:
    """Return the queries of all folds, by method."""
    methods = outcomes[0].scores if outcomes else ()
    return {name: pooled([outcome.scores[name] for outcome in outcomes]) for name in methods}


# Trained


def head_schedule(settings: Settings, items: int, classes: int, dim: int) -> Settings:
    """Fill in epochs and rates that are not set, by the number of steps."""
    steps = max(1, items // batch_of(settings, items, classes))
    epochs = settings.epochs
    if epochs is None:
        wanted = min(max(EPOCHS * steps, FEWEST_STEPS), MOST_STEPS)
        epochs = min(max(1, round(wanted / steps)), MOST_EPOCHS)
    lr = settings.head_lr
    if lr is None:
        lr = MOVE / (max(1, epochs) * steps * dim**0.5)
    proxy_lr = PROXY_FACTOR * lr if settings.proxy_lr is None else settings.proxy_lr
    return replace(settings, epochs=epochs, head_lr=lr, proxy_lr=proxy_lr)


def train_turn(
    inputs: Tensor, labels: Tensor, settings: Settings, control: Control
) -> tuple[Affine, nn.Module]:
    """Train a map behind inputs (N, D) of length 1 on average; return it and the criterion.

    labels: (N,) of 0…C−1 without gaps.
    """
    dim, classes = inputs.shape[1], int(labels.max()) + 1
    settings = head_schedule(settings, len(inputs), classes, dim)
    turn = nn.Linear(dim, dim, device="meta", dtype=inputs.dtype).to_empty(device=control.device)
    with torch.no_grad():
        turn.weight.copy_(torch.eye(dim))
        turn.bias.zero_()
    criterion = build_criterion(settings, classes, dim)
    place_proxies(criterion, normalize(inputs), labels, seed=settings.seed)
    criterion.to(control.device)
    names = tuple(map(str, range(classes)))
    data = Collection(
        name="features",
        layout="array",
        array=inputs.numpy(),
        labels=labels.numpy(),
        class_names=names,
    )
    training = Training.of(settings, turn, criterion, backbone=(), head=turn.parameters())
    resume_or_begin(training, Batches(data, None, settings), control)
    weight, bias = (p.detach().cpu() for p in (turn.weight, turn.bias))
    return Affine(weight, bias), criterion
