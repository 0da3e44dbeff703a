"""Search for the 10 nearest of one query, and of many, compared with faiss and a matrix product.

The limit is the matrix product with all vectors, without any selection from it.
"""

import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.timing import Growth, Row, extra_mb, interleaved, optional
from nofuss import Index
from nofuss.geometry import normalize

DIM, K = 64, 10
BUDGET = 0.050
"""Seconds that the slowest of twenty single searches over 100,000 vectors may take."""


def rows(*, quick: bool) -> Iterator[Row]:
    """Measure one query and 256, over 100,000 and a million vectors."""
    for n in (100_000,) if quick else (100_000, 1_000_000):
        vectors = _vectors(n)
        index = Index.build(vectors, names=[str(i) for i in range(n)])
        yield _percentile(index, searches=200)
        for count in (1, 256):
            yield from _compare(index, _vectors(count, seed=1), repeats=21 if count == 1 else 3)


def growth(*, quick: bool) -> Iterator[Growth]:
    """Measure one search against the number of vectors."""
    sizes = (10_000, 100_000) if quick else (10_000, 100_000, 1_000_000)
    seconds: dict[str, list[float]] = {}
    for n in sizes:
        index = Index.build(_vectors(n), names=[str(i) for i in range(n)])
        for row in _compare(index, _vectors(1, seed=1), repeats=11):
            seconds.setdefault(row.method, []).append(row.seconds)
    lines = {name: tuple(values) for name, values in seconds.items() if len(values) == len(sizes)}
    yield Growth("search", f"One search, k {K}, D {DIM}", "vectors", sizes, lines)


def _compare(index: Index, queries: Tensor, *, repeats: int) -> Iterator[Row]:
    q, x = normalize(queries), index.vectors
    product = torch.empty(min(len(q), 32), len(x))

    def bare() -> None:
        for some in torch.split(q, len(product)):
            torch.mm(some, x.T, out=product[: len(some)])

    works: dict[str, Callable[[], Any]] = {
        "limit: bare product": bare,
        "nofuss, exact": lambda: index.search(q, K),
    }
    faiss = optional("faiss")
    if faiss is not None:
        flat = faiss.IndexFlatIP(DIM)
        flat.add(x.numpy())
        works["faiss, exact (flat)"] = lambda: flat.search(q.numpy(), K)
    seconds = interleaved(works, repeats=repeats)
    notes = _notes(works, q, x)
    case = f"{len(q):,} of {len(x):,} vectors, D {DIM}, k {K}"
    for method, work in works.items():
        yield Row(
            "search",
            case,
            method,
            seconds[method],
            seconds["limit: bare product"],
            extra_mb(work),
            notes.get(method, ""),
            bar=2.0 if method == "nofuss, exact" else math.nan,
        )


def _rows(found: Any) -> Any:
    """Return rows (Q, k), of our hits or of faiss's answer."""
    if isinstance(found, list):
        return [[int(name) for name in hits.names] for hits in found]
    return found[1]


def _notes(works: dict[str, Callable[[], Any]], q: Tensor, x: Tensor) -> dict[str, str]:
    """Say how many of the true neighbours each method finds."""
    few = q[:32].double()
    true = torch.cdist(few, x.double()).topk(K, largest=False).indices
    notes = {}
    for method, work in works.items():
        if method.startswith("limit"):
            continue
        found = torch.as_tensor(np.asarray(_rows(work())))[: len(few)]
        share = (found[:, :, None] == true[:, None]).any(1).double().mean()
        notes[method] = f"recall {float(share):.3f}"
    return notes


def _percentile(index: Index, *, searches: int) -> Row:
    """Return the 95th percentile of the time of single searches, each with another query."""
    queries = _vectors(searches + 5, seed=2)
    times = []
    for i in range(len(queries)):
        start = time.perf_counter()
        index.search(queries[i : i + 1], K)
        times.append(time.perf_counter() - start)
    p50, p95 = np.percentile(times[5:], [50, 95])
    case = f"one at a time of {len(index):,} vectors, D {DIM}, k {K}"
    note = f"median {1e3 * p50:.1f} ms; the limit is a budget of {1e3 * BUDGET:.0f} ms"
    bar = 1.0 if len(index) <= 100_000 else math.nan
    return Row("search", case, "nofuss, exact: p95", float(p95), BUDGET, note=note, bar=bar)


def _vectors(count: int, *, seed: int = 0) -> Tensor:
    """Return points around a thousand centres, like embeddings of classes."""
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(1000, DIM, generator=torch.Generator().manual_seed(9))
    which = torch.randint(1000, (count,), generator=generator)
    return centres[which] + 0.5 * torch.randn(count, DIM, generator=generator)
