"""Scores of single queries, for paired comparisons of two models and for finding hard classes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Unpack

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nofuss.evaluate.checked import vectors_of
from nofuss.evaluate.precision import precisions
from nofuss.evaluate.recall import ranks_of_first_positive
from nofuss.evaluate.task import Options
from nofuss.geometry import Array


@dataclass(frozen=True)
class QueryScores:
    """Scores of queries, one each: Recall@1 and MAP@R, and the class of each query."""

    recall: Tensor
    map_at_r: Tensor
    labels: Tensor

    @property
    def objective(self) -> Tensor:
        """Return what models are chosen by: the mean of Recall@1 and MAP@R."""
        return (self.recall + self.map_at_r) / 2


def pooled(parts: Sequence[QueryScores]) -> QueryScores:
    """Return the queries of all parts together."""
    return QueryScores(
        torch.cat([part.recall for part in parts]),
        torch.cat([part.map_at_r for part in parts]),
        torch.cat([part.labels for part in parts]),
    )


class PerQuery(NamedTuple):
    """Scores of each query, (Q,), in the caller's order, without items alone in their class."""

    rows: Tensor  # the row of each query in the embeddings
    labels: NDArray[np.generic]  # its label, as given
    recall1: Tensor  # 1.0 where the nearest other item is of its class, else 0.0
    map_at_r: Tensor  # the average precision within its R nearest

    @property
    def scores(self) -> QueryScores:
        """Return the scores without their rows, names of classes as numbers."""
        labels = self.labels
        if labels.dtype.kind not in "biu":  # names
            labels = np.unique(labels, return_inverse=True)[1]
        return QueryScores(self.recall1, self.map_at_r, torch.as_tensor(labels))


def per_query(embeddings: Array, labels: Array, **options: Unpack[Options]) -> PerQuery:
    """Return Recall@1 and average precision at R of each query; their means are the overall scores.

    options: a gallery and whether to normalize, as for `evaluate`. The rows depend on the labels
    alone: two models' scores of the same items align, as `paired_difference` needs them.
    """
    x = vectors_of(embeddings)
    ranks = ranks_of_first_positive(x, labels, **options)
    return of_queries(ranks, precisions(x, labels, **options).map_at_r, labels)


def of_queries(ranks: Tensor, average: Tensor, labels: Array) -> PerQuery:
    """Pick the queries among all items: those whose first positive has a rank."""
    ranks, average = ranks.cpu(), average.cpu()
    rows = (ranks > 0).nonzero()[:, 0]
    names = labels.detach().cpu().numpy() if isinstance(labels, Tensor) else np.asarray(labels)
    return PerQuery(rows, names[rows.numpy()], (ranks[rows] == 1).double(), average[rows])
