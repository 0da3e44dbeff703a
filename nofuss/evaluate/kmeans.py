"""K-means for many clusters: k-means++ seeds, lean Lloyd, Hartigan's exchanges.

- Lloyd is exact but lean: a centroid is rescored only when its members changed, and a vector is
  compared with all centroids only when its own moved away from it.
- Lloyd stops where no vector is nearer to another centroid. Moving a single vector from cluster a
  to b changes the inertia by n_b/(n_b + 1)·d_b² − n_a/(n_a − 1)·d_a² (Hartigan 1975), which can
  still be a gain, often so when clusters are small. `refine` makes such moves until a round gains
  less than `TOLERANCE`. With five vectors a cluster this lowers the inertia by a tenth, more than
  any seeding does; with hundreds it changes next to nothing. Small clusters skip Lloyd for it.

Everything is blocked: memory is O(N·D + block²).
"""

from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor

from nofuss.distributed.processes import merge_rows, share
from nofuss.evaluate.checked import scaled_to_one, times_power_of_two, vectors_of
from nofuss.evaluate.seeding import choose_seeds
from nofuss.evaluate.task import blocks
from nofuss.geometry import Array

BLOCK = 384
TOLERANCE = 1e-2  # a round of exchanges that lowers the inertia by less is the last
SMALL = 16  # vectors a cluster below which exchanges do all that Lloyd would, and more
SUBROUNDS = 16  # exchanges tried on one scoring of all vectors
SPREAD = 2**24  # pairs from which on several processes share a scoring

Seeding = Literal["k-means++", "random"]


def kmeans(
    vectors: Array,
    k: int,
    *,
    seed: int,
    restarts: int = 1,
    iterations: int = 100,
    seeding: Seeding = "k-means++",
    refine: bool = True,
) -> tuple[Tensor, Tensor]:
    """Centroids (k, D) and the cluster of each vector (N,), of the restart with least inertia.

    At most `iterations` of Lloyd and as many rounds of exchanges; `refine=False` is Lloyd alone, as
    in scikit-learn and faiss. A cluster that loses its last vector takes the one farthest from its
    centroid, so none is empty.
    """
    x = vectors_of(vectors, name="vectors")
    if not 1 <= k <= len(x):
        raise ValueError(f"k is {k}; expected 1 to {len(x)}, the number of vectors")
    if restarts < 1 or iterations < 1:
        raise ValueError(f"restarts={restarts}, iterations={iterations}; expected 1 or more")
    if seeding not in ("k-means++", "random"):
        raise ValueError(f"unknown seeding {seeding!r}; choose from k-means++, random")
    x, exponent = scaled_to_one(x)
    center = x.mean(0)  # squares of centered vectors are small, and so are their roundings
    x = x - center
    generator = torch.Generator().manual_seed(seed)
    runs = []
    for _ in range(restarts):
        if seeding == "random":
            chosen = torch.randperm(len(x), generator=generator)[:k].to(x.device)
        else:
            chosen = choose_seeds(x, k, generator)
        assignment = _lloyd(x, x[chosen], 0 if refine and len(x) < SMALL * k else iterations)
        if refine:
            assignment = _exchange(x, assignment, k, iterations)
        centroids = _means(x, assignment, k)
        runs.append((inertia(x, centroids, assignment), centroids, assignment))
    _, centroids, assignment = min(runs, key=lambda run: run[0])
    return times_power_of_two(centroids + center, -exponent), assignment


def inertia(vectors: Array, centroids: Tensor, assignment: Tensor) -> float:
    """Sum of the squared distances of the vectors to the centroids of their clusters."""
    x = vectors_of(vectors, name="vectors")
    return float((x - centroids[assignment]).double().square().sum())


