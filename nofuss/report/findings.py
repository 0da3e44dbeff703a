"""What neighbours tell about the data: confused classes, doubtful labels, copies."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from nofuss.geometry import squared_distances

Floats = NDArray[np.float32]
Rows = NDArray[np.int64]
NEIGHBOURS = 10
BLOCK = 512


class Neighbours(NamedTuple):
    """The nearest items of each query, itself left out by index; all are positions in the set."""

    queries: Rows
    """(Q,)"""
    items: Rows
    """(Q, K), closest first."""
    distances: Floats
    """(Q, K) Euclidean."""


class Confusion(NamedTuple):
    """Two classes that are taken for each other."""

    first: int
    second: int
    queries: int
    """Queries of either whose nearest neighbour is of the other."""
    share: float
    """Of the queries of both."""
    example: tuple[int, int]
    """The closest such pair, as positions."""


class DoubtfulLabel(NamedTuple):
    """An item whose neighbours agree on another class."""

    item: int
    label: int
    suggested: int
    votes: float
    """Share of its neighbours that are of the suggested class."""
    nearest: int
    """The closest item of the suggested class."""
    distance: float


class Copy(NamedTuple):
    """Two items that look the same."""

    first: int
    second: int
    distance: float


def neighbours(
    vectors: Floats, *, k: int = NEIGHBOURS, queries: int = 5000, seed: int = 0
) -> Neighbours:
    """The k nearest of all items, or of `queries` drawn at random where there are more."""
    count = len(vectors)
    k = min(k, count - 1)
    chosen = np.sort(np.random.default_rng(seed).permutation(count)[:queries]).astype(np.int64)
    x = torch.from_numpy(np.ascontiguousarray(vectors))
    items = np.empty((len(chosen), max(k, 0)), np.int64)
    apart = np.empty((len(chosen), max(k, 0)), np.float32)
    for i in range(0, len(chosen) if k > 0 else 0, BLOCK):
        rows = torch.from_numpy(chosen[i : i + BLOCK])
        d2 = squared_distances(x[rows], x)
        d2[torch.arange(len(rows)), rows] = torch.inf
        near = d2.topk(k, largest=False)
        items[i : i + BLOCK], apart[i : i + BLOCK] = near.indices, near.values.sqrt()
    return Neighbours(chosen, items, apart)


def confusions(found: Neighbours, labels: Rows, *, most: int = 10) -> list[Confusion]:
    """The pairs of classes with the most nearest neighbours in each other."""
    if not found.items.size:
        return []
    own, other = labels[found.queries], labels[found.items[:, 0]]
    wrong = np.flatnonzero(own != other)
    pairs = np.sort(np.stack([own[wrong], other[wrong]], 1), axis=1)
    kinds, which, counts = np.unique(pairs, axis=0, return_inverse=True, return_counts=True)
    queries = np.bincount(own, minlength=int(labels.max()) + 1)
    result = []
    for i in np.lexsort((kinds[:, 1], kinds[:, 0], -counts))[:most]:
        a, b = map(int, kinds[i])
        here = wrong[which.reshape(-1) == i]
        best = here[found.distances[here, 0].argmin()]
        example = int(found.queries[best]), int(found.items[best, 0])
        share = counts[i] / max(1, queries[a] + queries[b])
        result.append(Confusion(a, b, int(counts[i]), float(share), example))
    return result


def doubtful_labels(found: Neighbours, labels: Rows, *, most: int = 200) -> list[DoubtfulLabel]:
    """Items with no neighbour of their own class, and most neighbours of one other.

    A class of one item or two proves nothing, and is left out. The surest come first.
    """
    sizes = np.bincount(labels)
    doubts = []
    for query, items, apart in zip(*found, strict=True):
        own, theirs = labels[query], labels[items]
        if sizes[own] < 3 or not len(items) or (theirs == own).any():
            continue
        classes, votes = np.unique(theirs, return_counts=True)
        suggested, share = int(classes[votes.argmax()]), votes.max() / len(items)
        # A small class can't fill all the places: its own size is what to compare with.
        if votes.max() < max(2, 0.7 * min(len(items), sizes[suggested])):
            continue
        nearest = int(np.flatnonzero(theirs == suggested)[0])
        doubts.append(
            DoubtfulLabel(
                int(query),
                int(own),
                suggested,
                float(share),
                int(items[nearest]),
                float(apart[nearest]),
            )
        )
    return sorted(doubts, key=lambda d: (-d.votes, d.distance, d.item))[:most]


def copies(
    found: Neighbours,
    *,
    same: Callable[[int, int], bool] | None = None,
    within: float = 0.1,
    most: int = 200,
) -> list[Copy]:
    """Pairs of nearest neighbours at most `within` apart that `same` confirms, closest first."""
    pairs: dict[tuple[int, int], float] = {}
    for query, items, apart in zip(*found, strict=True):
        for item, distance in zip(items[:3], apart[:3], strict=True):
            if distance <= within:
                pairs[min(int(query), int(item)), max(int(query), int(item))] = float(distance)
    near = sorted(pairs.items(), key=lambda pair: (pair[1], pair[0]))[: 5 * most]
    return [Copy(a, b, d) for (a, b), d in near if same is None or same(a, b)][:most]
