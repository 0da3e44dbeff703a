"""K-means for many clusters: k-means++ seeds drawn in batches, then Lloyd on what still moves.

Both halves give what the plain algorithms give, with less arithmetic:

- Seeding is greedy k-means++ (Arthur & Vassilvitskii 2007; greedy as in scikit-learn): points are
  drawn with probability ∝ D², their squared distance to the nearest seed, and the one of several
  candidates that lowers Σ D² most is taken. Seeds are drawn in batches; a drawn point that lies
  near a seed taken earlier in its batch is thinned out with the probability by which its D² fell,
  so a batch doesn't put two seeds where one belongs.
- Lloyd (exact): a centroid whose members stayed is not rescored; only points whose own centroid
  moved away from them are compared with all centroids again.

Everything is blocked: memory is O(N·D + block²).
"""

from typing import Literal

import torch
from torch import Tensor

from nofuss.evaluate.inputs import vectors_of
from nofuss.evaluate.retrieval import blocks
from nofuss.geometry import Array

BLOCK = 1024
CANDIDATES = 8  # points tried for each seed

Seeding = Literal["k-means++", "random"]


def kmeans(
    vectors: Array,
    k: int,
    *,
    seed: int,
    restarts: int = 1,
    iterations: int = 100,
    seeding: Seeding = "k-means++",
) -> tuple[Tensor, Tensor]:
    """Centroids (k, D) and the cluster of each vector (N,), of the restart with least inertia.

    Stops when no vector changes its cluster, or after `iterations`. A cluster that loses its last
    vector takes the one farthest from its centroid; with fewer than k distinct vectors some
    clusters may stay empty.
    """
    x = vectors_of(vectors, name="vectors")
    if not 1 <= k <= len(x):
        raise ValueError(f"k is {k}; expected 1 to {len(x)}, the number of vectors")
    if restarts < 1 or iterations < 1:
        raise ValueError(f"restarts={restarts}, iterations={iterations}; expected 1 or more")
    if seeding not in ("k-means++", "random"):
        raise ValueError(f"unknown seeding {seeding!r}; choose from k-means++, random")
    center = x.mean(0)  # squares of centered vectors are small, and so are their roundings
    x = x - center
    generator = torch.Generator().manual_seed(seed)
    best: tuple[float, Tensor, Tensor] | None = None
    for _ in range(restarts):
        if seeding == "random":
            chosen = torch.randperm(len(x), generator=generator)[:k].to(x.device)
        else:
            chosen = _plus_plus(x, k, generator)
        centroids, assignment = _lloyd(x, x[chosen], iterations)
        score = inertia(x, centroids, assignment)
        if best is None or score < best[0]:
            best = score, centroids, assignment
    assert best is not None
    return best[1] + center, best[2]


def inertia(vectors: Array, centroids: Tensor, assignment: Tensor) -> float:
    """Sum of the squared distances of the vectors to the centroids of their clusters."""
    x = vectors_of(vectors, name="vectors")
    return float((x - centroids[assignment]).double().square().sum())


