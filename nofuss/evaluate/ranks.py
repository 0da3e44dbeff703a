"""How many items of other classes lie before each positive of a query: one walk over all pairs.

A positive's squared distance, with the rounding of float64, is a threshold; an item of another
class at most as far ranks before it (ties count as wrong). The r-th positive in order of distance
thus has the rank r + m(r), with m(r) the items within its threshold. Recall@K needs the nearest
positive alone, MAP@R and MAP all of them: `count` shows the similarities of all pairs, block by
block, to a `Counter` in each thread. Where the queries are the gallery, a block serves its rows and
its columns: half of the products suffice.

A block costs its product and a maximum, unless an item is near enough to matter. With a limit on
ranks it matters only while it is closer than a positive whose rank can still be within the limit:
after a few blocks hardly any item is.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from nofuss.distributed.threads import blocks, in_threads
from nofuss.evaluate.retrieval import FARTHEST, Retrieval
from nofuss.geometry import exact_squared_distances

BLOCK = 512  # rows and columns of a tile, 1 MB
TILES = 4  # in a block, so that its product and its maxima outweigh the calls
WHOLE = 2**21  # thresholds that are held at once; more are counted strip by strip of queries
LEAST = 4096  # distances to positives that are computed at once, where classes are small
FEW = 32  # thresholds a query up to which a comparison with each is faster than a search
DENSE = 1 / 16  # fraction of a class that are positives from which on all distances are computed


def positive_ranks(
    task: Retrieval, limit: Tensor | None = None, block: int = BLOCK
) -> Iterator[tuple[slice, Tensor]]:
    """Yield strips of queries and the ranks (b, R) of their positives, inf past a query's last.

    With a limit (n,), a rank above it is only known to be above it.
    """
    n, most = len(task.left), max(1, int(task.positives.max()))
    for rows in blocks(0, n, n if n * most <= WHOLE else max(1, WHOLE // most)):
        part = task if rows.stop - rows.start == n else task.strip(rows)
        squared = distances_to_positives(part)  # (b, R)
        within = count(part, squared, None if limit is None else limit[rows], block)
        r = torch.arange(1, squared.shape[1] + 1, device=squared.device)
        ranks = r + within.double()
        yield rows, ranks.masked_fill_(squared.isinf(), torch.inf)


def first_ranks(task: Retrieval, block: int = BLOCK) -> Tensor:
    """Return the rank of each query's nearest positive, (n,), from 1 up; 0 for no query."""
    within = count(task, nearest_positives(task, block)[:, None], None, block)
    return (within[:, 0].long() + 1).mul_(task.positives > 0)


