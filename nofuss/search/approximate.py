"""The approximate index of faiss: vectors listed under the nearest of many centroids (IVF-Flat).

A query searches the lists of the nearest centroids only. What it finds is ranked by exact
distances, so a neighbour may be missing but never in the wrong place.
"""

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nofuss.errors import RunError, UsageError

PROBED = 0.1
"""Share of the lists that a query searches: recall against exact search is then near one."""


class Approximate:
    """A faiss index over unit vectors whose ids are their rows."""

    def __init__(self, index: Any) -> None:
        self._index = index

    @classmethod
    def build(cls, vectors: Tensor) -> "Approximate":
        """Choose centroids by k-means and add every vector to the list of its nearest."""
        faiss, (n, dim) = faiss_module(), vectors.shape
        metric = faiss.METRIC_INNER_PRODUCT
        index = faiss.IndexIVFFlat(faiss.IndexFlatIP(dim), dim, _lists(n), metric)
        if n:
            index.train(vectors.numpy())
            index.add(vectors.numpy())
        return cls(index)

    def outgrown(self, count: int) -> bool:
        """Return whether `count` vectors need new centroids: there are none yet, or far too few."""
        return not self._index.is_trained or _lists(count) > 3 * self._index.nlist

    def add(self, vectors: Tensor) -> None:
        """Add vectors to the lists of the present centroids."""
        self._index.add(vectors.numpy())

    def refill(self, vectors: Tensor) -> None:
        """Replace all vectors, because rows have moved; centroids stay."""
        self._index.reset()
        self._index.add(vectors.numpy())

    def search(
        self, queries: Tensor, vectors: Tensor, k: int, *, among: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return distances and rows (Q, k), nearest first, ties by row; inf and −1 fill up.

        `among` are the only rows that may be found.
        """
        faiss, lists = faiss_module(), self._index.nlist
        share = 1.0 if among is None else max(1, len(among)) / len(vectors)
        # The fewer items may be found, the fewer each list holds, and the more are searched.
        options = {"nprobe": min(lists, max(8, round(PROBED * lists / share)))}
        if among is not None:
            bits = torch.zeros(len(vectors), dtype=torch.bool).index_fill_(0, among, True)
            packed = np.packbits(bits.numpy(), bitorder="little")
            options["sel"] = faiss.IDSelectorBitmap(packed)
        params = faiss.SearchParametersIVF(**options)
        rows = self._nearest(queries, min(2 * k, len(vectors)), params).sort(dim=1).values
        x = vectors[rows.clamp_min(0)].double()  # (Q, 2k, D)
        distances = (x - queries[:, None].double()).square().sum(2).sqrt()
        distances[rows < 0] = torch.inf
        # Rows are ascending and the sort is stable, so that ties are ordered by row.
        order = distances.argsort(dim=1, stable=True)[:, :k]
        return distances.gather(1, order).float(), rows.gather(1, order)

    def _nearest(self, queries: Tensor, k: int, params: Any) -> Tensor:
        """Return rows (Q, k) as faiss orders them, −1 for none.

        The function of C++ is called, because `faiss.contrib.torch_utils`, which
        pytorch-metric-learning imports, replaces `search` by one that takes no parameters.
        """
        pointer = faiss_module().swig_ptr
        x = np.ascontiguousarray(queries.numpy(), dtype=np.float32)
        inner = np.empty((len(x), k), dtype=np.float32)
        rows = np.empty((len(x), k), dtype=np.int64)
        self._index.search_c(len(x), pointer(x), k, pointer(inner), pointer(rows), params)
        return torch.from_numpy(rows)

    def to_bytes(self) -> Tensor:
        """Return lists and centroids as faiss serializes them, (n,) uint8."""
        return torch.from_numpy(faiss_module().serialize_index(self._index))

    @classmethod
    def from_bytes(cls, content: Tensor, vectors: Tensor, where: object) -> "Approximate":
        """Restore what `to_bytes` gave for these vectors; only for content from a trusted source.

        faiss is C++ that reads sizes from the content and does not check them.
        """
        try:
            index = faiss_module().deserialize_index(content.numpy().copy())
            if (index.ntotal, index.d) != tuple(vectors.shape) or index.nlist < 1:
                raise ValueError(f"{index.ntotal} of {index.d} dimensions, not {vectors.shape}")
        except (RuntimeError, AttributeError, TypeError, ValueError, AssertionError) as error:
            reason = " ".join(str(error).split())
            raise RunError(
                f"the index in {where} is damaged (faiss: {reason}); delete the folder and make it "
                "again: nofuss index RUN DIR"
            ) from None
        return cls(index)


def faiss_module() -> Any:
    """Import faiss, or raise an error with the command that installs it."""
    try:
        import faiss
    except ImportError:
        raise UsageError(
            "an approximate index needs faiss: pip install 'nofuss[faiss]'; or use kind=\"exact\""
        ) from None
    return faiss


def _lists(count: int) -> int:
    """Return how many lists to make; with fewer than 39 vectors a list, centroids are poor."""
    return max(1, min(4 * math.isqrt(count), count // 39))
