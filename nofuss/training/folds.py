"""Folds of the training classes: choices are made on classes that the model has not seen.

A fold holds out whole classes, and neighbours in the order of the data together: where the order
means something (CUB lists relatives side by side, nested folders group them) a held-out class has
no sibling in training, as new classes will have none; where it means nothing it does no harm.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from nofuss.data.split import FEWEST_CLASSES
from nofuss.evaluate.protocol import QueryScores, scorable
from nofuss.geometry import normalize

FOLDS = 4
BLOCK = 1024


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
