"""How long scoring will take: it compares all pairs of items, so a user should know beforehand.

The time grows with the square of the number of items. It is estimated from one small matrix product
on this machine, in multiples of the products that the scores need at least (LOG.md has them).
"""

import time
from collections.abc import Sequence

import torch

RETRIEVAL = 3.2
"""Recall@K, MAP@R and R-precision, in products of all items with all items."""
CLUSTERING = 25.0
"""K-means for NMI and AMI, in products of all items with all centroids."""
RERANKED = 8.0
"""Re-ranking, in products of all items with all items: it sorts what others only count."""
RERANKED_ITEM = 1.5e-3
"""Seconds of a re-ranked query beside that."""
FEW = 20_000
"""Items below which nothing takes long, so that nothing is measured."""


def scoring_seconds(
    sizes: Sequence[tuple[int, int]], dim: int, *, columns: int = 1, reranked: bool = False
) -> float:
    """Return about how many seconds `evaluate` takes on sets of (items, classes), together.

    columns: embeddings that are scored on each set. reranked: whether one is re-ranked too.
    """
    if sum(items for items, _ in sizes) < FEW:
        return 0.0
    pairs = sum(float(items) ** 2 for items, _ in sizes)
    centroids = sum(float(items) * classes for items, classes in sizes)
    products = columns * (RETRIEVAL * pairs + CLUSTERING * centroids)
    seconds = 0.0
    if reranked:
        products += RERANKED * pairs
        seconds = RERANKED_ITEM * sum(items for items, _ in sizes)
    return seconds + products * seconds_of_pair(dim)


def seconds_of_pair(dim: int, *, side: int = 512) -> float:
    """Return the seconds that a product of all pairs takes for one pair, if nothing else runs.

    In CPU time of one thread: a product that other programs interrupt would seem slow.
    """
    x, out = torch.ones(side, dim), torch.empty(side, side)
    threads, times = torch.get_num_threads(), list[float]()
    torch.set_num_threads(1)
    try:
        for _ in range(8):
            began = time.thread_time()
            torch.mm(x, x.T, out=out)
            times.append(time.thread_time() - began)
    finally:
        torch.set_num_threads(threads)
    return min(times) / side**2 / threads
