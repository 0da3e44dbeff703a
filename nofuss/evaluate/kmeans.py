"""K-means for many clusters: k-means++ seeds, Lloyd without needless scoring, Hartigan's exchanges.

- With hundreds of vectors a cluster it starts from a sample of them.
- Lloyd is exact but scores little: a centroid is scored again only when its members changed, and
  a vector is compared with all centroids only when its own has moved away from it.
- Lloyd stops where no vector is nearer to another centroid. Moving a single vector from cluster a
  to b changes the inertia by n_b/(n_b + 1)·d_b² − n_a/(n_a − 1)·d_a² (Hartigan 1975), which can
  still lower it, often so when clusters are small. `refine` makes such moves until a round gains
  less than `TOLERANCE`. With five vectors a cluster this lowers the inertia by a tenth, more than
  any seeding does; with hundreds it changes next to nothing. Small clusters skip Lloyd for it.

Everything is computed in blocks: memory is O(N·D + block²).
"""

from typing import Literal

import torch
from torch import Tensor

from nofuss.evaluate.checked import scaled_to_one, times_power_of_two, vectors_of
from nofuss.evaluate.row_maxima import FEW, best_columns, row_maxima, update_maxima
from nofuss.evaluate.seeding import choose_seeds
from nofuss.geometry import Array

