"""Compare every score of `nofuss.evaluate` with independent implementations, and print the table.

python examples/check_metrics.py

The largest difference over several sets of embeddings, float32 unless said otherwise. The loop is
the definition in float64: distances by differences, ties before positives. faiss and
pytorch-metric-learning compute in float32, so that of nearly equal neighbours they may take the
other; the last rows are sets where that, or the tie band of an earlier version, shows.
"""

from collections.abc import Callable

import faiss
import numpy as np
import torch
from pytorch_metric_learning.utils.accuracy_calculator import AccuracyCalculator
from sklearn.cluster import KMeans
from sklearn.metrics import adjusted_mutual_info_score, normalized_mutual_info_score
from torch import Tensor

from nofuss import evaluate as ours

Data = tuple[Tensor, Tensor]
KS = (1, 2, 4, 8)
PEER = {
    "Recall@1": "precision_at_1",
    "MAP@R": "mean_average_precision_at_r",
    "R-precision": "r_precision",
    "MAP": "mean_average_precision",
    "MRR": "mean_reciprocal_rank",
}


def sets() -> dict[str, Data]:
    """Unit vectors of several kinds, with labels."""
    generator = torch.Generator().manual_seed(0)

    def draw(items: int, dim: int, classes: int, noise: float, offset: float = 0.0) -> Data:
        labels = torch.randint(classes, (items,), generator=generator)
        x = torch.randn(classes, dim, generator=generator)[labels] + offset
        x = x + noise * torch.randn(items, dim, generator=generator)
        return x / x.norm(dim=1, keepdim=True), labels

    return {
        "2,000 × 64, 400 classes": draw(2000, 64, 400, 1.1),
        "1,500 × 16, 5 classes": draw(1500, 16, 5, 1.5),
        "1,000 × 512, all cosines above 0.9": draw(1000, 512, 100, 1.0, offset=6.0),
        "2,000 random directions in 2-d": draw(2000, 2, 2, 100.0),
    }


def loop(x: Tensor, labels: Tensor) -> dict[str, float]:
    """All retrieval scores by their definition, a query at a time in float64."""
    x = x.double() / x.double().norm(dim=1, keepdim=True)
    scores: dict[str, list[float]] = {}
    for i in range(len(x)):
        squared = (x - x[i]).square().sum(1)
        same = labels == labels[i]
        others = torch.arange(len(x)) != i
        right, wrong = squared[same & others].sort().values, squared[~same].sort().values
        if not len(right):
            continue
        r, big_r = torch.arange(1, len(right) + 1), len(right)
        rank = (r + torch.searchsorted(wrong, right, right=True)).double()
        found = {f"Recall@{k}": float(rank[0] <= k) for k in KS}
        found |= {f"precision@{k}": float((rank <= k).sum()) / k for k in KS}
        found["MAP@R"] = float((r / rank * (rank <= big_r)).sum()) / big_r
        found["R-precision"] = float((rank <= big_r).double().mean())
        found |= {"MAP": float((r / rank).mean()), "MRR": float(1 / rank[0])}
        for name, value in found.items():
            scores.setdefault(name, []).append(value)
    return {name: float(np.mean(values)) for name, values in scores.items()}


def measured(x: Tensor, labels: Tensor) -> dict[str, float]:
    """The same by nofuss."""
    found = {f"Recall@{k}": v for k, v in ours.recall_at_k(x, labels, KS).items()}
    found |= {f"precision@{k}": v for k, v in ours.precision_at_k(x, labels, KS).items()}
    found |= {"MAP@R": ours.map_at_r(x, labels), "R-precision": ours.r_precision(x, labels)}
    found["MAP"] = ours.mean_average_precision(x, labels)
    return found | {"MRR": ours.mean_reciprocal_rank(x, labels)}


def by_pml(x: Tensor, labels: Tensor) -> dict[str, float]:
    """The same by pytorch-metric-learning, over all ranks."""
    calculator = AccuracyCalculator(
        include=tuple(PEER.values()), k=len(x) - 1, device=torch.device("cpu")
    )
    found = calculator.get_accuracy(x, labels)
    return {name: float(found[peer]) for name, peer in PEER.items()}


