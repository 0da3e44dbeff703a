"""Folds of the training classes: what a run chooses, it chooses on classes its model has not seen.

A fold holds out whole classes, and neighbours in the order of the data together: where the order
means something (CUB lists relatives side by side, nested folders group them) a held-out class has
no sibling in training, as new classes will have none; where it means nothing it does no harm.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from nofuss.evaluate.queries import per_query

FOLDS = 4
FEWEST_CLASSES = 4
"""Below, no two folds have two classes each to tell apart."""


@dataclass(frozen=True)
class Fold:
    """Rows of one fold, ascending, and those of all others."""

    held_out: Tensor
    others: Tensor


def class_folds(labels: Tensor, count: int = FOLDS) -> list[Fold]:
    """Split the items by class into `count` folds, or fewer; none below FEWEST_CLASSES."""
    classes = torch.unique(labels)
    count = min(count, len(classes) // 2)
    if len(classes) < FEWEST_CLASSES or count < 2:
        return []
    blocks = np.array_split(classes.numpy(), count)
    sides = [torch.isin(labels, torch.from_numpy(block)) for block in blocks]
    folds = [Fold(side.nonzero().flatten(), (~side).nonzero().flatten()) for side in sides]
    return folds if all(_has_queries(labels[fold.held_out]) for fold in folds) else []


def sample_rows(labels: Tensor, rows: Tensor, most: int) -> Tensor:
    """At most about `most` of the rows, as many of each class as possible, in their order."""
    if len(rows) <= most:
        return rows
    order = labels[rows].argsort(stable=True)
    _, group, sizes = torch.unique(labels[rows][order], return_inverse=True, return_counts=True)
    turn = torch.arange(len(rows)) - (sizes.cumsum(0) - sizes)[group]  # first of its class is 0
    each = max(2, most // len(sizes))
    chosen = (turn < each) & (group < max(2, most // each))  # many classes: the first ones
    return rows[order[chosen].sort().values]


@dataclass(frozen=True)
class QueryScores:
    """Scores of queries, one each: Recall@1 and MAP@R, and the class of each query."""

    recall: Tensor
    map_at_r: Tensor
    labels: Tensor

    @property
    def objective(self) -> Tensor:
        """What is chosen by: the first neighbour counts as much as all of them."""
        return (self.recall + self.map_at_r) / 2


def query_scores(embeddings: Tensor, labels: Tensor) -> QueryScores:
    """Score unit or raw embeddings (N, D), each item searched among the others."""
    found = per_query(embeddings, labels)
    return QueryScores(found.recall1, found.map_at_r, torch.as_tensor(found.labels))


def pooled(parts: list[QueryScores]) -> QueryScores:
    """The queries of all folds together."""
    return QueryScores(
        torch.cat([p.recall for p in parts]),
        torch.cat([p.map_at_r for p in parts]),
        torch.cat([p.labels for p in parts]),
    )


def _has_queries(labels: Tensor) -> bool:
    sizes = torch.unique(labels, return_counts=True)[1]
    return len(sizes) > 1 and int(sizes.max()) > 1
