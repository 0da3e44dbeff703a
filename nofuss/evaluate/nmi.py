"""NMI and AMI: how well k-means on the embeddings recovers the classes.

NMI = 2·I(Ω, C) / (H(Ω) + H(C)). The paper's text says "harmonic"; its formula is this arithmetic
mean, which is also what scikit-learn computes by default. How k-means is seeded and where it stops
changes the score by several points: here it is greedy k-means++ and Lloyd, as in scikit-learn, and
the same seed gives the same score.

AMI subtracts what chance would give, which depends on the sizes of classes and clusters alone.
scikit-learn computes it for every pair of them, 100 s for 11,316 classes; here it is computed once
for each pair of sizes.
"""

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from nofuss.evaluate.kmeans import kmeans
from nofuss.evaluate.retrieval import classes_of, directions, vectors_of
from nofuss.geometry import Array

PAIRS = 2**20  # numbers held at once


def nmi(embeddings: Array, labels: Array, *, seed: int, normalize: bool = True) -> float:
    """Return the NMI of the classes and a k-means with as many clusters as there are classes."""
    clusters = cluster(embeddings, labels, seed=seed, normalize=normalize)
    return normalized_mutual_information(clusters, labels)


def ami(embeddings: Array, labels: Array, *, seed: int, normalize: bool = True) -> float:
    """Return the AMI (NMI corrected for chance) of the classes and the same k-means as in `nmi`."""
    clusters = cluster(embeddings, labels, seed=seed, normalize=normalize)
    return adjusted_mutual_information(clusters, labels)


def cluster(embeddings: Array, labels: Array, *, seed: int, normalize: bool = True) -> Tensor:
    """Return the cluster of each item (N,), with as many clusters as there are classes."""
    x = vectors_of(embeddings)
    k = int(classes_of(labels, len(x)).max()) + 1
    return kmeans(directions(x) if normalize else x, k, seed=seed)[1].cpu()


def normalized_mutual_information(a: Array, b: Array) -> float:
    """Return 2·I(a, b) / (H(a) + H(b)) of two labelings; 1 if both are constant."""
    from sklearn.metrics import normalized_mutual_info_score  # a second that searching does without

    first, second = _two_labelings(a, b)
    return float(normalized_mutual_info_score(first.numpy(), second.numpy()))


def adjusted_mutual_information(a: Array, b: Array) -> float:
    """Return mutual information above chance over mean entropy above chance, as scikit-learn's.

    The same division is 1, also into single items, where chance explains everything.
    """
    from sklearn.metrics import mutual_info_score

    first, second = (labels.numpy() for labels in _two_labelings(a, b))
    sizes = [np.unique(labels, return_counts=True)[1] for labels in (first, second)]
    if len(np.unique(np.stack([first, second]), axis=1).T) == len(sizes[0]) == len(sizes[1]):
        return 1.0
    if 1 in map(len, sizes):  # one of them divides nothing
        return 0.0
    chance = _expected_information(*sizes)
    entropies = [float(-(p * np.log(p)).sum()) for p in (s / len(first) for s in sizes)]
    above = float(mutual_info_score(first, second)) - chance
    most = (entropies[0] + entropies[1]) / 2 - chance
    # Both may vanish where chance explains everything.
    eps = float(np.finfo(np.float64).eps)
    return max(above, eps) / max(most, eps) if above >= 0 else min(above, -eps) / max(most, eps)


def _expected_information(a: NDArray[np.int64], b: NDArray[np.int64]) -> float:
    """Return the mutual information that labelings with parts of these sizes have by chance.

    The number n that two parts of sizes a and b share is hypergeometric (Vinh et al. 2010, Eq. 24).
    """
    from scipy.special import gammaln  # takes long to import

    total = int(a.sum())
    (sizes, counts), (others, other_counts) = (np.unique(s, return_counts=True) for s in (a, b))
    expected = 0.0
    for size, count in zip(sizes.tolist(), counts.tolist(), strict=True):
        rows = max(1, PAIRS // size)
        for start in range(0, len(others), rows):
            part = others[start : start + rows, None]
            n = np.arange(1, size + 1)
            possible = (n <= part) & (n >= size + part - total)
            left = (part - n).clip(0), (total - size - part + n).clip(0)
            logs = gammaln(size + 1) + gammaln(part + 1) + gammaln(total - size + 1)
            logs = logs + gammaln(total - part + 1) - gammaln(total + 1) - gammaln(n + 1)
            logs = logs - gammaln(size - n + 1) - gammaln(left[0] + 1) - gammaln(left[1] + 1)
            terms = n / total * (np.log(total) + np.log(n) - np.log(size) - np.log(part))
            shares = (terms * np.exp(logs) * possible).sum(1)
            expected += count * float(shares @ other_counts[start : start + rows])
    return expected


def _two_labelings(a: Array, b: Array) -> tuple[Tensor, Tensor]:
    if len(a) == 0:
        raise ValueError("labelings are empty; there is nothing to compare")
    return classes_of(a, len(a)), classes_of(b, len(a))
