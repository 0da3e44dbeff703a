"""What embeddings show about the data: confused classes, doubtful labels, copies, a map.

Positions are those of the vectors that were searched; `labels` has the class of each of them.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Rows = NDArray[np.int64]
FEWEST = 3
"""Neighbours of other classes that it takes to doubt a label."""
AGREED = 0.7
CLEARLY_AGREED = 0.85
"""Share of the places that another class could fill which it must fill; the second where items of
the label's own class follow (docs/lab)."""


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
    fraction: float
    """These queries as a fraction of all queries of both classes."""
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
    """Two items with almost the same embedding."""

    first: int
    second: int
    distance: float


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
        fraction = counts[i] / max(1, queries[a] + queries[b])
        result.append(Confusion(a, b, int(counts[i]), float(fraction), example))
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
        enough = CLEARLY_AGREED if len(own) else AGREED
        if votes.max() < enough * min(len(items), sizes[suggested]) or votes.max() < 2:
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


def copies(nearest: Neighbours, *, within: float, most: int = 200) -> list[Copy]:
    """Return pairs at most `within` apart, closest first."""
    pairs: dict[tuple[int, int], float] = {}
    for query, items, distances in zip(*nearest, strict=True):
        for item, distance in zip(items[:3], distances[:3], strict=True):
            if distance <= within:
                pairs[min(int(query), int(item)), max(int(query), int(item))] = float(distance)
    closest = sorted(pairs.items(), key=lambda pair: (pair[1], pair[0]))[:most]
    return [Copy(a, b, distance) for (a, b), distance in closest]


def project(vectors: NDArray[Any], *, seed: int = 0) -> Floats:
    """Map (N, D) → (N, 2) between 0 and 1; neighbours stay neighbours, distances mean little.

    t-SNE that starts at the PCA, so that a map is the same every time.
    """
    x = np.asarray(vectors, dtype=np.float64)
    centred = x - x.mean(0) if len(x) else x
    if len(x) > 3:
        left, values, _ = np.linalg.svd(centred, full_matrices=False)
        centred = left[:, :2] * values[:2]  # the first two principal components
    places = np.zeros((len(x), 2))
    places[:, : centred.shape[1]] = centred[:, :2]
    if len(x) >= 10 and places.std() > 1e-9:  # fewer or equal points have no structure to show
        from sklearn.manifold import TSNE

        start = 1e-4 * places / places[:, 0].std()  # the spread of scikit-learn's init="pca"
        perplexity = min(30.0, (len(x) - 1) / 3)
        places = TSNE(
            perplexity=perplexity, init=start, max_iter=500, random_state=seed
        ).fit_transform(x)
    low, high = (places.min(0), places.max(0)) if len(x) else (0.0, 1.0)
    return np.asarray((places - low) / np.maximum(high - low, 1e-12), dtype=np.float32)
