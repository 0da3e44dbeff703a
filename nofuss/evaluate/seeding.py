"""Greedy k-means++ seeds, drawn in batches.

Points are drawn with probability ∝ D², their squared distance to the nearest seed, and of several
candidates the one that lowers Σ D² most is taken (Arthur & Vassilvitskii 2007; greedy as in
scikit-learn). Here the seeds are drawn in batches that grow with the number of seeds, which turns k
passes over the data into a few matrix products. A point drawn near a seed taken before it in its
batch is dropped with the probability by which that seed lowered its D²: the points that remain
follow the current D² and not that of the start of the batch.
"""

import math

import torch
from torch import Tensor

from nofuss.distributed.threads import blocks, map_in_threads
from nofuss.geometry import squared_distances

PRODUCT = 2**18  # numbers of a product, 1 MB: few candidates are compared with many vectors at once
BATCH = 256  # most seeds drawn at once
PART = 2**19  # products from which on a thread more saves more than it costs
SMALL = 256  # seeds already there for each that is drawn at once; with 64, tiny clusters are missed


def plus_plus(x: Tensor, k: int, generator: torch.Generator) -> Tensor:
    """Return indices (k,) of greedy k-means++ seeds, each the best of several candidates."""
    first = torch.randint(len(x), (1,), generator=generator).to(x.device)
    x2, nearest = x.square().sum(1), (x - x[first]).square().sum(1)
    # One product gives D² − |x − c|² whole: [2c, −|c|², 1] · [x, 1, D² − |x|²].
    ones = torch.ones_like(x2)
    left = torch.cat([2 * x, torch.stack([-x2, ones], 1)], 1)
    right = torch.cat([x, torch.stack([ones, nearest - x2], 1)], 1)
    chosen, number = [first], 1
    tried = 2 + int(math.log(k))  # candidates for each seed, as in scikit-learn
    while number < k:
        # D² is not updated within a batch. That misleads little while the batch is small beside
        # the seeds already there.
        batch = min(k - number, max(1, number // SMALL), BATCH)
        drawn = _draw(nearest, batch * tried, generator)
        gain, place = _gains(left[drawn], right).view(batch, tried).max(1)
        winners = drawn.view(batch, tried).gather(1, place[:, None])[:, 0]
        winners = winners[gain.argsort(descending=True, stable=True)]
        taken = winners[_thin(x[winners], nearest[winners], generator)]
        nearest.sub_(_falls(left[taken], right)).clamp_min_(0)
        nearest[taken] = 0  # rounding would leave more, and a seed could be drawn again
        right[:, -1] = nearest - x2
        chosen.append(taken)
        number += len(taken)
    return torch.cat(chosen)


def _draw(weights: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Return indices drawn with probability ∝ weights (evenly if all are 0), repeats allowed."""
    # By the cumulative sum, in double: torch.multinomial takes 2²⁴ categories at most.
    total = weights.double().cumsum(0)
    if total[-1] <= 0:
        total = torch.arange(1, len(weights) + 1, dtype=torch.float64, device=weights.device)
    at = torch.rand(count, dtype=torch.float64, generator=generator).to(weights.device) * total[-1]
    return torch.searchsorted(total, at, right=True).clamp_(max=len(weights) - 1)


def _gains(left: Tensor, right: Tensor) -> Tensor:
    """Return by how much Σ D² would fall with each candidate as a seed, (C,)."""
    size = PRODUCT // len(left)
    ones = left.new_ones(size)

    def gains(points: slice) -> Tensor:
        found, buffer = left.new_zeros(len(left)), left.new_empty(size * len(left))
        for cols in blocks(points.start, points.stop, size):
            c = cols.stop - cols.start
            fall = torch.mm(left, right[cols].T, out=buffer[: len(left) * c].view(-1, c))
            found.addmv_(fall.clamp_min_(0), ones[:c])
        return found

    return torch.stack(map_in_threads(gains, _parts(left, right))).sum(0)


def _falls(left: Tensor, right: Tensor) -> Tensor:
    """Return by how much D² falls at each point with all candidates as seeds, (N,)."""
    falls = right.new_empty(len(right))
    size = PRODUCT // len(left)

    def fall(points: slice) -> None:
        for cols in blocks(points.start, points.stop, size):
            torch.amax(left @ right[cols].T, 0, out=falls[cols])

    map_in_threads(fall, _parts(left, right))
    return falls.clamp_min_(0)


def _parts(left: Tensor, right: Tensor) -> list[slice]:
    """Return the points in parts for threads: the same on every machine, so that sums are, too."""
    parts = min(8, max(1, len(left) * len(right) // PART))
    return [*blocks(0, len(right), -(-len(right) // parts))]


def _thin(winners: Tensor, nearest: Tensor, generator: torch.Generator) -> Tensor:
    """Return which winners stay when they are taken one after the other; the first always does.

    A winner was drawn with probability ∝ its D² at the start of the batch. Kept with probability
    D² now / D² then, it is as if drawn with probability ∝ D² now.
    """
    between = squared_distances(winners, winners).tolist()
    before = nearest.tolist()
    chance = torch.rand(len(before), generator=generator, dtype=torch.float32).tolist()
    kept: list[int] = []
    for i, then in enumerate(before):
        now = min([then] + [between[i][j] for j in kept])
        if not kept or chance[i] * then < now:
            kept.append(i)
    return torch.tensor(kept, device=winners.device)
