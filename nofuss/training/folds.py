"""Folds of the training classes: choices are made on classes that the model has not seen.

A fold holds out whole classes, and neighbours in the order of the data together: where the order
means something (CUB lists relatives side by side, nested folders group them) a held-out class has
no sibling in training, as new classes will have none; where it means nothing it does no harm.

`Recipes` chooses the recipe of the closed form; a class is always scored by what the *other* folds
have chosen, so that no choice depends on its scores.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from nofuss.data.split import FEWEST_CLASSES
from nofuss.distributed.threads import map_in_threads
from nofuss.evaluate.protocol import QueryScores, scorable
from nofuss.geometry import normalize
from nofuss.model.whitening import ClassSums, Recipe, closed_form

FOLDS = 4
BLOCK = 1024
SHRINKAGES = (0.6, 0.3, 0.9, 0.1, 0.03, 0.003)
EMPHASES = (0.0, 1.0, 2.0)
FEWER_DIMS = (256, 128, 64)
"""Dimensions that folds may prefer where none is asked for: those of raw pixels, never of a
network (docs/lab)."""
SAMPLE = 800
"""Items of a fold that recipes are scored on."""


@dataclass(frozen=True)
class Fold:
    """Rows of one fold, ascending, and those of all others."""

    held_out: Tensor
    others: Tensor


def class_folds(labels: Tensor, count: int = FOLDS) -> list[Fold]:
    """Split the items by class into `count` folds, or fewer; none below FEWEST_CLASSES.

    A fold has as many classes as another; or, if one of them could not be searched in (classes of
    one item side by side, as where they are numbered by frequency), as many of two items and more.
    """
    classes, sizes = torch.unique(labels, return_counts=True)
    if len(classes) < FEWEST_CLASSES:
        return []
    for counted in (torch.arange(len(classes)), (sizes > 1).nonzero().flatten()):
        if (parts := min(count, len(counted) // 2)) > 1:
            starts = [int(block[0]) for block in np.array_split(counted.numpy(), parts)][1:]
            sides = [torch.isin(labels, block) for block in classes.tensor_split(starts)]
            folds = [Fold(side.nonzero().flatten(), (~side).nonzero().flatten()) for side in sides]
            if all(scorable(labels[fold.held_out]) for fold in folds):
                return folds
    return []


def sample_rows(labels: Tensor, rows: Tensor, most: int) -> Tensor:
    """At most about `most` of the rows, as many of each class as possible, in their order.

    Of many classes the first ones, those with two items or more before all others: they can be
    searched for.
    """
    if len(rows) <= most:
        return rows
    order = labels[rows].argsort(stable=True)
    _, group, sizes = torch.unique(labels[rows][order], return_inverse=True, return_counts=True)
    turn = torch.arange(len(rows)) - (sizes.cumsum(0) - sizes)[group]  # first of its class is 0
    each = max(2, most // len(sizes))
    place = (sizes == 1).int().argsort(stable=True).argsort()  # those with several items first
    chosen = (turn < each) & (place[group] < max(2, most // each))
    return rows[order[chosen].sort().values]


@torch.no_grad()
def query_scores(embeddings: Tensor, labels: Tensor) -> QueryScores:
    """Score embeddings (N, D) to choose by, each item searched among the others.

    In single precision, ties as they come: a tenth of the time of `evaluate.per_query`, which
    decides what is close in double, as reported scores are.
    """
    x = normalize(embeddings)
    _, group, sizes = torch.unique(labels, return_inverse=True, return_counts=True)
    relatives = (sizes - 1)[group]  # R of each item
    most = int(relatives.max())
    rank = torch.arange(1, most + 1)
    recall, map_at_r = x.new_zeros(len(x)), x.new_zeros(len(x))
    for rows in torch.split(torch.arange(len(x)), BLOCK):
        s = x[rows] @ x.T
        s[torch.arange(len(rows)), rows] = -torch.inf
        hits = (group[s.topk(most).indices] == group[rows, None]).float()  # (B, most)
        recall[rows] = hits[:, 0]
        hits *= rank <= relatives[rows, None]
        precisions = hits.cumsum(1) / rank * hits
        map_at_r[rows] = precisions.sum(1) / relatives[rows].clamp_min(1)
    queries = relatives > 0
    return QueryScores(recall[queries].double(), map_at_r[queries].double(), labels[queries])


# The recipe of the closed form


class Recipes:
    """The closed form of items z (N, k) on every fold, and the recipe that suits them.

    dim: of the head that is asked for; None is left to the folds.
    """

    def __init__(
        self, z: Tensor, labels: Tensor, folds: Sequence[Fold], root: bool, dim: int | None
    ) -> None:
        self.z, self.labels, self.folds, self.root = z, labels, folds, root
        width = z.shape[1]
        self.dims = (dim,) if dim is not None else (width, *(d for d in FEWER_DIMS if d < width))
        self._parts = [ClassSums.of(z[f.held_out], labels[f.held_out]) for f in folds]
        self._scores: dict[tuple[Recipe, int], list[Tensor]] = {}

    def sums(self, without: int | None = None) -> ClassSums:
        """Return the sums of all items, or of those outside a fold."""
        if not self.folds:
            return ClassSums.of(self.z, self.labels)
        first, *rest = [part for k, part in enumerate(self._parts) if k != without]
        for part in rest:
            first = first + part
        return first

    def best(self, without: int | None = None) -> tuple[Recipe, int]:
        """Return recipe and dimension by all folds, or by all but one; without folds the safer."""
        if not self.folds:
            return Recipe(self.root), self.dims[0]
        dim = self.dims[0]
        shrunk = [(Recipe(self.root, a, EMPHASES[0]), dim) for a in SHRINKAGES]
        recipe, _ = self._first_or_better(shrunk, without)
        stretched = [(replace(recipe, emphasis=e), dim) for e in EMPHASES]
        recipe, _ = self._first_or_better(stretched, without)
        return self._first_or_better([(recipe, dim) for dim in self.dims], without)

    def _first_or_better(
        self, candidates: list[tuple[Recipe, int]], without: int | None
    ) -> tuple[Recipe, int]:
        """Return the first unless another is better by more than a standard error over classes.

        The best mean alone would follow the noise of the folds (docs/lab).
        """
        self._score([each for each in candidates if each not in self._scores])
        table = torch.stack(
            [
                torch.cat([part for k, part in enumerate(self._scores[each]) if k != without])
                for each in candidates
            ]
        )  # (candidates, classes)
        gains = table[1:] - table[0]
        if not len(gains) or gains.shape[1] < 2:
            return candidates[0]
        low = gains.mean(1) - gains.std(1) / gains.shape[1] ** 0.5
        return candidates[1 + int(low.argmax())] if low.max() > 0 else candidates[0]

    def _score(self, candidates: Sequence[tuple[Recipe, int]]) -> None:
        """Keep the mean objective of every held-out class by each candidate, fold by fold."""

        def score(k: int) -> list[Tensor]:
            sums, found = self.sums(without=k), []
            rows = sample_rows(self.labels, self.folds[k].held_out, SAMPLE)
            for recipe, dim in candidates:
                # All directions give the same cosines however they are turned.
                m = closed_form(sums, recipe, None if dim == self.z.shape[1] else dim)
                scores = query_scores((self.z[rows] - sums.mean) @ m, self.labels[rows])
                group = torch.unique(scores.labels, return_inverse=True)[1]
                found.append(torch.bincount(group, scores.objective) / torch.bincount(group))
            return found

        by_fold = map_in_threads(score, range(len(self.folds)))
        self._scores |= {each: [*of] for each, *of in zip(candidates, *by_fold, strict=True)}
