"""Recall@K and MRR from the rank of the first positive.

Recall@K is the fraction of queries with an item of their class among the K nearest, MRR the mean of
1 / rank. Neither needs a list of neighbours: find each query's nearest positive, then count the
items of other classes that are at least as close (ranks.py). Memory is a few blocks, whatever N and
K; ties count as wrong.
"""

from collections.abc import Sequence
from typing import Literal, Unpack

import torch
from torch import Tensor

from nofuss.evaluate.ranks import BLOCK, first_ranks
from nofuss.evaluate.retrieval import Options, classes_of, retrieval
from nofuss.geometry import Array

Average = Literal["queries", "classes"]


def recall_at_k(
    embeddings: Array,
    labels: Array,
    ks: Sequence[int] = (1, 2, 4, 8),
    *,
    average: Average = "queries",
    **options: Unpack[Options],
) -> dict[int, float]:
    """Return the fraction of queries with an item of their class among the K nearest, for every K.

    A query is left out of its own neighbours by index. An item whose class has no other item stays
    in the gallery and is no query. With `gallery` and `gallery_labels`, the embeddings are queries
    only; `query_rows` says which rows of the gallery they are, if it holds them too. Distances are
    Euclidean on the unit sphere, or between the vectors as given with `normalize=False`. A tie with
    a wrong class counts as wrong. `average="classes"` is the mean of the classes' means.
    """
    ranks = ranks_of_first_positive(embeddings, labels, **options)
    return recall_of_ranks(ranks, ks, labels, average)


def mean_reciprocal_rank(
    embeddings: Array, labels: Array, *, average: Average = "queries", **options: Unpack[Options]
) -> float:
    """Return MRR: the mean over the queries of 1 / rank of the first item of their class."""
    ranks = ranks_of_first_positive(embeddings, labels, **options)
    return average_of(reciprocal(ranks), labels, average)


def average_of(scores: Tensor, labels: Array | None, average: Average = "queries") -> float:
    """Return the mean of the queries' scores (N,), or the mean of their classes' means.

    NaN marks items that are no query. Over queries, large classes weigh more; over classes, all
    weigh the same.
    """
    if average == "queries":
        return float(scores.nanmean())
    if average != "classes":
        raise ValueError(f"unknown average {average!r}; choose from queries, classes")
    assert labels is not None
    return float(class_means(scores, classes_of(labels, len(scores))).nanmean())


def class_means(scores: Tensor, classes: Tensor) -> Tensor:
    """Return the mean score of each class 0 … C − 1, NaN where none of its items is a query."""
    is_query = ~scores.isnan().cpu()
    of_queries = classes[is_query]
    count = int(classes.max()) + 1
    sums = torch.bincount(of_queries, scores.cpu()[is_query].double(), minlength=count)
    return sums / torch.bincount(of_queries, minlength=count)


def recall_of_ranks(
    ranks: Tensor, ks: Sequence[int], labels: Array | None = None, average: Average = "queries"
) -> dict[int, float]:
    """Return Recall@K from the ranks of the first positives; 0 marks an item that is no query."""
    return {k: average_of(hits(ranks, k), labels, average) for k in checked_ks(ks)}


def checked_ks(ks: Sequence[int]) -> list[int]:
    """Check the K: whole numbers from 1 up."""
    if not len(ks) or any(k != int(k) or k < 1 for k in ks):
        raise ValueError(f"ks are {list(ks)}; expected whole numbers from 1 up")
    return [int(k) for k in ks]


def hits(ranks: Tensor, k: int) -> Tensor:
    """Return 1.0 for queries whose class is among their K nearest, else 0.0; NaN for no query."""
    return (ranks <= k).double().masked_fill_(ranks == 0, torch.nan)


def reciprocal(ranks: Tensor) -> Tensor:
    """Return 1 / rank, NaN for items that are no query."""
    return (1 / ranks.double()).masked_fill_(ranks == 0, torch.nan)


def ranks_of_first_positive(
    embeddings: Array, labels: Array, *, block: int = BLOCK, **options: Unpack[Options]
) -> Tensor:
    """Return the smallest K that finds each query's class, (N,), from 1 up; 0 for no query.

    It is one more than the number of items of other classes that are at least as close as the
    nearest item of the query's class.
    """
    task = retrieval(embeddings, labels, **options)
    return task.back(first_ranks(task, block))
