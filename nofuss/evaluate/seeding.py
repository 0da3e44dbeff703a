"""Greedy k-means++ seeds, drawn in batches.

Points are drawn with probability ∝ D², their squared distance to the nearest seed, and of several
candidates the one that lowers Σ D² most is taken (Arthur & Vassilvitskii 2007; greedy as in
scikit-learn). Here the seeds are drawn in batches that grow with the seeds already there, which
turns k passes over the data into a few matrix products. A point drawn near a seed taken before it
in its batch is dropped with the probability by which that seed lowered its D²: drawn so, points
follow the D² of the moment and not that of the start of the batch.
"""

import torch
from torch import Tensor

from nofuss.evaluate.retrieval import blocks
from nofuss.geometry import squared_distances

BLOCK = 512
CANDIDATES = 4  # points tried for each seed
BATCH = 256  # most seeds drawn at once


def plus_plus(x: Tensor, k: int, generator: torch.Generator) -> Tensor:
    """Indices (k,) of greedy k-means++ seeds, each the best of several candidates."""
    x2 = x.square().sum(1)
    first = torch.randint(len(x), (1,), generator=generator).to(x.device)
    nearest = (x - x[first]).square().sum(1)  # D²
    # One product gives D² − |x − c|² whole: [2c, −|c|², 1] · [x, 1, D² − |x|²].
    ones = torch.ones_like(x2)
    left = torch.cat([2 * x, torch.stack([-x2, ones], 1)], 1)
    right = torch.cat([x, torch.stack([ones, nearest - x2], 1)], 1)
    chosen, count = [first], 1
    while count < k:
        # A stale D² misleads little while the batch is small beside the seeds already there.
        batch = min(k - count, max(1, count // 8), BATCH)
        drawn = _draw(nearest, batch * CANDIDATES, generator)
        gain, place = _gains(left[drawn], right).view(batch, CANDIDATES).max(1)
        winners = drawn.view(batch, CANDIDATES).gather(1, place[:, None])[:, 0]
        winners = winners[gain.argsort(descending=True, stable=True)]
        taken = winners[_thin(x[winners], nearest[winners], generator)]
        nearest.sub_(_falls(left[taken], right)).clamp_min_(0)
        nearest[taken] = 0
        right[:, -1] = nearest - x2
        chosen.append(taken)
        count += len(taken)
    return torch.cat(chosen)


def _draw(weights: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Indices drawn with probability ∝ weights (evenly when all are zero), repeats allowed."""
    total = weights.double().cumsum(0)
    if total[-1] <= 0:
        total = torch.arange(1, len(weights) + 1, dtype=torch.float64, device=weights.device)
    at = torch.rand(count, dtype=torch.float64, generator=generator).to(weights.device) * total[-1]
    return torch.searchsorted(total, at, right=True).clamp_(max=len(weights) - 1)


def _gains(left: Tensor, right: Tensor) -> Tensor:
    """By how much Σ D² would fall with each candidate as a seed, (C,)."""
    gains = left.new_zeros(len(left))
    ones = left.new_ones(BLOCK)
    buffer = left.new_empty(len(left) * BLOCK)
    for cols in blocks(0, len(right), BLOCK):
        c = cols.stop - cols.start
        fall = torch.mm(left, right[cols].T, out=buffer[: len(left) * c].view(-1, c))
        gains.addmv_(fall.clamp_min_(0), ones[:c])
    return gains


def _falls(left: Tensor, right: Tensor) -> Tensor:
    """By how much D² falls at each point with all candidates as seeds, (N,)."""
    falls = [(left @ right[cols].T).amax(0) for cols in blocks(0, len(right), 4 * BLOCK)]
    return torch.cat(falls).clamp_min_(0)


def _thin(winners: Tensor, nearest: Tensor, generator: torch.Generator) -> Tensor:
    """Which winners stay when they are taken one after the other; the first always does."""
    between = squared_distances(winners, winners).tolist()
    before = nearest.tolist()
    chance = torch.rand(len(before), generator=generator).tolist()
    kept: list[int] = []
    for i, old in enumerate(before):
        now = min([old] + [between[i][j] for j in kept])
        if not kept or chance[i] * old < now:
            kept.append(i)
    return torch.tensor(kept, device=winners.device)
