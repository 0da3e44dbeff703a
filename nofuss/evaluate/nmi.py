"""NMI and AMI: how well k-means on the embeddings recovers the classes.

NMI = 2·I(Ω, C) / (H(Ω) + H(C)). The paper's text says "harmonic"; its formula is this arithmetic
mean, which is also what scikit-learn computes by default. How k-means is seeded and where it stops
changes the score by several points: here it is k-means++, Lloyd and Hartigan's exchanges (see
kmeans.py), and the same seed gives the same score.
"""

from sklearn.metrics import adjusted_mutual_info_score, normalized_mutual_info_score
from torch import Tensor

from nofuss.evaluate.checked import classes_of, directions, vectors_of
from nofuss.evaluate.kmeans import kmeans
from nofuss.geometry import Array


def nmi(
    embeddings: Array, labels: Array, *, seed: int, normalize: bool = True, refine: bool = True
) -> float:
    """Return the NMI of the classes and a k-means with as many clusters as there are classes.

    `refine=False` clusters by Lloyd alone, as most published figures do: several points lower where
    classes are small.
    """
    clusters = cluster(embeddings, labels, seed=seed, normalize=normalize, refine=refine)
    return normalized_mutual_information(clusters, labels)


def ami(
    embeddings: Array, labels: Array, *, seed: int, normalize: bool = True, refine: bool = True
) -> float:
    """Return the AMI (NMI corrected for chance) of the classes and the same k-means as in `nmi`."""
    clusters = cluster(embeddings, labels, seed=seed, normalize=normalize, refine=refine)
    return adjusted_mutual_information(clusters, labels)


def cluster(
    embeddings: Array, labels: Array, *, seed: int, normalize: bool = True, refine: bool = True
) -> Tensor:
    """Return the cluster of each item (N,), with as many clusters as there are classes."""
    x = vectors_of(embeddings)
    k = int(classes_of(labels, len(x)).max()) + 1
    return kmeans(directions(x) if normalize else x, k, seed=seed, refine=refine)[1].cpu()


def normalized_mutual_information(a: Array, b: Array) -> float:
    """Return 2·I(a, b) / (H(a) + H(b)) of two labelings; 1 if both are constant."""
    first, second = _two_labelings(a, b)
    return float(normalized_mutual_info_score(first.numpy(), second.numpy()))


def adjusted_mutual_information(a: Array, b: Array) -> float:
    """Return mutual information above chance over mean entropy above chance (scikit-learn's)."""
    first, second = _two_labelings(a, b)
    return float(adjusted_mutual_info_score(first.numpy(), second.numpy()))


def _two_labelings(a: Array, b: Array) -> tuple[Tensor, Tensor]:
    if len(a) == 0:
        raise ValueError("labelings are empty; there is nothing to compare")
    return classes_of(a, len(a)), classes_of(b, len(a))