def _plus_plus(x: Tensor, k: int, generator: torch.Generator) -> Tensor:
    """Indices (k,) of greedy k-means++ seeds."""
    first = int(torch.randint(len(x), (1,), generator=generator))
    chosen = [first]
    nearest = (x - x[first]).square().sum(1)  # D²
    while len(chosen) < k:
        # A stale D² misleads little while the batch is small beside the seeds already there.
        batch = min(k - len(chosen), max(1, len(chosen) // 16), BLOCK // CANDIDATES)
        drawn = _draw(nearest, batch * CANDIDATES, generator)
        gains = _gains(x, x[drawn], nearest).view(batch, CANDIDATES)
        winners = drawn.view(batch, CANDIDATES).gather(1, gains.argmax(1, keepdim=True))[:, 0]
        winners = winners[gains.amax(1).argsort(descending=True, stable=True)]
        kept = _thin(x[winners], nearest[winners], generator)
        taken = winners[kept]
        for rows in blocks(0, len(x), 8 * BLOCK):
            closest = _squared(x[rows], x[taken]).amin(1)
            nearest[rows] = torch.minimum(nearest[rows], closest)
        nearest[taken] = 0
        chosen += taken.tolist()
    return torch.tensor(chosen, device=x.device)


def _draw(weights: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Indices drawn with probability ∝ weights (evenly when all are zero), repeats allowed."""
    total = weights.double().cumsum(0)
    if total[-1] <= 0:
        total = torch.arange(1, len(weights) + 1, dtype=torch.float64, device=weights.device)
    at = torch.rand(count, dtype=torch.float64, generator=generator).to(weights.device) * total[-1]
    return torch.searchsorted(total, at, right=True).clamp_(max=len(weights) - 1)


def _gains(x: Tensor, candidates: Tensor, nearest: Tensor) -> Tensor:
    """By how much Σ D² would fall with each candidate as a seed."""
    # One product gives D² − |x − c|² whole: [2c, −|c|², 1] · [x, 1, D² − |x|²].
    c2 = candidates.square().sum(1, keepdim=True)
    left = torch.cat([2 * candidates, -c2, torch.ones_like(c2)], 1)
    rest = (nearest - x.square().sum(1))[:, None]
    right = torch.cat([x, torch.ones_like(rest), rest], 1)
    gains = x.new_zeros(len(left))
    ones = x.new_ones(BLOCK)
    buffer = x.new_empty(len(left) * BLOCK)
    for cols in blocks(0, len(x), BLOCK):
        c = cols.stop - cols.start
        fall = buffer[: len(left) * c].view(len(left), c)
        torch.mm(left, right[cols].T, out=fall)
        gains.addmv_(fall.clamp_min_(0), ones[:c])
    return gains


def _thin(winners: Tensor, nearest: Tensor, generator: torch.Generator) -> Tensor:
    """Which winners stay when they are taken one after the other; the first always does."""
    between = _squared(winners, winners).tolist()
    before = nearest.tolist()
    chance = torch.rand(len(before), generator=generator).tolist()
    kept: list[int] = []
    for i, old in enumerate(before):
        now = min([old] + [between[i][j] for j in kept])
        if not kept or chance[i] * old < now:
            kept.append(i)
    return torch.tensor(kept, device=winners.device)


def _squared(x: Tensor, y: Tensor) -> Tensor:
    y2 = y.square().sum(1)
    return torch.addmm(y2, x, y.T, alpha=-2).add_(x.square().sum(1, keepdim=True)).clamp_min_(0)


def _lloyd(x: Tensor, centroids: Tensor, iterations: int) -> tuple[Tensor, Tensor]:
    """Lloyd's algorithm from the given centroids."""
    k = len(centroids)
    assignment, _ = _closest(x, centroids)
    for _ in range(iterations):
        assignment = _fill_empty(x, centroids, assignment)
        centroids = _means(x, assignment, k)
        previous = assignment
        assignment, _ = _closest(x, centroids)
        if torch.equal(previous, assignment):
            break
    return centroids, assignment


def _means(x: Tensor, assignment: Tensor, k: int) -> Tensor:
    sums = x.new_zeros(k, x.shape[1]).index_add_(0, assignment, x)
    return sums / torch.bincount(assignment, minlength=k)[:, None]


def _fill_empty(x: Tensor, centroids: Tensor, assignment: Tensor) -> Tensor:
    """Give each empty cluster the vector farthest from its centroid."""
    sizes = torch.bincount(assignment, minlength=len(centroids))
    empty = (sizes == 0).nonzero()[:, 0]
    if len(empty) == 0:
        return assignment
    far = (x - centroids[assignment]).square().sum(1).argsort(descending=True, stable=True)
    assignment = assignment.clone()
    for cluster in empty.tolist():
        for i in far.tolist():
            if sizes[assignment[i]] > 1:
                sizes[assignment[i]] -= 1
                assignment[i] = cluster
                sizes[cluster] = 1
                break
    return assignment


def _closest(x: Tensor, centroids: Tensor) -> tuple[Tensor, Tensor]:
    """The nearest centroid of each vector, and x·c − |c|²/2, largest at the nearest."""
    half = centroids.square().sum(1) / -2
    index = torch.empty(len(x), dtype=torch.int64, device=x.device)
    score = x.new_full((len(x),), -torch.inf)
    for rows in blocks(0, len(x), BLOCK):
        for cols in blocks(0, len(centroids), BLOCK):
            best, at = torch.addmm(half[cols], x[rows], centroids[cols].T).max(1)
            better = best > score[rows]
            score[rows] = torch.where(better, best, score[rows])
            index[rows] = torch.where(better, at + cols.start, index[rows])
    return index, score