def _lloyd(x: Tensor, centroids: Tensor, iterations: int) -> Tensor:
    """The clusters (N,) after Lloyd's algorithm from the given centroids; none is empty."""
    k = len(centroids)
    left = torch.cat([x, torch.ones_like(x[:, :1])], 1)
    right = _lloyd_factor(centroids)  # left · right = x·c − |c|²/2, largest at the nearest
    score, assignment = _best(left, right)
    assignment = _fill_empty(x, centroids, assignment)
    changed = torch.ones(k, dtype=torch.bool, device=x.device)
    for _ in range(iterations):
        centroids = _means(x, assignment, k)
        right[changed] = _lloyd_factor(centroids)[changed]
        own = (left * right[assignment]).sum(1)
        moved = changed[assignment]
        stale = moved & (own < score)
        score = torch.where(moved, own, score)
        before = assignment.clone()
        _rescore(left, right, changed, stale, score, assignment)
        assignment = _fill_empty(x, centroids, assignment)
        changed = _touched(before, assignment, k)
        if not changed.any():
            break
    return assignment


def _exchange(x: Tensor, assignment: Tensor, k: int, rounds: int) -> Tensor:
    """The clusters after moves of single vectors, each of which lowers the inertia."""
    a = assignment.clone()
    size = torch.bincount(a, minlength=k).to(x)
    means = _means(x, a, k)
    total = inertia(x, means, a)
    x2 = x.square().sum(1, keepdim=True)
    left = torch.cat([x, x2, torch.ones_like(x2)], 1)
    right = _join_factor(means, size)  # left · right = −n/(n + 1)·|x − c|²
    score, target = _best(left, right, exclude=a)
    for _ in range(rounds):
        before = a.clone()
        gained = _move(x, a, target, size, means)
        if gained <= TOLERANCE * abs(total):
            break
        total -= gained
        changed = _touched(before, a, k)
        right[changed] = _join_factor(means[changed], size[changed])
        stale = changed[target] | (before != a)
        present = (left * right[target]).sum(1).masked_fill_(target == a, -torch.inf)
        score = torch.where(stale, present, score)
        _rescore(left, right, changed, stale, score, target, exclude=a)
    return a


def _move(x: Tensor, a: Tensor, target: Tensor, size: Tensor, means: Tensor) -> float:
    """Move vectors to their targets where that is a gain, updating a, size and means; the gain."""
    gained = 0.0
    open_moves = (a != target).nonzero()[:, 0]
    for _ in range(SUBROUNDS):
        i, source, goal = open_moves, a[open_moves], target[open_moves]
        n_source, n_goal = size[source], size[goal]
        leave = (x[i] - means[source]).square().sum(1) * n_source / (n_source - 1).clamp_min(1)
        join = (x[i] - means[goal]).square().sum(1) * n_goal / (n_goal + 1)
        gain = torch.where(n_source > 1, leave - join, 0)
        # One move a cluster at a time: then the gains are exact, and add up.
        most = torch.zeros_like(size).scatter_reduce_(0, source, gain, "amax")
        most.scatter_reduce_(0, goal, gain, "amax")
        worth = gain > 1e-6 * leave
        now = worth & (gain == most[source]) & (gain == most[goal])
        now &= _first_of(source, now, len(size)) & _first_of(goal, now, len(size))
        if not now.any():
            break
        i, source, goal = i[now], source[now], goal[now]
        means[source] += (means[source] - x[i]) / (size[source] - 1)[:, None]
        means[goal] += (x[i] - means[goal]) / (size[goal] + 1)[:, None]
        size[source] -= 1
        size[goal] += 1
        a[i] = goal
        gained += float(gain[now].double().sum())
        open_moves = open_moves[worth & ~now]
    return gained


def _first_of(cluster: Tensor, among: Tensor, k: int) -> Tensor:
    """Which entries are the first of their cluster, so that equal gains don't move two at once."""
    place = torch.arange(len(cluster), device=cluster.device)
    rank = torch.where(among, place, len(cluster))
    first = torch.full((k,), len(cluster), device=cluster.device)
    return place == first.scatter_reduce_(0, cluster, rank, "amin")[cluster]


def _lloyd_factor(centroids: Tensor) -> Tensor:
    return torch.cat([centroids, centroids.square().sum(1, keepdim=True) / -2], 1)


def _join_factor(means: Tensor, size: Tensor) -> Tensor:
    weight = (size / (size + 1))[:, None]
    return (
        torch.cat([2 * means, -torch.ones_like(weight), -means.square().sum(1, keepdim=True)], 1)
        * weight
    )


