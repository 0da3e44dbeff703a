"""K-means for many clusters: greedy k-means++ seeds, then Lloyd without needless scoring.

- With hundreds of vectors a cluster it starts from a sample of them.
- Lloyd is exact but scores little: a centroid is scored again only when its members changed, and
  a vector is compared with all centroids only when its own has moved away from it.

It ends where Lloyd ends, as scikit-learn's and faiss's do, so that NMI compares with theirs and
with published figures. Everything is computed in blocks: memory is O(N·D + block²).
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from nofuss.distributed.threads import blocks, in_threads
from nofuss.evaluate.retrieval import vectors_of
from nofuss.evaluate.seeding import plus_plus
from nofuss.geometry import Array

SAMPLE = 64  # vectors a cluster to start from, where there are more than twice as many
ITERATIONS_OF_SAMPLE = 5
BLOCK = 384  # rows and columns of one product, which then stays in a core's cache


def kmeans(vectors: Array, k: int, *, seed: int, iterations: int = 100) -> tuple[Tensor, Tensor]:
    """Return centroids (k, D) and clusters (N,).

    A cluster that loses its last vector takes the one farthest from its centroid, so none is empty.
    """
    x = vectors_of(vectors, name="vectors")
    if not 1 <= k <= len(x):
        raise ValueError(f"k is {k}; expected 1 to {len(x)}, the number of vectors")
    if iterations < 1:
        raise ValueError(f"iterations is {iterations}; expected 1 or more")
    # |x|² + |c|² − 2 x·c loses digits where vectors are long beside their distances: centered,
    # they are as short as can be. In units of the largest entry no square overflows or vanishes.
    center = x.mean(0)
    x = x - center
    unit = x.abs().max().clamp_min(torch.finfo(x.dtype).tiny)
    x = x / unit
    assignment = _lloyd(x, _start(x, k, torch.Generator().manual_seed(seed)), iterations)
    return _means(x, assignment, k) * unit + center, assignment


def _start(x: Tensor, k: int, generator: torch.Generator) -> Tensor:
    """Return the first centroids (k, D).

    Of many vectors a cluster, some are enough to find where clusters are: k-means++ and a few
    iterations on a sample cost less than one iteration on all, and save several.
    """
    if len(x) <= 2 * SAMPLE * k:
        return x[plus_plus(x, k, generator)]
    some = x[torch.randperm(len(x), generator=generator)[: SAMPLE * k].to(x.device)]
    seeds = some[plus_plus(some, k, generator)]
    return _means(some, _lloyd(some, seeds, ITERATIONS_OF_SAMPLE), k)


def _lloyd(x: Tensor, centroids: Tensor, iterations: int) -> Tensor:
    """Return the clusters (N,) after Lloyd's algorithm from given centroids; none is empty."""
    k = len(centroids)
    left = torch.cat([x, torch.ones_like(x[:, :1])], 1)
    if k <= BLOCK:
        return _lloyd_of_few(x, left, centroids, iterations)
    right = _factor(centroids)  # left · right = x·c − |c|²/2, largest at the nearest
    score = left.new_full((len(x),), -torch.inf)
    assignment = torch.zeros(len(x), dtype=torch.int64, device=x.device)
    _improve(left, right, torch.arange(k, device=x.device), score, assignment)
    assignment = _fill_empty(x, centroids, assignment)
    changed = torch.ones(k, dtype=torch.bool, device=x.device)
    for _ in range(iterations):
        centroids = _means(x, assignment, k)
        right[changed] = _factor(centroids)[changed]
        own = (left * right[assignment]).sum(1)
        # A vector must look at all centroids only if its own moved away. If its own moved closer
        # or not at all, no unchanged centroid can have become the nearest: those that changed
        # are compared anyway.
        moved = changed[assignment]
        stale = (moved & (own < score)).nonzero()[:, 0]
        score = torch.where(moved, own, score)
        before = assignment.clone()
        _improve(left, right, changed.nonzero()[:, 0], score, assignment)
        best, at = score[stale], assignment[stale]
        _improve(left[stale], right, (~changed).nonzero()[:, 0], best, at)
        score[stale], assignment[stale] = best, at
        assignment = _fill_empty(x, centroids, assignment)
        differs = before != assignment
        changed.zero_()
        changed[before[differs]] = changed[assignment[differs]] = True
        if not changed.any():
            break
    return assignment


def _improve(left: Tensor, right: Tensor, columns: Tensor, score: Tensor, index: Tensor) -> None:
    """Replace score and index (N,), in place, where left @ right[columns].T is higher."""
    right = right[columns]
    parts = [right[j].T for j in blocks(0, len(right), BLOCK)]

    def look(strips: Iterator[slice]) -> None:
        buffer = left.new_empty(BLOCK * BLOCK)
        for rows in strips:
            x, top, at = left[rows], score[rows], index[rows]
            for j, y in enumerate(parts):
                s = torch.mm(x, y, out=buffer[: len(x) * y.shape[1]].view(len(x), -1))
                # The index costs more than the maximum: look for it only where it changes.
                highest = s.amax(1)
                better = (highest > top).nonzero()[:, 0]
                top[better] = highest[better]
                at[better] = columns[s[better].argmax(1) + j * BLOCK]

    in_threads(look, blocks(0, len(left), BLOCK))


def _lloyd_of_few(x: Tensor, left: Tensor, centroids: Tensor, iterations: int) -> Tensor:
    """Return the same for few clusters: most change in every iteration, so all are compared."""
    k = len(centroids)
    nearest = torch.zeros(len(x), dtype=torch.int64, device=x.device)
    assignment = _fill_empty(x, centroids, _nearest_of_few(left, _factor(centroids), nearest))
    for _ in range(iterations):
        before, centroids = assignment, _means(x, assignment, k)
        assignment = _nearest_of_few(left, _factor(centroids), before)
        assignment = _fill_empty(x, centroids, assignment)
        if torch.equal(assignment, before):
            break
    return assignment


def _nearest_of_few(left: Tensor, right: Tensor, before: Tensor) -> Tensor:
    """Return the column of the maximum of each row of left @ right.T, of BLOCK columns at most.

    before: the columns of another time; of equal maxima, one that had it then is kept.
    """
    n, k = len(left), len(right)
    size = max(BLOCK, BLOCK * BLOCK // k)
    found, buffer = before.clone(), left.new_empty(size * k)
    for rows in blocks(0, n, size):
        x, at = left[rows], found[rows]
        s = torch.mm(x, right.T, out=buffer[: len(x) * k].view(len(x), k))
        lower = (s.gather(1, at[:, None])[:, 0] < s.amax(1)).nonzero()[:, 0]
        at[lower] = s[lower].argmax(1)
    return found


def _factor(centroids: Tensor) -> Tensor:
    """Return [c, −|c|²/2], which times [x, 1] is (|x|² − |x − c|²)/2: no |x|² is needed."""
    return torch.cat([centroids, centroids.square().sum(1, keepdim=True) / -2], 1)


def _means(x: Tensor, assignment: Tensor, k: int) -> Tensor:
    sums = x.new_zeros(k, x.shape[1]).index_add_(0, assignment, x)
    return sums / torch.bincount(assignment, minlength=k)[:, None]


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
