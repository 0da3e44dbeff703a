"""Recall@K from the rank of the first positive, counted over blocks of the similarity matrix.

Recall@K is the share of queries with an item of their class among the K nearest. No list of
neighbours is needed for it: find each query's best positive, then count the items of other classes
that are at least as close. Without a separate gallery the matrix is symmetric, so half of its
blocks serve both their sides. Memory is a few blocks, whatever N and K; ties count as wrong.
Several processes take the strips of blocks in turns, and add their counts up.
"""

from collections.abc import Sequence
from itertools import islice

import torch
from torch import Tensor

from nofuss.evaluate.retrieval import BLOCK, Retrieval, blocks, retrieval
from nofuss.geometry import Array
from nofuss.processes import all_max, all_sum, rank, world


def recall_at_k(
    embeddings: Array,
    labels: Array,
    ks: Sequence[int] = (1, 2, 4, 8),
    *,
    gallery: Array | None = None,
    gallery_labels: Array | None = None,
    normalize: bool = True,
) -> dict[int, float]:
    """Share of queries with an item of their class among the K nearest, for every K at once.

    A query is left out of its own neighbours by index. An item whose class has no other item stays
    in the gallery and is no query. With `gallery`, the embeddings are queries only. Distances are
    Euclidean on the unit sphere, or between the vectors as given with `normalize=False`. A tie with
    a wrong class counts as wrong.
    """
    ranks = ranks_of_first_positive(
        embeddings, labels, gallery=gallery, gallery_labels=gallery_labels, normalize=normalize
    )
    return recall_of_ranks(ranks, ks)


def recall_of_ranks(ranks: Tensor, ks: Sequence[int]) -> dict[int, float]:
    """Recall@K from the ranks of the first positives, 0 marking what is no query."""
    if not ks or min(ks) < 1:
        raise ValueError(f"ks are {list(ks)}; expected whole numbers from 1 up")
    ranks = ranks[ranks > 0]
    return {int(k): (ranks <= k).double().mean().item() for k in ks}


def ranks_of_first_positive(
    embeddings: Array,
    labels: Array,
    *,
    gallery: Array | None = None,
    gallery_labels: Array | None = None,
    normalize: bool = True,
    block: int = BLOCK,
) -> Tensor:
    """The smallest K that finds each query's class, (N,), from 1 up; 0 for what is no query.

    One more than the items of other classes at least as close as the nearest item of the query's
    own class.
    """
    task = retrieval(
        embeddings,
        labels,
        gallery=gallery,
        gallery_labels=gallery_labels,
        normalize=normalize,
    )
    best = _best_positives(task, block)
    # What is no query has best −inf: +inf as its threshold keeps every count at zero.
    threshold = torch.where(task.positives > 0, best - task.tie_width(best, slice(None)), torch.inf)
    ranks = _count_at_least(task, threshold, block).long() + 1
    return task.back(ranks.mul_(task.positives > 0))


def _best_positives(task: Retrieval, block: int) -> Tensor:
    """The similarity of each query to the nearest other item of its class, −inf where none is."""
    best = task.left.new_full((len(task.left),), -torch.inf)
    for rows in islice(blocks(0, len(task.left), block), rank(), None, world()):
        span = task.gallery_span(rows)
        for cols in blocks(span.start, span.stop, block):
            s = task.left[rows] @ task.right[cols].T
            task.hide_others(s, rows, cols)
            best[rows] = torch.maximum(best[rows], s.amax(1))
    return all_max(best)


def _count_at_least(task: Retrieval, threshold: Tensor, block: int) -> Tensor:
    """For each query, the items of other classes whose similarity reaches its threshold, (N,).

    Counts are sums of float ones, exact up to 2²⁴ items: comparing in place and summing by a
    matrix-vector product is several times faster here than going through booleans.
    """
    counts = torch.zeros_like(threshold)
    ones = threshold.new_ones(block)
    product, compared = threshold.new_empty(2, block * block)  # reused: fresh memory is slow
    # Views made once: at this block size slicing anew would cost a tenth of the product.
    queries = [(task.left[i], threshold[i], counts[i]) for i in blocks(0, len(counts), block)]
    gallery = [task.right[j].T for j in blocks(0, len(task.right), block)]
    for i, (x, reach, count) in islice(enumerate(queries), rank(), None, world()):
        rows = slice(i * block, i * block + len(x))
        span = task.gallery_span(rows)
        for j in range(i if task.symmetric else 0, len(gallery)):
            r, c = len(x), gallery[j].shape[1]
            s = torch.mm(x, gallery[j], out=product[: r * c].view(r, c))
            cols = slice(j * block, j * block + c)
            if cols.start < span.stop and span.start < cols.stop:
                task.hide_positives(s, rows, cols)
            reached = torch.ge(s, reach[:, None], out=compared[: r * c].view(r, c))
            count.addmv_(reached, ones[:c])
            if task.symmetric and i != j:
                _, reach_back, count_back = queries[j]
                count_back.addmv_(s.ge_(reach_back).T, ones[:r])
    return all_sum(counts)