TOLERANCE = 1e-2  # a round of exchanges that lowers the inertia by less is the last
SMALL = 16  # vectors a cluster below which exchanges do all that Lloyd would, and more
SAMPLE = 64  # vectors a cluster to start from, where there are more than twice as many
ITERATIONS_OF_SAMPLE = 5
SUBROUNDS = 16  # exchanges tried on one scoring of all vectors

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
    """Return centroids (k, D) and clusters (N,) of the restart with the least inertia.

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
    # |x|² + |c|² − 2 x·c loses digits where vectors are long beside their distances: centered,
    # they are as short as can be.
    center = x.mean(0)
    x = x - center
    generator = torch.Generator().manual_seed(seed)
    runs = []
    for _ in range(restarts):
        centroids, nearest = _start(x, k, seeding, generator)
        limit = 0 if refine and len(x) < SMALL * k else iterations
        assignment = _lloyd(x, centroids, nearest, limit)
        if refine:  # also where Lloyd was skipped: then it starts from the nearest seeds
            assignment = _exchange(x, assignment, k, iterations)
        centroids = _means(x, assignment, k)
        total = inertia(x, centroids, assignment) if restarts > 1 else 0.0
        runs.append((total, centroids, assignment))
    _, centroids, assignment = min(runs, key=lambda run: run[0])
    return times_power_of_two(centroids + center, -exponent), assignment


def _start(
    x: Tensor, k: int, seeding: Seeding, generator: torch.Generator
) -> tuple[Tensor, Tensor | None]:
    """Return the first centroids (k, D), and the nearest of them (N,) where it is known.

    Of many vectors a cluster, some are enough to find where clusters are: k-means++ and a few
    iterations on a sample cost less than one iteration on all, and save several.
    """
    if seeding == "random":
        return x[torch.randperm(len(x), generator=generator)[:k].to(x.device)], None
    if len(x) <= 2 * SAMPLE * k:
        chosen, nearest = choose_seeds(x, k, generator)
        return x[chosen], nearest
    some = x[torch.randperm(len(x), generator=generator)[: SAMPLE * k].to(x.device)]
    chosen, nearest = choose_seeds(some, k, generator)
    return _means(some, _lloyd(some, some[chosen], nearest, ITERATIONS_OF_SAMPLE), k), None


def inertia(vectors: Array, centroids: Tensor, assignment: Tensor) -> float:
    """Return the sum of squared distances of the vectors to the centroids of their clusters."""
    x = vectors_of(vectors, name="vectors")
    return float((x - centroids[assignment]).double().square().sum())


def _lloyd(x: Tensor, centroids: Tensor, nearest: Tensor | None, iterations: int) -> Tensor:
    """Return the clusters (N,) after Lloyd's algorithm from given centroids; none is empty.

    nearest: the nearest centroid of each vector, if it is known.
    """
    k = len(centroids)
    if k <= FEW:
        return _lloyd_of_few(x, centroids, nearest, iterations)
    left = torch.cat([x, torch.ones_like(x[:, :1])], 1)
    right = _lloyd_factor(centroids)  # left · right = x·c − |c|²/2, largest at the nearest
    if nearest is None:
        score, assignment = row_maxima(left, right)
    else:
        score, assignment = (left * right[nearest]).sum(1), nearest
    assignment = _fill_empty(x, centroids, assignment)
    changed = torch.ones(k, dtype=torch.bool, device=x.device)
    for _ in range(iterations):
        centroids = _means(x, assignment, k)
        right[changed] = _lloyd_factor(centroids)[changed]
        own = (left * right[assignment]).sum(1)
        # A vector must look at all centroids only if its own moved away. If its own moved closer
        # or not at all, no unchanged centroid can have become the nearest: those that changed
        # are compared anyway.
        moved = changed[assignment]
        stale = moved & (own < score)
        score = torch.where(moved, own, score)
        before = assignment.clone()
        update_maxima(left, right, changed, stale, score, assignment)
        assignment = _fill_empty(x, centroids, assignment)
        changed = _touched(before, assignment, k)
        if not changed.any():
            break
    return assignment


def _lloyd_of_few(x: Tensor, centroids: Tensor, nearest: Tensor | None, rounds: int) -> Tensor:
    """Return the same for few clusters: most change in every iteration, so all are compared."""
    k = len(centroids)
    left = torch.cat([x, torch.ones_like(x[:, :1])], 1)
    assignment = best_columns(left, _lloyd_factor(centroids)) if nearest is None else nearest
    assignment = _fill_empty(x, centroids, assignment)
    for _ in range(rounds):
        before, centroids = assignment, _means(x, assignment, k)
        assignment = best_columns(left, _lloyd_factor(centroids), before)
        assignment = _fill_empty(x, centroids, assignment)
        if torch.equal(assignment, before):
            break
    return assignment


def _exchange(x: Tensor, assignment: Tensor, k: int, rounds: int) -> Tensor:
    """Return the clusters after moves of single vectors, each of which lowers the inertia."""
    a = assignment.clone()
    size = torch.bincount(a, minlength=k).to(x)
    means = _means(x, a, k)
    total = inertia(x, means, a)
    x2 = x.square().sum(1, keepdim=True)
    left = torch.cat([x, x2, torch.ones_like(x2)], 1)
    right = _join_factor(means, size)  # left · right = −n/(n + 1)·|x − c|²
    # The cost of leaving is the same whatever the target, so the best target of a vector is where
    # joining costs least, its own cluster excluded.
    score, target = row_maxima(left, right, exclude=a)
    for _ in range(rounds):
        before = a.clone()
        gained = _move(x, a, target, size, means)
        if gained <= TOLERANCE * abs(total):
            break
        total -= gained
        changed = _touched(before, a, k)
        right[changed] = _join_factor(means[changed], size[changed])
        # A score is stale if the target changed, or if the vector moved: it is in its target now,
        # which is excluded from here on.
        stale = changed[target] | (before != a)
        present = (left * right[target]).sum(1).masked_fill_(target == a, -torch.inf)
        score = torch.where(stale, present, score)
        update_maxima(left, right, changed, stale, score, target, exclude=a)
    return a


def _move(x: Tensor, a: Tensor, target: Tensor, size: Tensor, means: Tensor) -> float:
    """Move vectors to their targets where that is a gain; return the gain.

    Updates the clusters a (N,), size (k,) and means (k, D) in place.
    """
    gained = 0.0
    open_moves = (a != target).nonzero()[:, 0]
    # Scoring all vectors costs far more than trying moves, so several rounds of moves are made
    # on one scoring, each with the means and sizes of the moment.
    for _ in range(SUBROUNDS):
        i, source, goal = open_moves, a[open_moves], target[open_moves]
        n_source, n_goal = size[source], size[goal]
        leave = (x[i] - means[source]).square().sum(1) * n_source / (n_source - 1).clamp_min(1)
        join = (x[i] - means[goal]).square().sum(1) * n_goal / (n_goal + 1)
        gain = torch.where(n_source > 1, leave - join, 0)  # the last vector stays: no empty cluster
        # A move changes both means, on which other gains depend. So each cluster takes part in one
        # move at a time, its best: then the gains are exact and add up.
        most = torch.zeros_like(size).scatter_reduce_(0, source, gain, "amax")
        most.scatter_reduce_(0, goal, gain, "amax")
        worth = gain > 1e-6 * leave  # less may be rounding, and the vector could move back
        now = worth & (gain == most[source]) & (gain == most[goal])
        now &= _first_of(source, now, len(size)) & _first_of(goal, now, len(size))
        if not now.any():
            break
        i, source, goal = i[now], source[now], goal[now]
        # The mean without x, and with it, from the mean before.
        means[source] += (means[source] - x[i]) / (size[source] - 1)[:, None]
        means[goal] += (x[i] - means[goal]) / (size[goal] + 1)[:, None]
        size[source] -= 1
        size[goal] += 1
        a[i] = goal
        gained += float(gain[now].double().sum())
        open_moves = open_moves[worth & ~now]
    return gained


def _first_of(cluster: Tensor, among: Tensor, k: int) -> Tensor:
    """Return which entries are the first of their cluster: of equal gains only one may move."""
    place = torch.arange(len(cluster), device=cluster.device)
    rank = torch.where(among, place, len(cluster))
    first = torch.full((k,), len(cluster), device=cluster.device)
    return place == first.scatter_reduce_(0, cluster, rank, "amin")[cluster]


def _lloyd_factor(centroids: Tensor) -> Tensor:
    """Return [c, −|c|²/2], which times [x, 1] is (|x|² − |x − c|²)/2: no |x|² is needed."""
    return torch.cat([centroids, centroids.square().sum(1, keepdim=True) / -2], 1)


def _join_factor(means: Tensor, size: Tensor) -> Tensor:
    """Return n/(n + 1)·[2c, −1, −|c|²], which times [x, |x|², 1] is −n/(n + 1)·|x − c|²."""
    weight = (size / (size + 1))[:, None]
    return (
        torch.cat([2 * means, -torch.ones_like(weight), -means.square().sum(1, keepdim=True)], 1)
        * weight
    )


def _means(x: Tensor, assignment: Tensor, k: int) -> Tensor:
    sums = x.new_zeros(k, x.shape[1]).index_add_(0, assignment, x)
    return sums / torch.bincount(assignment, minlength=k)[:, None]


def _touched(before: Tensor, after: Tensor, k: int) -> Tensor:
    """Return which clusters (k,) have won or lost a vector."""
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
    for i in far.tolist():  # a cluster with one vector keeps it, or it would be empty next
        source = int(assignment[i])
        if sizes[source] > 1:
            sizes[source] -= 1
            assignment[i] = empty.pop()
            if not empty:
                break
    return assignment
