"""Greedy k-means++ seeds, drawn in batches, then swapped where that lowers Σ D².

Points are drawn with probability ∝ D², their squared distance to the nearest seed, and of several
candidates the one that lowers Σ D² most is taken (Arthur & Vassilvitskii 2007; greedy as in
scikit-learn). Here the seeds are drawn in batches that grow with the number of seeds, which turns k
passes over the data into a few matrix products. A point drawn near a seed taken before it in its
batch is dropped with the probability by which that seed lowered its D²: the points that remain
follow the current D² and not that of the start of the batch.

Some clusters are then missed and others hit twice, and Lloyd can't repair that: a centroid does not
cross the gap between clusters. Seeds that are hardly needed therefore move to where one is missing
(local search as in Lattanzi & Sohler 2019, here with many swaps at once). Without seed c its points
go to their second nearest, which raises Σ D² by a loss; a new seed p lowers it by a gain. A swap
with gain > loss lowers Σ D², and swaps far from each other do not interact.
"""

import torch
from torch import Tensor

from nofuss.evaluate.task import blocks
from nofuss.geometry import squared_distances

BLOCK = 512
CANDIDATES = 2  # points tried for each seed; swaps make up for more
SWAP_CANDIDATES = 4  # points tried for each swap
BATCH = 256  # most seeds drawn at once
ROUNDS = 5  # rounds of swaps, at most
SWAPS = 1024  # swaps of a round, at most; a quarter of the seeds if that is less
ENOUGH = 1e-2  # a round that lowers Σ D² by a smaller share is the last
SCORES = 2**18  # similarities to seeds that are held at once, within a core's cache


