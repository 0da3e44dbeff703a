"""What neighbours show about the data: confused classes, doubtful labels, copies."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from nofuss.ranking.neighbours import nearest

Floats = NDArray[np.float32]
Rows = NDArray[np.int64]
NEIGHBOURS = 10
FEWEST = 3
"""Neighbours of other classes that it takes to doubt a label."""
AGREED = 0.7
CLEARLY_AGREED = 0.85
"""Share of the places that another class could fill which it must fill; the second where items of
the label's own class follow (LOG.md)."""


class Neighbours(NamedTuple):
    """The nearest items of each query, without itself (by index); positions in the embeddings."""

    queries: Rows
    """(Q,)"""
    items: Rows
    """(Q, K), closest first."""
    distances: Floats
    """(Q, K) Euclidean."""


class Confusion(NamedTuple):
    """Two classes whose items are nearest neighbours of each other."""

    first: int
    second: int
    queries: int
    """How many queries of either class have their nearest neighbour in the other."""
    share: float
    """These queries as a share of all queries of both classes."""
    example: tuple[int, int]
    """The closest such pair, as positions."""


class DoubtfulLabel(NamedTuple):
    """An item whose neighbours agree on another class."""

    item: int
    label: int
    suggested: int
    votes: float
    """Share of the first `places` neighbours that are of the suggested class."""
    nearest: int
    """The closest item of the suggested class."""
    distance: float
    places: int
    """The neighbours up to the last one of the suggested class, all nearer than any of its own."""


class Copy(NamedTuple):
    """Two items that look the same."""

    first: int
    second: int
    distance: float


def neighbours(
    vectors: Floats, *, k: int = NEIGHBOURS, queries: int = 5000, seed: int = 0
) -> Neighbours:
    """Find the k nearest neighbours of all items, or of `queries` random ones if there are more."""
    count = len(vectors)
    k = min(k, count - 1)
    chosen = np.sort(np.random.default_rng(seed).permutation(count)[:queries]).astype(np.int64)
    x = torch.from_numpy(np.ascontiguousarray(vectors))
    distances, rows = (found.numpy() for found in nearest(x[chosen], x, k + 1))
    is_itself = rows == chosen[:, None]
    is_itself[~is_itself.any(1), -1] = True  # copies of it, all as close, fill the list
    shape = len(chosen), max(k, 0)
    return Neighbours(chosen, rows[~is_itself].reshape(shape), distances[~is_itself].reshape(shape))


def confusions(nearest: Neighbours, labels: Rows, *, most: int = 10) -> list[Confusion]:
    """Return the pairs of classes with the most nearest neighbours in each other."""
    if not nearest.items.size:
        return []
    query_labels, first_labels = labels[nearest.queries], labels[nearest.items[:, 0]]
    wrong = np.flatnonzero(query_labels != first_labels)
    # (a, b) and (b, a) are the same confusion.
    pairs = np.sort(np.stack([query_labels[wrong], first_labels[wrong]], 1), axis=1)
    kinds, kind_of, counts = np.unique(pairs, axis=0, return_inverse=True, return_counts=True)
    queries = np.bincount(query_labels, minlength=int(labels.max()) + 1)
    result = []
    for i in np.lexsort((kinds[:, 1], kinds[:, 0], -counts))[:most]:
        a, b = map(int, kinds[i])
        rows = wrong[kind_of.reshape(-1) == i]
        closest = rows[nearest.distances[rows, 0].argmin()]
        example = int(nearest.queries[closest]), int(nearest.items[closest, 0])
        share = counts[i] / max(1, queries[a] + queries[b])
        result.append(Confusion(a, b, int(counts[i]), float(share), example))
    return result


def doubtful_labels(nearest: Neighbours, labels: Rows, *, most: int = 200) -> list[DoubtfulLabel]:
    """Return items with most of one other class nearer to them than any item of their own.

    How many is most follows from the other class: a class of eight can't fill more than eight
    places, and whatever comes after them says nothing about the label. Items of classes with
    one or two items are left out: they have too few possible neighbours. The clearest come first.
    """
    sizes = np.bincount(labels)
    doubts = []
    for query, items, distances in zip(*nearest, strict=True):
        label, their_labels = int(labels[query]), labels[items]
        own = np.flatnonzero(their_labels == label)
        nearer = their_labels[: own[0]] if len(own) else their_labels
        if sizes[label] < 3 or len(nearer) < FEWEST:
            continue
        classes, votes = np.unique(nearer, return_counts=True)
        suggested = int(classes[votes.argmax()])
        share = CLEARLY_AGREED if len(own) else AGREED
        if votes.max() < share * min(len(items), sizes[suggested]) or votes.max() < 2:
            continue
        places = int(np.flatnonzero(nearer == suggested)[-1]) + 1
        closest = int(np.flatnonzero(nearer == suggested)[0])
        doubts.append(
            DoubtfulLabel(
                int(query),
                label,
                suggested,
                float(votes.max() / places),
                int(items[closest]),
                float(distances[closest]),
                places,
            )
        )
    return sorted(doubts, key=lambda d: (-d.votes, -d.places, d.distance, d.item))[:most]


def copies(
    nearest: Neighbours,
    *,
    same: Callable[[int, int], bool] | None = None,
    within: float = 0.1,
    most: int = 200,
) -> list[Copy]:
    """Return pairs at most `within` apart that `same` confirms, closest first."""
    pairs: dict[tuple[int, int], float] = {}
    for query, items, distances in zip(*nearest, strict=True):
        for item, distance in zip(items[:3], distances[:3], strict=True):
            if distance <= within:
                pairs[min(int(query), int(item)), max(int(query), int(item))] = float(distance)
    # `same` may decode both pictures, so only the closest pairs are given to it.
    closest = sorted(pairs.items(), key=lambda pair: (pair[1], pair[0]))[: 5 * most]
    return [Copy(a, b, d) for (a, b), d in closest if same is None or same(a, b)][:most]
