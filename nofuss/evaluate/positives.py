"""The ranks of all positives of a strip of queries, exact as far as they matter.

The distances to the positives are few and computed in float64. Each item of another class then
lies between two of them; the cumulated counts are the m(r) by which the rank of the r-th positive
exceeds r. With a limit on ranks, an item matters only while it is closer than a positive whose rank
can still be within the limit: after a few blocks that is hardly any item, and a block costs its
product and a maximum.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from nofuss.evaluate.task import DENSE, Retrieval, blocks
from nofuss.geometry import exact_squared_distances

LEAST = 4096  # distances to positives that are computed at once, where classes are small


def ranks_of_positives(task: Retrieval, rows: slice, limit: Tensor | None, block: int) -> Tensor:
    """Return ranks (b, R) of the positives by distance, float64, inf past a query's last.

    With a limit (b,), a rank above it is only known to be above it.
    """
    squared = _sorted_distances(task, rows)  # (b, R)
    strip = _Strip(task, rows, squared, limit)
    span = task.gallery_span(rows)
    # A block as wide as the positives are many, so that its work outweighs the bookkeeping.
    x, width = task.left[rows], max(block, squared.shape[1])
    product = x.new_empty(len(x) * min(width, len(task.right)))  # reused: fresh memory is slow
    for cols in _growing(len(task.right), width):
        y = task.right[cols]
        s = torch.mm(x, y.T, out=product[: len(x) * len(y)].view(len(x), len(y)))
        if cols.start < span.stop and span.start < cols.stop:
            task.hide_positives(s, rows, cols)
        strip.add(s, cols)
    r = torch.arange(1, squared.shape[1] + 1, device=squared.device)
    return (r + strip.closer().double()).masked_fill_(squared.isinf(), torch.inf)


def _growing(stop: int, size: int) -> Iterator[slice]:
    """Yield slices up to `stop` that double up to `size`.

    Small ones first: a few items raise the similarity that later ones must reach to matter.
    """
    start, step = 0, min(32, size)
    while start < stop:
        yield slice(start, min(start + step, stop))
        start, step = start + step, min(2 * step, size)


def _sorted_distances(task: Retrieval, rows: slice) -> Tensor:
    """Return squared distances of a strip's queries to the items of their class, rising, (b, R)."""
    first = torch.searchsorted(task.gallery_classes, task.classes[rows])
    stop = torch.searchsorted(task.gallery_classes, task.classes[rows], right=True)
    width = max(1, int((stop - first).max()))
    place = first[:, None] + torch.arange(width, device=first.device)  # (b, R + 1) in the gallery
    is_positive = (place < stop[:, None]) & (place != task.itself[rows, None])
    place.clamp_max_(len(task.right) - 1)
    squared = torch.empty(place.shape, dtype=torch.float64, device=place.device)
    # About as many queries at once as a class has items: their positives lie close together.
    for piece in blocks(rows.start, rows.stop, max(width, LEAST // width)):
        at = slice(piece.start - rows.start, piece.stop - rows.start)
        squared[at] = _distances_at(task, piece, place[at])
    squared.masked_fill_(~is_positive, torch.inf)  # other classes, the query itself, padding
    return squared.sort(1).values[:, : max(1, int(task.positives[rows].max()))]


def _distances_at(task: Retrieval, rows: slice, place: Tensor) -> Tensor:
    """Return squared distances of queries to the items at `place` (b, R), from their classes on."""
    x, span = task.queries.points(rows), task.gallery_span(rows)
    # Both sides are sorted by class, so the positives lie in one span of the gallery. Where each
    # query needs a good part of it, all distances are cheaper than one difference a pair.
    if place.shape[1] > DENSE * (span.stop - span.start):
        within = (place - span.start).clamp_(0, span.stop - span.start - 1)
        return exact_squared_distances(x, task.gallery.points(span)).gather(1, within)
    difference = task.gallery.points(place.view(-1)).view(*place.shape, -1).sub_(x[:, None])
    return difference.square_().sum(2)


class _Strip:
    """Counts, for each query, how many of the items seen so far lie between which positives."""

    def __init__(self, task: Retrieval, rows: slice, squared: Tensor, limit: Tensor | None) -> None:
        self.task, self.rows = task, rows
        real = squared.isfinite()
        self.reach = task.reach(squared)  # rising, inf past a query's last
        low, high = task.band(self.reach.masked_fill(~real, 0.0), rows)
        # Negated, similarities rise as distances do, as searchsorted needs them.
        self.low, self.high = ((-t).masked_fill_(~real, torch.inf) for t in (low, high))
        b, width = squared.shape
        self.counts = squared.new_zeros(b, width + 1, dtype=torch.float32)  # from r − 1 to r
        r = torch.arange(1, width + 1, device=squared.device)
        # Rank r + m(r) ≤ limit: the largest m(r) with which r matters. −1 past a query's last.
        self.most = None if limit is None else (limit[:, None] - r).masked_fill_(~real, -1)
        self.floor = self._floor(real.sum(1), slice(None))

    def add(self, s: Tensor, cols: slice) -> None:
        """Count a block's items, similarities (b, c), between the positives."""
        # Most queries have no item near enough in a block: one maximum a row tells.
        some = (s.amax(1) >= self.floor).nonzero()[:, 0]
        if not len(some):
            return
        near, floor = s[some], self.floor[some, None]
        most = int((near >= floor).sum(1).max())
        at = torch.arange(near.shape[1], device=s.device).expand_as(near)
        if 2 * most < near.shape[1]:  # few in every row: leave the others out
            near, at = near.topk(most, 1)
        # By float32 alone: the first positive that is surely at least as far as the item. Items
        # below the floor are past all positives that matter.
        place = torch.searchsorted(self.high[some], -near)
        # The positive before may be so too, if the item is within its rounding: float64 decides.
        before = self.low[some].gather(1, (place - 1).clamp_min_(0))
        k, c = ((before >= -near) & (place > 0) & (near >= floor)).nonzero(as_tuple=True)
        if len(k):
            squared = self.task.pairs(some + self.rows.start, cols, k, at[k, c])
            place[k, c] = self._first_reaching(some[k], squared, place[k, c])
        added = self.counts.new_zeros(len(some), self.counts.shape[1])
        self.counts[some] += added.scatter_add_(
            1, place, torch.ones_like(near, dtype=torch.float32)
        )
        if self.most is not None:  # m(r) + r rises with r, so those that matter are the first
            alive = (self.closer(some) <= self.most[some]).sum(1)
            self.floor[some] = self._floor(alive, some)

    def closer(self, rows: Tensor | slice = slice(None)) -> Tensor:
        """Return m(r), (b, R), of the items seen so far."""
        return self.counts[rows].cumsum(1)[:, :-1]

    def _first_reaching(self, row: Tensor, squared: Tensor, place: Tensor) -> Tensor:
        """Return the first positive, `place` (P,) or before, as far as the distances (P,)."""
        while True:
            back = (self.reach[row, (place - 1).clamp_min(0)] >= squared) & (place > 0)
            if not back.any():
                return place
            place = place - back.long()

    def _floor(self, alive: Tensor, rows: Tensor | slice) -> Tensor:
        """Return the similarity from which an item can matter: to the last positive that does."""
        last = self.low[rows].gather(1, (alive - 1).clamp_min(0)[:, None])[:, 0]
        return torch.where(alive > 0, -last, torch.inf)
