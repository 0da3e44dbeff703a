"""Recall@K and MRR from the rank of the first positive, counted over blocks of the similarities.

Recall@K is the share of queries with an item of their class among the K nearest, MRR the mean of
1 / rank. Neither needs a list of neighbours: find each query's nearest positive, then count the
items of other classes that are at least as close. Without a separate gallery the matrix is
symmetric, so half of its blocks serve both sides. Memory is a few blocks, whatever N and K; ties
count as wrong. Several processes take the strips of blocks in turns and add their counts.
"""

from collections.abc import Sequence
from typing import Unpack

import torch
from torch import Tensor

from nofuss.evaluate.averages import Average, average_of
from nofuss.evaluate.task import BLOCK, FARTHEST, Options, Retrieval, blocks, retrieval
from nofuss.geometry import Array


def recall_at_k(
    embeddings: Array,
    labels: Array,
    ks: Sequence[int] = (1, 2, 4, 8),
    *,
    average: Average = "queries",
    **options: Unpack[Options],
) -> dict[int, float]:
    """Return the share of queries with an item of their class among the K nearest, for every K.

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
    nearest = _nearest_positives(task, block)
    ranks = _count_within(task, nearest, block).long() + 1
    return task.back(ranks.mul_(task.positives > 0))


def _nearest_positives(task: Retrieval, block: int) -> Tensor:
    """Return squared distances to the nearest other item of the query's class; inf if none."""
    nearest = task.queries.scale.new_full((len(task.left),), torch.inf)
    for rows in blocks(0, len(task.left), block):
        span = task.gallery_span(rows)
        best = task.left.new_full((rows.stop - rows.start,), -torch.inf)
        for cols in blocks(span.start, span.stop, block):
            s = task.left[rows] @ task.right[cols].T
            task.hide_others(s, rows, cols)
            best = torch.maximum(best, s.amax(1))
            # Pairs that may be nearer than the best so far, since both similarities are rounded.
            low, high = task.band(task.distance(best.clamp_min(FARTHEST)), rows)
            i, j = _reaching(s, (best - 1.1 * (high - low)).clamp_min_(FARTHEST))
            squared = task.pairs(rows, cols, i, j)
            nearest[rows] = nearest[rows].scatter_reduce_(0, i, squared, "amin")
    return nearest


def _reaching(s: Tensor, low: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows and columns of the similarities (b, c) that reach their row's threshold.

    Mostly one in a row: the sum of its column numbers is then the column, found by a product.
    """
    reached = torch.ge(s, low[:, None], out=torch.empty_like(s))
    columns = torch.arange(s.shape[1], device=s.device, dtype=s.dtype)
    count, place = (reached @ torch.stack([torch.ones_like(columns), columns], 1)).T
    single, several = (count == 1).nonzero()[:, 0], (count > 1).nonzero()[:, 0]
    i, j = reached[several].nonzero(as_tuple=True)
    return torch.cat([single, several[i]]), torch.cat([place[single].long(), j])


class _Counter:
    """Counts, for each query, the items at most as far as its nearest positive."""

    def __init__(self, task: Retrieval, nearest: Tensor, block: int) -> None:
        self.task, self.reach = task, task.reach(nearest)
        is_query = task.positives > 0
        low, high = task.band(self.reach.masked_fill(~is_query, 0), slice(None))
        # No similarity reaches inf: nothing is counted for items that are no query.
        self.low, self.high = (t.masked_fill_(~is_query, torch.inf) for t in (low, high))
        self.count = torch.zeros_like(low)
        self.near, self.compared = low.new_empty(2, block * block)  # fresh memory is slow
        self.ones = low.new_ones(block)
        self.block, self.width, self.filled = block, block, 0
        self.waiting: list[tuple[int, Tensor, slice]] = []

    def add(self, rows: slice, low: Tensor, cols: slice, s: Tensor) -> None:
        """Add a block of similarities; `low` is this counter's, of the rows.

        In most blocks few queries have an item near enough, and a maximum finds them. They are
        collected and counted together, since on so few numbers a call costs more than its work.
        """
        some = (s.amax(1) >= low).nonzero()[:, 0]
        count, width = len(some), s.shape[1]
        if not count:
            return
        if self.filled + count > self.block or width != self.width:
            self.flush()
            self.width = width
        place = slice(self.filled * width, (self.filled + count) * width)
        torch.index_select(s, 0, some, out=self.near[place].view(count, width))
        self.waiting.append((rows.start, some, cols))
        self.filled += count

    def flush(self) -> None:
        """Count what has been collected."""
        if not self.filled:
            return
        size, shape = self.filled * self.width, (self.filled, self.width)
        near, compared = self.near[:size].view(shape), self.compared[:size].view(shape)
        rows = torch.cat([some + start for start, some, _ in self.waiting])
        low, high, ones = self.low[rows, None], self.high[rows, None], self.ones[: self.width]
        # Comparing into floats and summing by a product is faster than going through booleans.
        surely = torch.ge(near, high, out=compared) @ ones
        perhaps = torch.ge(near, low, out=compared) @ ones
        self.count.index_add_(0, rows, surely)  # floats, exact up to 2²⁴ items
        if not torch.equal(surely, perhaps):
            self._decide(rows, near)
        self.waiting, self.filled = [], 0

    def _decide(self, rows: Tensor, near: Tensor) -> None:
        """Count the pairs that float32 leaves undecided by their distance in float64."""
        is_open = (near >= self.low[rows, None]) & (near < self.high[rows, None])
        first = 0
        for _, some, cols in self.waiting:
            part = slice(first, first + len(some))
            i, j = is_open[part].nonzero(as_tuple=True)
            if len(i):
                own = rows[part]
                within = self.task.pairs(own, cols, i, j) <= self.reach[own[i]]
                self.count.index_add_(0, own[i], within.to(self.count))
            first = part.stop


def _count_within(task: Retrieval, nearest: Tensor, block: int) -> Tensor:
    """Return, (N,), how many items of other classes are at most as far as the nearest positive."""
    counter = _Counter(task, nearest, block)
    product = task.left.new_empty(block * block)  # reused: fresh memory is slow
    # Views made once: at this block size slicing again would cost a tenth of the product.
    strips = [(i, task.left[i], counter.low[i]) for i in blocks(0, len(task.left), block)]
    gallery = [(j, task.right[j].T) for j in blocks(0, len(task.right), block)]
    for i, (rows, x, low) in enumerate(strips):
        span = task.gallery_span(rows)
        for j in range(i if task.symmetric else 0, len(gallery)):
            cols, y = gallery[j]
            r, c = len(x), y.shape[1]
            s = torch.mm(x, y, out=product[: r * c].view(r, c))
            if cols.start < span.stop and span.start < cols.stop:
                task.hide_positives(s, rows, cols)
            counter.add(rows, low, cols, s)
            if task.symmetric and i != j:  # the block's mirror image, whose queries are the columns
                counter.add(cols, strips[j][2], rows, s.T)
    counter.flush()
    return counter.count
