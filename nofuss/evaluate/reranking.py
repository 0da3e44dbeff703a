"""Whether a run re-ranks what it finds: decided on folds of training classes, kept with the run."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Self

import torch
from torch import Tensor

from nofuss.evaluate.intervals import paired_difference
from nofuss.evaluate.ranked import RankedScores, gains_of, of_folds, ranked_scores
from nofuss.evaluate.side_by_side import scorable
from nofuss.evaluate.smoothing import Weighting
from nofuss.evaluate.vicinity import SIZE
from nofuss.progress import Progress, silent

QUERIES_OF_FOLD = 400
"""Queries of a fold that candidates are compared on."""


CANDIDATES = tuple(
    Weighting(*pair) for pair in ((3, 3.0), (8, 3.0), (16, 3.0), (8, 2.0), (16, 2.0), (8, 1.0))
)
"""From little smoothing to much, which raises MAP@R but may lower Recall@1."""
CAREFUL = 3
"""The first of them, which weigh near items more."""
ENOUGH_CLASSES = 4
"""Classes of each fold that it takes: among fewer, nearly all neighbours are relatives, which an
index of all classes does not have."""
MARGIN = 0.01
"""What Recall@1 may lose at most, with 95% confidence: the first result is the one that counts, and
a fold has fewer classes to be confused with than an index."""


@dataclass(frozen=True)
class Reranking:
    """What folds of training classes say of re-ranking; stored in choice.json and model.json."""

    neighbours: int
    power: float
    on: bool
    """Whether it gains by more than chance."""
    scores: dict[str, list[float]]
    """Recall@1 and MAP@R, "without" and "with", each fold by the candidate of the others."""
    gains: dict[str, list[float]]
    """Their mean differences with 95% intervals over classes."""
    of_others: list[list[float]] = field(default_factory=list)
    """For each fold, neighbours and power of the candidate that the others prefer."""

    @property
    def weighting(self) -> Weighting | None:
        """Return the weighting to search with; None if re-ranking is off."""
        return Weighting(self.neighbours, self.power) if self.on else None

    @property
    def by_fold(self) -> list[Weighting] | None:
        """Return what to score each fold with, chosen on the others; None if it is off."""
        return [Weighting(int(k), power) for k, power in self.of_others] if self.on else None

    def describe(self) -> str:
        """Return one line for the user."""
        recall, average = (_points(self.gains[name]) for name in ("recall@1", "map@r"))
        change = f"Recall@1 by {recall}, MAP@R by {average}"
        if not self.on:
            return f"search ranks by distance alone: re-ranking would change {change}"
        return (
            f"search re-ranks the {SIZE} nearest by up to {self.neighbours} neighbours each, which "
            f"on held-out training classes changes {change}"
        )

    def as_dict(self) -> dict[str, Any]:
        """Return a dict for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, stored: Any) -> Self:
        """Read what `as_dict` gave; KeyError, TypeError or ValueError for anything else."""
        made = cls(**stored)
        valid = {
            "neighbours": type(made.neighbours) is int and 1 <= made.neighbours <= SIZE,
            "power": type(made.power) in (int, float) and 0 <= made.power <= 100,
            "on": type(made.on) is bool,
            "scores": _is_table(made.scores, ("without", "with"), 2),
            "gains": _is_table(made.gains, ("recall@1", "map@r"), 3),
            "of_others": _are_weightings(made.of_others),
        }
        if wrong := [name for name, is_valid in valid.items() if not is_valid]:
            raise ValueError(f"reranking has an invalid {', '.join(wrong)}")
        return made


def choose_reranking(
    embeddings: Sequence[Tensor],
    labels: Sequence[Tensor],
    *,
    seed: int,
    progress: Progress = silent,
) -> Reranking | None:
    """Decide on held-out classes of folds; None where they are too few.

    Each fold is scored with the candidate that the *other* folds prefer, so that choosing among
    candidates is not mistaken for a gain. One fold is halved by class.
    """
    if len(embeddings) == 1:
        embeddings, labels = _halved(embeddings[0], labels[0])
    if len(embeddings) < 2 or not all(scorable(y) for y in labels):
        return None
    if min(len(torch.unique(y)) for y in labels) < ENOUGH_CLASSES:
        return None
    what, folds = "trying re-ranking on folds of the classes", list[list[RankedScores]]()
    for x, y in zip(embeddings, labels, strict=True):
        progress(what, len(folds), 1 + len(embeddings))
        folds.append(ranked_scores(x, y, (None, *CANDIDATES), most=QUERIES_OF_FOLD))
    progress(what, len(embeddings), 1 + len(embeddings))
    found = _decided(folds, seed)
    if not found.on:  # the careful candidates alone
        found = _decided([fold[: 1 + CAREFUL] for fold in folds], seed)
    progress(what, 1 + len(embeddings), 1 + len(embeddings))
    return found


def _decided(folds: Sequence[Sequence[RankedScores]], seed: int) -> Reranking:
    """Return the verdict of folds on candidates; the first of their scores are without."""
    best = [_best([*folds[:k], *folds[k + 1 :]], seed) for k in range(len(folds))]
    after = of_folds([fold[1 + i] for fold, i in zip(folds, best, strict=True)]).scores
    before = of_folds([fold[0] for fold in folds]).scores
    gains = gains_of(after, before, seed=seed)
    objective = paired_difference(after.objective, before.objective, after.labels, seed)
    return Reranking(
        *CANDIDATES[_best(folds, seed)],
        on=objective.low > 0 and gains["recall@1"].low >= -MARGIN,
        scores={
            name: [float(of.recall.mean()), float(of.map_at_r.mean())]
            for name, of in (("without", before), ("with", after))
        },
        gains={name: list(gain) for name, gain in gains.items()},
        of_others=[list(CANDIDATES[i]) for i in best],
    )


def _halved(x: Tensor, y: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    sides = [torch.isin(y, classes) for classes in torch.unique(y).chunk(2)]
    return [x[side] for side in sides], [y[side] for side in sides]


def _best(folds: Sequence[Sequence[RankedScores]], seed: int) -> int:
    """Return the candidate with the highest objective among those that don't lose Recall@1.

    With half of the margin, since the choice must hold on other classes. The first, which changes
    least, if none is safe.
    """
    before, *after = (of_folds(column).scores for column in zip(*folds, strict=True))
    pairs = [(of.recall, before.recall, of.labels, seed) for of in after]
    losses = [paired_difference(*pair, resamples=500).low for pair in pairs]
    safe = [i for i, low in enumerate(losses) if low >= -MARGIN / 2]
    return max(safe, key=lambda i: float(after[i].objective.mean()), default=0)


def _points(gain: Sequence[float]) -> str:
    mean, low, high = (100 * value for value in gain)
    return f"{mean:+.2f} points (95%: {low:+.2f} to {high:+.2f})"


def _are_weightings(pairs: Any) -> bool:
    return isinstance(pairs, list) and all(
        isinstance(pair, list)
        and len(pair) == 2
        and all(type(value) in (int, float) for value in pair)
        and 1 <= pair[0] <= SIZE
        and 0 <= pair[1] <= 100
        for pair in pairs
    )


def _is_table(table: Any, names: Sequence[str], width: int) -> bool:
    return (
        isinstance(table, Mapping)
        and list(table) == list(names)
        and all(isinstance(row, list) and len(row) == width for row in table.values())
        and all(type(v) in (int, float) and abs(v) <= 1 for row in table.values() for v in row)
    )
