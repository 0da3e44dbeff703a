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
BATCH = 128  # most seeds drawn at once


def plus_plus(x: Tensor, k: int, generator: torch.Generator) -> Tensor:
    """Indices (k,) of greedy k-means++ seeds."""
    first = int(torch.randint(len(x), (1,), generator=generator))
    chosen = [first]
    nearest = (x - x[first]).square().sum(1)  # D²
    while len(chosen) < k:
        # A stale D² misleads little while the batch is small beside the seeds already there.
        batch = min(k - len(chosen), max(1, len(chosen) // 16), BATCH)
        drawn = _draw(nearest, batch * CANDIDATES, generator)
        gains = _gains(x, x[drawn], nearest).view(batch, CANDIDATES)
        winners = drawn.view(batch, CANDIDATES).gather(1, gains.argmax(1, keepdim=True))[:, 0]
        winners = winners[gains.amax(1).argsort(descending=True, stable=True)]
        kept = _thin(x[winners], nearest[winners], generator)
        taken = winners[kept]
        for rows in blocks(0, len(x), 8 * BLOCK):
            closest = squared_distances(x[rows], x[taken]).amin(1)
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
    between = squared_distances(winners, winners).tolist()
    before = nearest.tolist()
    chance = torch.rand(len(before), generator=generator).tolist()
    kept: list[int] = []
    for i, old in enumerate(before):
        now = min([old] + [between[i][j] for j in kept])
        if not kept or chance[i] * old < now:
            kept.append(i)
    return torch.tensor(kept, device=winners.device)
