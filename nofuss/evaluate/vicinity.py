"""The vicinity of a query: its nearest items, how near they are to it and to each other.

Re-ranking (reranking.py) and the question whether anything like the query is there at all
(strangers.py) need nothing else. Their cost therefore does not grow with the index, an item that
is added needs no update of others, and every index that returns its nearest will do.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

SIZE = 200
"""Items of a vicinity; a larger one ranks better and costs its square."""
_GATHERED = 2**22  # numbers of the vectors, or of the cosines, that a block of queries gathers
_PRODUCT = 2**24  # entries of a block of the product with all items
_ALL_COSINES = 2**26  # entries of the product of all items that is kept, 256 MB


@dataclass(frozen=True)
class Vicinity:
    """The M nearest items of Q queries, nearest first; −1 and zeros where there are fewer."""

    rows: Tensor  # (Q, M)
    near: Tensor  # (Q, M) cosine to the query
    gram: Tensor  # (Q, M, M) cosines to each other

    @property
    def exists(self) -> Tensor:
        """(Q, M): which places hold an item."""
        return self.rows >= 0


class Gallery:
    """Unit vectors (N, D) of which the vicinities of some number of queries are asked.

    Where vicinities overlap so much that all cosines between items take less work than those of
    each vicinity, they are computed once and picked from.
    """

    def __init__(self, vectors: Tensor, queries: int) -> None:
        self.vectors = vectors
        entries = len(vectors) ** 2
        pays = entries <= min(_ALL_COSINES, queries * SIZE**2)
        self._cosines = vectors @ vectors.T if pays else None

    def vicinity(self, near: Tensor, rows: Tensor) -> Vicinity:
        """Return vicinities, given the nearest rows (Q, M) and their cosines to the query."""
        exists, rows_or_0 = rows >= 0, rows.clamp_min(0)
        if self._cosines is None:
            x = self.vectors[rows_or_0] * exists[..., None]
            gram = x @ x.transpose(1, 2)
        else:
            pairs = rows_or_0[:, :, None] * len(self.vectors) + rows_or_0[:, None]
            gram = self._cosines.view(-1).index_select(0, pairs.reshape(-1)).view(pairs.shape)
            if not exists.all():
                gram *= exists[:, :, None] & exists[:, None]
        return Vicinity(rows, near.masked_fill(~exists, 0), gram)


@torch.no_grad()
def vicinity_of(queries: Tensor, nearest: Tensor, rows: Tensor) -> Vicinity:
    """Return the vicinity of queries (Q, D), given their nearest (Q, M, D) and their rows."""
    x = nearest * (rows >= 0)[..., None]
    near = torch.einsum("qd,qmd->qm", queries, x)
    return Vicinity(rows, near, x @ x.transpose(1, 2))


def query_blocks(queries: int, items: int, dim: int, size: int = SIZE) -> Iterator[slice]:
    """Return slices of queries whose products and vicinities fit in 64 MB each."""
    step = max(1, min(_GATHERED // max(1, size * max(size, dim)), _PRODUCT // max(1, items)))
    return (slice(i, min(i + step, queries)) for i in range(0, queries, step))


@torch.no_grad()
def leave_one_out(
    vectors: Tensor,
    rows: Tensor,
    labels: Tensor | None = None,
    left_out: Tensor | None = None,
    *,
    size: int = SIZE,
) -> Iterator[Vicinity]:
    """Return the vicinities of some rows of unit vectors (N, D) among all others, in blocks.

    With labels (N,), the items of one class are left out for each row, that of `left_out` (Q,).
    """
    gallery = Gallery(vectors, len(rows) if size > 1 else 0)
    for block in query_blocks(len(rows), len(vectors), vectors.shape[1], size):
        own = rows[block]
        s = vectors[own] @ vectors.T
        if labels is not None and left_out is not None:
            s.masked_fill_(left_out[block, None] == labels, -torch.inf)
        s[torch.arange(len(own)), own] = -torch.inf
        best, nearest = s.topk(min(size, len(vectors)))
        nearest.masked_fill_(best.isinf(), -1)
        yield gallery.vicinity(best, nearest)