def _best(left: Tensor, right: Tensor, *, exclude: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Row-wise maximum of left @ right.T and its column, which is never the row's `exclude`."""
    score = left.new_full((len(left),), -torch.inf)
    index = torch.zeros(len(left), dtype=torch.int64, device=left.device)
    _improve(left, right, torch.arange(len(right), device=left.device), score, index, exclude)
    return score, index


def _rescore(
    left: Tensor,
    right: Tensor,
    changed: Tensor,
    stale: Tensor,
    score: Tensor,
    index: Tensor,
    exclude: Tensor | None = None,
) -> None:
    """Bring score and index up to date after the columns `changed`.

    All rows are compared with these, the other columns only with the rows `stale`, whose score had
    to be lowered.
    """
    _improve(left, right, changed.nonzero()[:, 0], score, index, exclude)
    rows, same = stale.nonzero()[:, 0], (~changed).nonzero()[:, 0]
    best, at = score[rows], index[rows]
    _improve(left[rows], right, same, best, at, None if exclude is None else exclude[rows])
    score[rows], index[rows] = best, at


def _improve(
    left: Tensor,
    right: Tensor,
    columns: Tensor,
    score: Tensor,
    index: Tensor,
    exclude: Tensor | None,
) -> None:
    """Replace score and index, in place, where left @ right[columns].T is higher."""
    if exclude is not None:
        place = torch.full((len(right),), -1, device=columns.device)
        place[columns] = torch.arange(len(columns), device=columns.device)
        exclude = place[exclude]
    right = right[columns]
    buffer = left.new_empty(BLOCK * BLOCK)
    parts = [right[j].T for j in blocks(0, len(right), BLOCK)]
    strips = list(blocks(0, len(left), BLOCK))
    spread = len(left) * len(right) >= SPREAD
    own = share(len(strips)) if spread else slice(len(strips))
    for rows in strips[own]:
        x, top, at = left[rows], score[rows], index[rows]
        hidden = None if exclude is None else _cells(exclude[rows], len(right))
        for j, y in enumerate(parts):
            product = buffer[: len(x) * y.shape[1]]
            s = torch.mm(x, y, out=product.view(len(x), -1))
            if hidden is not None:
                product.index_fill_(0, hidden[j], -torch.inf)
            # The index costs more than the maximum: look for it only where it changes.
            highest = s.amax(1)
            better = (highest > top).nonzero()[:, 0]
            top[better] = highest[better]
            at[better] = columns[s[better].argmax(1) + j * BLOCK]
    if spread:
        rows = slice(own.start * BLOCK, own.stop * BLOCK)
        merge_rows(score, rows)
        merge_rows(index, rows)


def _cells(column: Tensor, width: int) -> list[Tensor]:
    """For each block of a strip of rows, where in its memory the given columns of the rows are."""
    order = column.argsort()
    column = column[order]
    start = column // BLOCK * BLOCK
    cell = order * (width - start).clamp_max(BLOCK) + column - start
    ends = torch.arange(0, width + BLOCK, BLOCK, device=column.device)
    bounds = torch.searchsorted(column, ends).tolist()  # −1, no column, lies before the first
    return [cell[i:j] for i, j in pairwise(bounds)]


def _means(x: Tensor, assignment: Tensor, k: int) -> Tensor:
    sums = x.new_zeros(k, x.shape[1]).index_add_(0, assignment, x)
    return sums / torch.bincount(assignment, minlength=k)[:, None]


def _touched(before: Tensor, after: Tensor, k: int) -> Tensor:
    """Clusters (k,) that won or lost a vector."""
    moved = before != after
    touched = torch.zeros(k, dtype=torch.bool, device=after.device)
    touched[before[moved]] = True
    touched[after[moved]] = True
    return touched


def _fill_empty(x: Tensor, centroids: Tensor, assignment: Tensor) -> Tensor:
    """Give each empty cluster the vector farthest from its centroid."""
    size = torch.bincount(assignment, minlength=len(centroids))
    empty = (size == 0).nonzero()[:, 0].tolist()
    if not empty:
        return assignment
    far = (x - centroids[assignment]).square().sum(1).argsort(descending=True, stable=True)
    assignment, sizes = assignment.clone(), size.tolist()
    for i in far.tolist():
        source = int(assignment[i])
        if sizes[source] > 1:
            sizes[source] -= 1
            assignment[i] = empty.pop()
            if not empty:
                break
    return assignment