def by_faiss(x: Tensor, labels: Tensor) -> dict[str, float]:
    """Recall@K from faiss's neighbours."""
    index = faiss.IndexFlatL2(x.shape[1])
    index.add(x.numpy())
    rows = index.search(x.numpy(), max(KS) + 1)[1]
    near = np.stack([row[row != i][: max(KS)] for i, row in enumerate(rows)])
    hit = labels.numpy()[near] == labels.numpy()[:, None]
    query = torch.bincount(labels)[labels].numpy() > 1
    return {f"Recall@{k}": float(hit[query, :k].any(1).mean()) for k in KS}


def largest(
    peer: Callable[[Tensor, Tensor], dict[str, float]], data: list[Data]
) -> dict[str, float]:
    """The largest difference of each score from the peer's."""
    worst: dict[str, float] = {}
    for x, labels in data:
        found, expected = measured(x, labels), peer(x, labels)
        for name in expected:
            worst[name] = max(worst.get(name, 0.0), abs(found[name] - expected[name]))
    return worst


def of_labelings() -> dict[str, float]:
    """The largest difference of NMI and AMI from scikit-learn's, over random labelings."""
    random = np.random.default_rng(0)
    worst = {"NMI": 0.0, "AMI": 0.0}
    for _ in range(50):
        a, b = random.integers(random.integers(1, 40), size=(2, random.integers(2, 400)))
        b = np.where(random.random(len(a)) < 0.5, a, b)
        nmi = ours.normalized_mutual_information(a, b) - normalized_mutual_info_score(a, b)
        ami = ours.adjusted_mutual_information(a, b) - adjusted_mutual_info_score(a, b)
        worst = {"NMI": max(worst["NMI"], abs(nmi)), "AMI": max(worst["AMI"], abs(ami))}
    return worst


def of_kmeans() -> None:
    """Print inertia and NMI of k-means beside scikit-learn's, means over seeds."""
    kinds = {
        "separate: 100 × 20, 8-d, sd 0.2": (100, 20, 8, 0.2),
        "separate: 100 × 20, 64-d, sd 0.2": (100, 20, 64, 0.2),
        "overlapping: 100 × 20, 16-d, sd 0.9": (100, 20, 16, 0.9),
        "tiny: 400 × 5, 64-d, sd 0.2": (400, 5, 64, 0.2),
        "tiny, overlapping: 400 × 5, 64-d, sd 1.1": (400, 5, 64, 1.1),
    }
    print("\n| clusters × points | inertia, of theirs | NMI | theirs |\n|---|---|---|---|")
    for kind, (k, each, dim, noise) in kinds.items():
        labels, rows = np.repeat(np.arange(k), each), []
        for seed in range(8):
            random = np.random.default_rng(seed)
            x = random.normal(size=(k, dim))[labels] + noise * random.normal(size=(k * each, dim))
            x = x.astype(np.float32)
            centroids, clusters = ours.kmeans(x, k, seed=seed)
            peer = KMeans(k, n_init=1, random_state=seed).fit(x)
            inertia = float(np.square(x - centroids[clusters].numpy()).sum())
            found = (clusters.numpy(), peer.labels_)
            rows.append(
                (inertia / peer.inertia_, *(normalized_mutual_info_score(labels, c) for c in found))
            )
        print(f"| {kind} | " + " | ".join(f"{v:.4f}" for v in np.mean(rows, 0)) + " |")


def main() -> None:
    """Print a row a score."""
    data = sets()
    usual = [data[name] for name in data if "2-d" not in name]
    columns = {
        "loop in float64": largest(loop, [*data.values()]),
        "pytorch-metric-learning": largest(by_pml, usual),
        "faiss": largest(by_faiss, usual),
        "scikit-learn": of_labelings(),
    }
    print("| score | " + " | ".join(columns) + " |\n|---|" + "---|" * len(columns))
    names = dict.fromkeys(name for column in columns.values() for name in column)
    for name in names:
        cells = [f"{column[name]:.1e}" if name in column else "" for column in columns.values()]
        print(f"| {name} | " + " | ".join(cells) + " |")
    name = "2,000 random directions in 2-d"
    x, labels = data[name]
    peers = {"nofuss": measured, "loop": loop, "faiss": by_faiss, "pytorch-metric-learning": by_pml}
    found = [f"{peer} {score(x, labels)['Recall@1']:.4f}" for peer, score in peers.items()]
    print(f"\nRecall@1 of {name}: {', '.join(found)}")
    print(f"sets: {'; '.join(data)}")
    of_kmeans()


if __name__ == "__main__":
    main()
