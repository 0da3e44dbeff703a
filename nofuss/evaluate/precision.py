"""MAP@R, R-precision (Musgrave et al. 2020), MAP and precision@k, from the ranks of all positives.

R is the number of items of the query's class, itself left out. With the positives in order of
distance and m(r) the items of other classes at least as close as the r-th, its rank is r + m(r):

    precision@k = #{r : r + m(r) ≤ k} / k        R-precision is that at k = R
    MAP         = Σ r / (r + m(r)) / R           MAP@R the same over {r : r + m(r) ≤ R} alone

so only the m(r) are counted (ranks.py).
"""

from collections.abc import Sequence
from typing import NamedTuple, Unpack

import torch
from torch import Tensor

from nofuss.evaluate.ranks import BLOCK, positive_ranks
from nofuss.evaluate.recall import Average, average_of, checked_ks
from nofuss.evaluate.retrieval import Options, retrieval
from nofuss.geometry import Array


class Precisions(NamedTuple):
    """Scores of each query, (N,), in the caller's order; NaN for items that are no query."""

    map_at_r: Tensor
    r_precision: Tensor
    precision: dict[int, Tensor]  # by k
    average: Tensor | None  # the average precision over all ranks, with `all_ranks`


def map_at_r(
    embeddings: Array, labels: Array, *, average: Average = "queries", **options: Unpack[Options]
) -> float:
    """Return MAP@R: the mean over the queries of the average precision within the R nearest."""
    return average_of(precisions(embeddings, labels, **options).map_at_r, labels, average)


def r_precision(
    embeddings: Array, labels: Array, *, average: Average = "queries", **options: Unpack[Options]
) -> float:
    """Return the mean over the queries of the fraction of their class among the R nearest."""
    return average_of(precisions(embeddings, labels, **options).r_precision, labels, average)


def precision_at_k(
    embeddings: Array,
    labels: Array,
    ks: Sequence[int] = (1, 10),
    *,
    average: Average = "queries",
    **options: Unpack[Options],
) -> dict[int, float]:
    """Return the mean over the queries of the fraction of their class among the k nearest, by k.

    A class with fewer than k other items can't reach 1.
    """
    by_k = precisions(embeddings, labels, ks=ks, **options).precision
    return {k: average_of(scores, labels, average) for k, scores in by_k.items()}


def mean_average_precision(
    embeddings: Array, labels: Array, *, average: Average = "queries", **options: Unpack[Options]
) -> float:
    """Return MAP: the mean over the queries of the average precision over all ranks."""
    scores = precisions(embeddings, labels, all_ranks=True, **options).average
    assert scores is not None
    return average_of(scores, labels, average)


def precisions(
    embeddings: Array,
    labels: Array,
    *,
    ks: Sequence[int] = (),
    all_ranks: bool = False,
    block: int = BLOCK,
    **options: Unpack[Options],
) -> Precisions:
    """Return the scores of every query; queries, gallery and ties are as in `recall_at_k`.

    `all_ranks` also counts the items before positives beyond the first R and the largest k, which
    takes several times as long.
    """
    ks = checked_ks(ks) if len(ks) else []
    task = retrieval(embeddings, labels, **options)
    n, total = len(task.left), task.positives
    scores = torch.zeros((3 + len(ks), n), dtype=torch.float64, device=total.device)
    limit = None if all_ranks else total.clamp_min(max(ks, default=0))
    for rows, ranks in positive_ranks(task, limit, block):  # (b, R)
        r = torch.arange(1, ranks.shape[1] + 1, device=ranks.device)
        hit = ranks <= total[rows, None]
        at_hit = (r / ranks).masked_fill_(r > total[rows, None], 0)  # precision at each positive
        scores[0, rows] = (at_hit * hit).sum(1)
        scores[1, rows] = hit.sum(1).double()
        scores[2, rows] = at_hit.sum(1)
        for i, k in enumerate(ks, start=3):
            # Times R, since all rows of `scores` are divided by R below.
            scores[i, rows] = (ranks <= k).sum(1).double() * total[rows] / k
    at_r, r_precisions, average, *at_k = map(task.back, scores / total)  # 0 / 0 is NaN: no query
    return Precisions(
        at_r, r_precisions, dict(zip(ks, at_k, strict=True)), average if all_ranks else None
    )