def count(
    task: Retrieval, thresholds: Tensor, limit: Tensor | None = None, block: int = BLOCK
) -> Tensor:
    """Return m(r), (n, R): the items of other classes within thresholds (n, R), rising.

    Thresholds are squared distances, inf past a query's last. Each thread takes strips of queries
    and counts on its own; whole numbers add up to the same in any order.
    """
    shared = Thresholds.of(task, thresholds)

    def walk(strips: Iterator[slice]) -> Tensor:
        counter = Counter(task, shared, limit, block)
        width = counter.width
        product = task.left.new_empty(block * TILES * width)  # reused: fresh memory is slow
        for rows in strips:
            x, span = task.left[rows], task.gallery_span(rows)
            start = rows.start if task.symmetric else 0
            for cols in blocks(start, len(task.right), TILES * width):
                y = task.right[cols]
                tiles = -(-len(y) // width)
                whole = product[: len(x) * tiles * width].view(len(x), tiles * width)
                s = torch.mm(x, y.T, out=whole[:, : len(y)])
                whole[:, len(y) :] = -torch.inf  # fills the last tile
                own = slice(max(cols.start, span.start), min(cols.stop, span.stop))
                if own.start < own.stop:
                    inside = s[:, own.start - cols.start : own.stop - cols.start]
                    task.hide_positives(inside, rows, own)
                counter.add(rows, cols, whole)
                # Where the queries are the gallery, the columns are queries too: those to the
                # right of the diagonal tile, which holds its pairs both ways.
                if task.symmetric and cols.stop > rows.stop:
                    others = slice(max(cols.start, rows.stop), cols.stop)
                    counter.add(others, rows, s.T[others.start - cols.start :])
        counter.flush()
        return counter.between

    parts = in_threads(walk, blocks(0, len(task.left), block))
    return sum(parts[1:], parts[0]).cumsum(1)[:, :-1]


class Thresholds(NamedTuple):
    """Squared distances as similarities, (n, R), negated so that they rise as distances do."""

    reach: Tensor
    """The squared distances with the rounding of float64; inf past a query's last."""
    perhaps: Tensor
    """Up to here an item may be within the threshold."""
    surely: Tensor
    """Up to here it is."""

    @classmethod
    def of(cls, task: Retrieval, squared: Tensor) -> "Thresholds":
        """Return the similarities of squared distances (n, R), inf past a query's last."""
        is_real = squared.isfinite()
        reach = task.reach(squared)
        low, high = task.band(reach.masked_fill(~is_real, 0.0), slice(None))
        # What is within a threshold is within all later ones, so `surely` may rise by its maximum
        # so far; by itself it does not where positives are closer together than the rounding of
        # float32.
        surely = (-high).cummax(1).values
        return cls(reach, *(t.masked_fill_(~is_real, torch.inf) for t in (-low, surely)))


class Counter:
    """Counts, for each query, the items within its thresholds that one thread has seen."""

    def __init__(
        self, task: Retrieval, thresholds: Thresholds, limit: Tensor | None, block: int
    ) -> None:
        self.task, self.limit = task, limit
        self.reach, self.perhaps, self.surely = thresholds
        self.positives = self.reach.isfinite().sum(1)
        n, number = self.surely.shape
        # Tiles as wide as the thresholds are many, so that their work outweighs the bookkeeping.
        self.width = block if task.symmetric else max(block, number)
        # Items from threshold r − 1 up to r, the last place for those past all: floats, exact up
        # to 2²⁴ items.
        self.between = self.surely.new_zeros(n, number + 1)
        self.floor = torch.empty_like(self.surely[:, 0])
        self._raise_floor(slice(None))
        self.most = TILES * block  # rows of tiles that are collected
        self.near, self.compared = self.surely.new_empty(2, self.most * self.width)
        self.ones = self.surely.new_ones(TILES * self.width)
        self.columns, self.filled = self.width, 0
        self.waiting: list[tuple[Tensor, Tensor]] = []

    def closer(self, rows: Tensor | slice) -> Tensor:
        """Return m(r) of some queries, (b, R), of the items seen so far."""
        return self.between[rows].cumsum(1)[:, :-1]

    def add(self, rows: slice, cols: slice, s: Tensor) -> None:
        """Add a block of similarities.

        In most tiles few queries have an item near enough, and a maximum finds them. They are
        collected and counted together, since on so few numbers a call costs more than its work.
        """
        columns = min(self.width, s.shape[1])
        tiles = s.shape[1] // columns
        flat = s if tiles == 1 else s.view(-1, columns)  # (b · tiles, columns)
        reached = flat.amax(1).view(-1, tiles) >= self.floor[rows, None]
        some = reached.view(-1).nonzero()[:, 0]
        if not len(some):
            return
        if columns != self.columns or (self.filled + len(some)) > self.most:
            self.flush()
            self.columns = columns
        place = slice(self.filled * columns, (self.filled + len(some)) * columns)
        torch.index_select(flat, 0, some, out=self.near[place].view(len(some), columns))
        self.waiting.append((some // tiles + rows.start, some % tiles * columns + cols.start))
        self.filled += len(some)

    def flush(self) -> None:
        """Count what has been collected."""
        if not self.filled:
            return
        near = self.near[: self.filled * self.columns].view(self.filled, self.columns)
        rows, first = (torch.cat(part) for part in zip(*self.waiting, strict=True))
        if self.surely.shape[1] <= FEW:
            surely, perhaps = (self._within(t[rows], near) for t in (self.surely, self.perhaps))
            none = torch.zeros_like(surely[:, :1])
            self.between[:, :-1].index_add_(0, rows, surely.diff(prepend=none))
            open_ = (surely != perhaps).any(1).nonzero()[:, 0]
            if len(open_):
                own, some = rows[open_], near[open_]
                place = torch.searchsorted(self.surely[own], -some)
                self._decide(own, first[open_], some, place)
        else:
            place = torch.searchsorted(self.surely[rows], -near)
            self._put(rows[:, None].expand_as(place), place, 1.0)
            self._decide(rows, first, near, place)
        if self.limit is not None:
            self._raise_floor(rows)
        self.waiting, self.filled = [], 0

    def _within(self, thresholds: Tensor, near: Tensor) -> Tensor:
        """Return how many similarities (m, w) reach each of the (negated) thresholds (m, R)."""
        compared, ones = self.compared[: near.numel()].view(near.shape), self.ones[: near.shape[1]]
        # Comparing into floats and summing by a product is faster than going through booleans.
        return torch.stack(
            [torch.ge(near, -t[:, None], out=compared) @ ones for t in thresholds.unbind(1)], 1
        )

    def _put(self, rows: Tensor, place: Tensor, number: float) -> None:
        """Add a number to some places of some rows, of the same shape."""
        cells = (rows * self.between.shape[1] + place).view(-1)
        self.between.view(-1).index_add_(0, cells, self.between.new_full((len(cells),), number))

    def _decide(self, rows: Tensor, first: Tensor, near: Tensor, place: Tensor) -> None:
        """Decide by distances in float64 what the rounding of float32 leaves open.

        near: (m, w) similarities of queries `rows` (m,) to the items from `first` (m,) on; place:
        (m, w) the threshold that each was counted at. It may be within earlier ones.
        """
        before = self.perhaps[rows].gather(1, (place - 1).clamp_min(0))
        is_open = (before >= -near) & (place > 0) & (near >= self.floor[rows, None])
        i, j = is_open.nonzero(as_tuple=True)
        if len(i):
            row, counted = rows[i], place[i, j]
            exact = self._first_reaching(row, self.task.pairs(row, first[i] + j), counted)
            self._put(row, exact, 1.0)
            self._put(row, counted, -1.0)

    def _first_reaching(self, rows: Tensor, squared: Tensor, stop: Tensor) -> Tensor:
        """Return the first threshold before `stop` that each distance (P,) is within, or `stop`.

        By bisection: where many are equal, each would go far back step by step.
        """
        start = torch.zeros_like(stop)
        while (start < stop).any():
            middle = (start + stop) // 2
            is_within = squared <= self.reach[rows, middle.clamp_max(self.reach.shape[1] - 1)]
            stop = torch.where(is_within, middle, stop)
            start = torch.where(is_within, start, middle + 1).minimum(stop)
        return stop

    def _raise_floor(self, rows: Tensor | slice) -> None:
        """Set the similarity from which an item matters: to the last positive that still does."""
        alive = self.positives[rows]
        if self.limit is not None:  # r + m(r) rises with r, so those within the limit are the first
            r = torch.arange(1, self.surely.shape[1] + 1, device=self.surely.device)
            within = r + self.closer(rows) <= self.limit[rows, None]
            alive = torch.minimum(alive, within.sum(1))
        last = self.perhaps[rows].gather(1, (alive - 1).clamp_min(0)[:, None])[:, 0]
        self.floor[rows] = torch.where(alive > 0, -last, torch.inf)


def nearest_positives(task: Retrieval, block: int = BLOCK) -> Tensor:
    """Return squared distances to the nearest other item of the query's class; inf if none."""
    nearest = task.queries.scale.new_full((len(task.left),), torch.inf)

    def find(strips: Iterator[slice]) -> None:
        for rows in strips:
            span = task.gallery_span(rows)
            best = task.left.new_full((rows.stop - rows.start,), -torch.inf)
            for cols in blocks(span.start, span.stop, block):
                s = task.left[rows] @ task.right[cols].T
                task.hide_others(s, rows, cols)
                best = torch.maximum(best, s.amax(1))
                # Pairs that may be nearer than the best so far, since both are rounded.
                low, high = task.band(task.distance(best.clamp_min(FARTHEST)), rows)
                bar = (best - 1.1 * (high - low)).clamp_min_(FARTHEST)
                i, j = (s >= bar[:, None]).nonzero(as_tuple=True)
                squared = task.pairs(i + rows.start, j + cols.start)
                nearest[rows].scatter_reduce_(0, i, squared, "amin")

    in_threads(find, blocks(0, len(task.left), block))
    return nearest


def distances_to_positives(task: Retrieval) -> Tensor:
    """Return squared distances to the items of the query's class, rising, (n, R); inf past all."""
    first = torch.searchsorted(task.gallery_classes, task.classes)
    stop = torch.searchsorted(task.gallery_classes, task.classes, right=True)
    width = max(1, int((stop - first).max()))
    place = first[:, None] + torch.arange(width, device=first.device)  # (n, R + 1) in the gallery
    is_positive = (place < stop[:, None]) & (place != task.itself[:, None])
    place.clamp_max_(len(task.right) - 1)
    squared = torch.empty(place.shape, dtype=torch.float64, device=place.device)
    # About as many queries at once as a class has items: their positives lie close together.
    for rows in blocks(0, len(task.left), max(width, LEAST // width)):
        squared[rows] = _distances_at(task, rows, place[rows])
    squared.masked_fill_(~is_positive, torch.inf)  # other classes, the query itself, padding
    return squared.sort(1).values[:, : max(1, int(task.positives.max()))]


def _distances_at(task: Retrieval, rows: slice, place: Tensor) -> Tensor:
    """Return squared distances of queries to the items at `place` (b, R), from their classes on."""
    x, span = task.queries.points(rows), task.gallery_span(rows)
    if span.start == span.stop:  # the gallery has none of their classes
        return torch.full_like(place, torch.inf, dtype=torch.float64)
    # Both sides are sorted by class, so the positives lie in one span of the gallery. Where each
    # query needs a good part of it, all distances are cheaper than one difference a pair.
    if place.shape[1] > DENSE * (span.stop - span.start):
        within = (place - span.start).clamp_(0, span.stop - span.start - 1)
        return exact_squared_distances(x, task.gallery.points(span)).gather(1, within)
    difference = task.gallery.points(place.view(-1)).view(*place.shape, -1).sub_(x[:, None])
    return difference.square_().sum(2)
