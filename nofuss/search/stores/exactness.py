"""How much a database's approximate index finds of what is there, on a sample of its items."""

import torch

from nofuss.ranking.neighbours import nearest
from nofuss.search.stores.store import Store

QUERIES, K = 100, 10
MOST = 2_000_000
"""Most items that are read back for it."""
CHUNK = 50_000


def describe_recall(store: Store) -> str | None:
    """Return a line on recall@10 against all distances; None where there is nothing to compare."""
    count = len(store)
    if count < 2:
        return None
    if count > MOST:
        return f"recall was not checked: {count:,} items are too many to read back"
    share = recall(store)
    note = "" if share >= 0.95 else "; consider the run's own index (without --to), which is exact"
    return (
        f"recall@{K} against exact search: {share:.1%} on {min(QUERIES, count)} of its items{note}"
    )


def recall(store: Store, *, queries: int = QUERIES, k: int = K) -> float:
    """Return the share of the k nearest, by all distances, that the database finds.

    An item that is as near as the k-th counts, too: copies may be found in any order.
    """
    q = store.vectors_of(store.sample(queries, seed=1))
    best = torch.full((len(q), 0), torch.inf)
    for _, vectors in store.chunks(CHUNK):
        best = torch.cat([best, nearest(q, vectors, k)[0]], 1).sort(1).values[:, :k]
    found, _ = store.search(q, best.shape[1])
    # Squared, because rounding is of squares: near 0 it is large in a distance.
    return float((found.square() <= best[:, -1:].square() + 1e-6).double().mean())
