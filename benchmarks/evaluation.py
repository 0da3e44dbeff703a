"""Recall@K, MAP@R, k-means and NMI at the size of Stanford Online Products, compared with peers.

The data are synthetic: as many classes and items as the Products test set, class sizes from 2 up,
as difficult as trained embeddings (Recall@1 about 0.7). Wider embeddings are the same points
rotated into more dimensions with a little noise, so that every width is equally hard.

Limits: for retrieval one matrix product of all pairs, in blocks, into one buffer; for k-means
twenty products of all vectors with all centroids, which twenty iterations of Lloyd need at least.
"""

from collections.abc import Callable, Iterator
from functools import partial
from math import inf, nan
from typing import Any

import torch
from torch import Tensor

from benchmarks.timing import PATIENCE, Growth, Row, extra_mb, interleaved, optional
from nofuss.distributed.threads import blocks, in_threads
from nofuss.evaluate import kmeans, map_at_r, normalized_mutual_information, recall_at_k
from nofuss.geometry import normalize

PRODUCTS = (60_502, 11_316)
QUICK = (12_000, 2_244)
KS = (1, 2, 4, 8, 10, 100, 1000)
LIMIT_BLOCK = 1024


def products_like(items: int, classes: int, dim: int, *, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return unit vectors (items, dim) around class centers, and their labels."""
    generator = torch.Generator().manual_seed(seed)
    rest = torch.randint(classes, (items - 2 * classes,), generator=generator)
    labels = torch.cat([torch.arange(classes).repeat(2), rest])
    x = torch.randn(classes, 64, generator=generator)[labels]
    x += 1.1 * torch.randn(items, 64, generator=generator)
    if dim != 64:
        x = x @ torch.randn(64, dim, generator=generator) / 8
        x += 0.05 * torch.randn(items, dim, generator=generator)
    return normalize(x), labels


def rows(*, quick: bool) -> Iterator[Row]:
    """Measure retrieval at two widths, then clustering."""
    items, classes = QUICK if quick else PRODUCTS
    for dim in (64, 512):
        yield from _recall_rows(items, classes, dim)
    yield from _map_rows(items, classes)
    yield from _kmeans_rows(items, classes)
    yield from _few_clusters_rows(QUICK[0] if quick else 30_000)


def growth(*, quick: bool) -> Iterator[Growth]:
    """Measure recall against the number of items, k-means against that of clusters."""
    sizes = [2_000, 4_000, 8_000] if quick else [4_000, 8_000, 16_000, 32_000, 60_502]
    curves: dict[str, list[float]] = {}
    for items in sizes:
        x, labels = products_like(items, items // 5, 64)
        works: dict[str, Callable[[], object]] = {
            "bare sgemm": partial(_bare_products, x, x),
            "nofuss": partial(recall_at_k, x, labels, KS),
        }
        if optional("faiss"):
            works["faiss flat, k = 1000"] = partial(_faiss_neighbours, x, 1001)
        for name, seconds in interleaved(works, repeats=3).items():
            curves.setdefault(name, []).append(seconds)
    yield _figure("recall-items", "Recall@1 … @1000, D 64", "items N", sizes, curves)

    items = 8_000 if quick else 30_000
    x, _ = products_like(items, items // 5, 64)
    sizes, curves = [100, 400, 1_600] if quick else [100, 400, 1_600, 5_600], {}
    for k in sizes:
        works = {
            "nofuss": partial(kmeans, x, k, seed=0),
        }
        if optional("faiss"):
            works["faiss, 20 iterations"] = partial(_faiss_kmeans, x, k)
        for name, seconds in interleaved(works, repeats=1, warmups=0).items():
            curves.setdefault(name, []).append(seconds)
    yield _figure("kmeans-clusters", f"K-means of {items:,} × 64", "clusters k", sizes, curves)


def _recall_rows(items: int, classes: int, dim: int) -> Iterator[Row]:
    x, labels = products_like(items, classes, dim)
    limit, ours, faiss_flat = "limit: bare sgemm of all pairs", "nofuss", "faiss flat, k = 1000"
    works: dict[str, Callable[[], Any]] = {
        limit: partial(_bare_products, x, x),
        ours: partial(recall_at_k, x, labels, KS),
        "floor: half of the products, their maxima": partial(_half_with_maxima, x),
    }
    if optional("faiss"):
        works[faiss_flat] = partial(_faiss_neighbours, x, 1001)
    if optional("pytorch_metric_learning"):
        works["PML AccuracyCalculator, k = 1000"] = partial(_pml, x, labels, 1000)
    seconds, results = _timed(works, repeats=3)
    shares = results[ours]
    notes = {ours: f"R@1 {shares[1]:.4f}, R@1000 {shares[1000]:.4f}"}
    if faiss_flat in works:
        peer = _recall_of_neighbours(results[faiss_flat], labels)
        apart = max(abs(shares[k] - peer[k]) for k in KS)
        notes[faiss_flat] = f"values differ by at most {apart:.1e}"
    results.clear()
    fifth = min(seconds[name] for name in [*works][3:]) / 5 if len(works) > 3 else inf
    case = f"Recall@{{{','.join(map(str, KS))}}}, {items:,} × {dim}"
    yield from _rows(case, works, seconds, notes, allowed=min(0.6 * seconds[limit], fifth))


def _map_rows(items: int, classes: int) -> Iterator[Row]:
    x, labels = products_like(items, classes, 64)
    works: dict[str, Callable[[], Any]] = {
        "limit: bare sgemm of all pairs": partial(_bare_products, x, x),
        "nofuss": partial(map_at_r, x, labels),
    }
    if optional("pytorch_metric_learning"):
        works["PML AccuracyCalculator"] = partial(_pml, x, labels, "max_bin_count")
    seconds, results = _timed(works, repeats=3)
    notes = {"nofuss": f"MAP@R {results['nofuss']:.6f}"}
    if len(works) > 2:
        peer = results["PML AccuracyCalculator"]["mean_average_precision_at_r"]
        notes["PML AccuracyCalculator"] = f"MAP@R {peer:.6f}"
    allowed = 2 * next(iter(seconds.values()))
    yield from _rows(f"MAP@R, {items:,} × 64", works, seconds, notes, allowed=allowed)


def _kmeans_rows(items: int, k: int) -> Iterator[Row]:
    x, labels = products_like(items, k, 64)
    methods: dict[str, Callable[[], tuple[Tensor, Tensor]]] = {
        "nofuss": partial(kmeans, x, k, seed=0),
        "scikit-learn, random seeds": partial(_sklearn_kmeans, x, k, "random"),
        "scikit-learn, k-means++": partial(_sklearn_kmeans, x, k, "k-means++"),
    }
    if optional("faiss"):
        methods["faiss, 20 iterations"] = partial(_faiss_kmeans, x, k)

    def scored(cluster: Callable[[], tuple[Tensor, Tensor]]) -> tuple[float, float]:
        centroids, assignment = cluster()
        information = normalized_mutual_information(assignment, labels)
        return information, _inertia(x, centroids, assignment)

    works: dict[str, Callable[[], Any]] = {
        "limit: 20 bare assignments": partial(_bare_products, x.repeat(20, 1), x[:k])
    }
    works |= {name: partial(scored, cluster) for name, cluster in methods.items()}
    seconds, results = _timed(works, repeats=1)
    notes = {name: "NMI {:.4f}, inertia {:.0f}".format(*results[name]) for name in methods}
    allowed = seconds["scikit-learn, k-means++"] / 4
    case = f"K-means, k {k:,}, {items:,} × 64, and NMI"
    yield from _rows(case, works, seconds, notes, allowed=allowed)


def _inertia(x: Tensor, centroids: Tensor, assignment: Tensor) -> float:
    """Return the sum of squared distances of the vectors to the centroids of their clusters."""
    return float((x - centroids[assignment]).double().square().sum())


def _few_clusters_rows(items: int, k: int = 100) -> Iterator[Row]:
    """Measure k-means with few clusters against faiss, at the inertia that faiss reaches."""
    if not optional("faiss"):
        return
    x, _ = products_like(items, items // 5, 64)
    wanted = _inertia(x, *_faiss_kmeans(x, k))
    ours = partial(kmeans, x, k, seed=0)
    rounds = next(n for n in range(1, 101) if _inertia(x, *ours(iterations=n)) <= wanted)
    methods: dict[str, Callable[[], tuple[Tensor, Tensor]]] = {
        "faiss, 20 iterations": partial(_faiss_kmeans, x, k),
        "nofuss, to that inertia": partial(ours, iterations=rounds),
        "nofuss, to the end": ours,
    }
    seconds, results = _timed(dict(methods), repeats=9)
    notes = {name: f"inertia {_inertia(x, *found):,.0f}" for name, found in results.items()}
    notes["nofuss, to that inertia"] += f" after {rounds} iterations on all vectors"
    case = f"K-means, k {k}, {items:,} × 64"
    allowed = seconds["faiss, 20 iterations"]
    yield from _rows(case, dict(methods), seconds, notes, allowed=allowed)


def _timed(
    works: dict[str, Callable[[], Any]], *, repeats: int
) -> tuple[dict[str, float], dict[str, Any]]:
    """Return median seconds of each, and the last value each returned."""
    results: dict[str, Any] = {}

    def kept(name: str) -> None:
        results[name] = works[name]()

    return interleaved({n: partial(kept, n) for n in works}, repeats=repeats, warmups=0), results


def _rows(
    case: str,
    works: dict[str, Callable[[], Any]],
    seconds: dict[str, float],
    notes: dict[str, str],
    *,
    allowed: float = nan,
) -> Iterator[Row]:
    """Return the rows of one case: the limit, then ours, which may take `allowed` seconds."""
    limit, ours, *_ = works
    for name, work in works.items():
        memory = extra_mb(work) if seconds[name] < PATIENCE else nan
        bar = allowed / seconds[limit] if name == ours else nan
        note = notes.get(name, "")
        yield Row("evaluation", case, name, seconds[name], seconds[limit], memory, note, bar)


def _bare_products(x: Tensor, y: Tensor) -> None:
    """Compute all products of rows of x and y in blocks, each overwriting the last."""
    buffer = torch.empty(LIMIT_BLOCK * LIMIT_BLOCK)
    for a in torch.split(x, LIMIT_BLOCK):
        for b in torch.split(y, LIMIT_BLOCK):
            torch.mm(a, b.T, out=buffer[: len(a) * len(b)].view(len(a), len(b)))


def _half_with_maxima(x: Tensor) -> None:
    """Compute each pair once, and the maximum of each row and column of a block.

    What is counted exactly in torch takes at least this: no comparison of a block is cheaper.
    """

    def walk(strips: Iterator[slice]) -> None:
        buffer = torch.empty(4 * 512 * 512)
        for rows in strips:
            for cols in blocks(rows.start, len(x), 4 * 512):
                a, b = x[rows], x[cols]
                s = torch.mm(a, b.T, out=buffer[: len(a) * len(b)].view(len(a), len(b)))
                s.amax(1)
                s.amax(0)

    in_threads(walk, blocks(0, len(x), 512))


def _faiss_neighbours(x: Tensor, k: int) -> Tensor:
    import faiss

    index = faiss.IndexFlatL2(x.shape[1])
    index.add(x.numpy())
    return torch.from_numpy(index.search(x.numpy(), k)[1])


def _recall_of_neighbours(neighbours: Tensor, labels: Tensor) -> dict[int, float]:
    """Return Recall@K of lists of neighbours that may hold the query itself."""
    hit = (labels[neighbours] == labels[:, None]) & (
        neighbours != torch.arange(len(labels))[:, None]
    )
    itself = (neighbours == torch.arange(len(labels))[:, None]).cumsum(1)
    place = torch.arange(neighbours.shape[1]) + 1 - itself
    first = torch.where(hit, place, neighbours.shape[1] + 1).amin(1)
    return {k: (first <= k).double().mean().item() for k in KS}


def _pml(x: Tensor, labels: Tensor, k: int | str) -> dict[str, float]:
    from pytorch_metric_learning.utils.accuracy_calculator import AccuracyCalculator

    include = ("precision_at_1", "mean_average_precision_at_r")
    calculator = AccuracyCalculator(include=include, k=k, device=torch.device("cpu"))
    scores: dict[str, float] = calculator.get_accuracy(x, labels)
    return scores


def _faiss_kmeans(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    import faiss

    clustering = faiss.Kmeans(x.shape[1], k, niter=20, seed=0, min_points_per_centroid=1)
    clustering.train(x.numpy())
    nearest = clustering.index.search(x.numpy(), 1)[1][:, 0]
    return torch.from_numpy(clustering.centroids), torch.from_numpy(nearest)


def _sklearn_kmeans(x: Tensor, k: int, init: str) -> tuple[Tensor, Tensor]:
    from sklearn.cluster import KMeans

    clustering = KMeans(k, init=init, n_init=1, random_state=0).fit(x.numpy())
    labels = torch.from_numpy(clustering.labels_).long()
    return torch.from_numpy(clustering.cluster_centers_), labels


def _figure(
    name: str, title: str, axis: str, sizes: list[int], curves: dict[str, list[float]]
) -> Growth:
    seconds = {method: tuple(values) for method, values in curves.items()}
    return Growth(name, title, axis, tuple(sizes), seconds)