def choose_seeds(x: Tensor, k: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return indices (k,) of k-means++ seeds after swaps, and the nearest of them (N,)."""
    chosen = plus_plus(x, k, generator)
    if 1 < k < len(x):
        return swapped(x, chosen, generator)
    nearest = torch.zeros(len(x), dtype=torch.int64, device=x.device)
    if k > 1:  # every vector is a seed
        nearest[chosen] = torch.arange(k, device=x.device)
    return chosen, nearest


def plus_plus(x: Tensor, k: int, generator: torch.Generator) -> Tensor:
    """Return indices (k,) of greedy k-means++ seeds, each the best of several candidates."""
    first = torch.randint(len(x), (1,), generator=generator).to(x.device)
    field = _Field(x, (x - x[first]).square().sum(1))
    chosen, count = [first], 1
    while count < k:
        # D² is not updated within a batch. That misleads little while the batch is small beside
        # the seeds already there.
        batch = min(k - count, max(1, count // 8), BATCH)
        taken, _ = field.draw(batch, CANDIDATES, generator)
        field.lower(taken)
        chosen.append(taken)
        count += len(taken)
    return torch.cat(chosen)


def swapped(x: Tensor, chosen: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return seeds with a lower Σ D² and the nearest of them, after rounds of many swaps."""
    most = max(1, min(len(chosen) // 4, SWAPS))
    two = _TwoNearest(x, chosen)
    nearest, next_nearest = two.squared(chosen)
    for _ in range(ROUNDS):
        drawn, gain = _Field(x, nearest).draw(most, SWAP_CANDIDATES, generator)
        # Without seed c, each of its points is as far as its second nearest seed.
        loss = torch.bincount(two.index[0], next_nearest - nearest, len(chosen))
        removed = _removable(two.index[0], two.index[1], loss, gain)
        if not len(removed):
            break
        tried = chosen.clone()
        tried[removed] = drawn[: len(removed)]
        two.replace(removed, tried)
        squared = two.squared(tried)
        before, after = float(nearest.double().sum()), float(squared[0].double().sum())
        if after >= before:  # the swaps were too close to each other: undo them, and try fewer
            two.replace(removed, chosen)
            most = (len(removed) + 1) // 2
            continue
        chosen, (nearest, next_nearest) = tried, squared
        if after > (1 - ENOUGH) * before:
            break
    return chosen, two.index[0]


class _Field:
    """D² of all points, and by how much candidates would lower it."""

    def __init__(self, x: Tensor, nearest: Tensor) -> None:
        self.x, self.x2, self.nearest = x, x.square().sum(1), nearest
        # One product gives D² − |x − c|² whole: [2c, −|c|², 1] · [x, 1, D² − |x|²].
        ones = torch.ones_like(self.x2)
        self.left = torch.cat([2 * x, torch.stack([-self.x2, ones], 1)], 1)
        self.right = torch.cat([x, torch.stack([ones, nearest - self.x2], 1)], 1)

    def draw(
        self, count: int, candidates: int, generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        """Return up to `count` points, each the best of some, and their gains, falling."""
        drawn = _draw(self.nearest, count * candidates, generator)
        gain, place = _gains(self.left[drawn], self.right).view(count, candidates).max(1)
        winners = drawn.view(count, candidates).gather(1, place[:, None])[:, 0]
        gain, order = gain.sort(descending=True, stable=True)
        winners = winners[order]
        kept = _thin(self.x[winners], self.nearest[winners], generator)
        return winners[kept], gain[kept]

    def lower(self, taken: Tensor) -> None:
        """Lower D² to the distances to new seeds."""
        self.nearest.sub_(_falls(self.left[taken], self.right)).clamp_min_(0)
        self.nearest[taken] = 0  # rounding would leave more, and a seed could be drawn again
        self.right[:, -1] = self.nearest - self.x2


class _TwoNearest:
    """The two nearest seeds of each point: `score` x·c − |c|²/2 and `index`, (2, N) each."""

    def __init__(self, x: Tensor, chosen: Tensor) -> None:
        self.x2 = x.square().sum(1)
        self.left = torch.cat([x, torch.ones_like(self.x2)[:, None]], 1)
        self.right = torch.cat([x, self.x2[:, None] / -2], 1)
        self.score, self.index = _two_best(self.left, self.right[chosen])

    def squared(self, chosen: Tensor) -> tuple[Tensor, Tensor]:
        """Return the squared distances to the nearest seed and to the second, (N,) each."""
        nearest, next_nearest = (self.x2 - 2 * self.score).clamp_min_(0)
        nearest[chosen] = 0
        return nearest, next_nearest

    def replace(self, places: Tensor, chosen: Tensor) -> None:
        """Update both after other seeds were put in some places."""
        is_new = torch.zeros(len(chosen), dtype=torch.bool, device=chosen.device)
        is_new[places] = True
        stale = is_new[self.index].any(0)
        # A point whose two seeds are still there only compares them with the new ones; a point
        # that lost one of them must look at all seeds.
        score, index = _two_best(self.left, self.right[chosen[places]])
        both = torch.cat([self.score, score]), torch.cat([self.index, places[index]])
        self.score, order = both[0].topk(2, dim=0)
        self.index = both[1].gather(0, order)
        everything = _two_best(self.left[stale], self.right[chosen])
        self.score[:, stale], self.index[:, stale] = everything


def _two_best(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """Return the two largest of each row of left @ right.T and their columns, (2, N) each."""
    n, k = len(left), len(right)
    rows = max(1, SCORES // k)
    buffer = left.new_empty(rows * k)
    score, index = left.new_empty(2, n), torch.empty(2, n, dtype=torch.int64, device=left.device)
    for i in blocks(0, n, rows):
        s = torch.mm(left[i], right.T, out=buffer[: (i.stop - i.start) * k].view(-1, k))
        score[0, i], index[0, i] = s.max(1)
        s.scatter_(1, index[0, i, None], -torch.inf)
        score[1, i], index[1, i] = s.max(1)
    return score, index


def _removable(first: Tensor, second: Tensor, loss: Tensor, gain: Tensor) -> Tensor:
    """Return seeds to remove, the cheapest for the candidate with the largest gain, and so on.

    Where a seed is removed, the seeds that its points go to must stay: its loss counts on them.
    """
    order = first.argsort()
    ends = torch.bincount(first, minlength=len(loss)).cumsum(0).tolist()
    heirs = second[order].tolist()  # of seed c: from ends[c − 1] to ends[c]
    removed: dict[int, None] = {}  # a set that keeps its order
    fixed: set[int] = set()
    gains, losses = gain.tolist(), loss.tolist()
    # Gains fall and losses rise: from the first pair that does not pay, none does.
    for c in loss.argsort(stable=True)[: 4 * len(gains)].tolist():
        if len(removed) == len(gains) or gains[len(removed)] <= losses[c]:
            break
        own = set(heirs[ends[c - 1] if c else 0 : ends[c]])
        if c not in fixed and own.isdisjoint(removed):
            removed[c] = None
            fixed |= own
    return torch.tensor([*removed], dtype=torch.int64, device=loss.device)


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
    gains = left.new_zeros(len(left))
    ones = left.new_ones(BLOCK)
    buffer = left.new_empty(len(left) * BLOCK)
    for cols in blocks(0, len(right), BLOCK):
        c = cols.stop - cols.start
        fall = torch.mm(left, right[cols].T, out=buffer[: len(left) * c].view(-1, c))
        gains.addmv_(fall.clamp_min_(0), ones[:c])
    return gains


def _falls(left: Tensor, right: Tensor) -> Tensor:
    """Return by how much D² falls at each point with all candidates as seeds, (N,)."""
    falls = [(left @ right[cols].T).amax(0) for cols in blocks(0, len(right), 4 * BLOCK)]
    return torch.cat(falls).clamp_min_(0)


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
