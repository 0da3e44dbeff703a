"""The k nearest rows, exactly, and the vicinity of a query: its nearest items and their cosines.

Exact neighbours: a matrix product in blocks, then double precision for a few tiles. The product is
reduced at once to the best similarity in each tile of rows. The k nearest rows lie in the tiles
whose best comes within rounding of the k-th best tile's, so only the distances to their rows are
computed again, in double precision. Equal distances are ordered by row, whatever the blocks.

Re-ranking (rerank.py) needs nothing but the vicinity. Its cost therefore does not grow with the
index, an item that is added needs no update of others, and every index that returns its nearest
will do.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nofuss.evaluate.findings import Neighbours

TILE = 64
"""Rows that share one maximum: the more, the fewer maxima, but the more rows in double."""
_TILED = 2**20  # entries of one block of the product: stays in the cache until it is reduced
_MAXIMA = 2**24  # entries of the table of maxima
_QUERIES = 1024

SIZE = 200
"""Items of a vicinity; a larger one ranks better and costs its square."""
_GATHERED = 2**22  # numbers of the vectors, or of the cosines, that a block of queries gathers
_PRODUCT = 2**24  # entries of a block of the product with all items


@torch.no_grad()
def nearest(queries: Tensor, vectors: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return distances |q − x| and rows, both (Q, k), nearest first, ties by row.

    Queries and vectors are unit, float32.
    """
    k = min(k, len(vectors))
    distances = np.empty((len(queries), k), dtype=np.float32)
    rows = np.empty((len(queries), k), dtype=np.int64)
    tiles = -(-len(vectors) // TILE)
    step = max(1, min(_QUERIES, _MAXIMA // max(1, tiles)))
    # Each of two similarities may be off by D/2 roundings, so D together.
    rounding = vectors.shape[1] * torch.finfo(torch.float32).eps
    for start in range(0, len(queries) if k else 0, step):
        q = queries[start : start + step]
        best = _best_of_tiles(q, vectors, tiles)  # (B, tiles)
        # The k best tiles hold k rows at least this similar; a tile whose best is lower by more
        # than the rounding has none of the k nearest.
        bar = best.topk(min(k, tiles), dim=1).values[:, -1:] - rounding
        near = (best >= bar).numpy()
        for i in range(len(q)):
            chosen = np.flatnonzero(near[i])
            d, r = _nearest_in(chosen, q[i].numpy(), vectors.numpy(), k, rounding)
            distances[start + i], rows[start + i] = d, r
    return torch.from_numpy(distances), torch.from_numpy(rows)


def _best_of_tiles(q: Tensor, vectors: Tensor, tiles: int) -> Tensor:
    """Return the largest q·x of each tile, (B, tiles)."""
    best = q.new_empty(len(q), tiles)
    width = max(1024, _TILED // len(q)) // TILE * TILE
    product = q.new_empty(len(q) * min(width, len(vectors)))
    for start in range(0, len(vectors), width):
        block = vectors[start : start + width]
        s = product[: len(q) * len(block)].view(len(q), len(block))
        torch.mm(q, block.T, out=s)
        first, whole = start // TILE, len(block) // TILE
        if whole:
            tiled = s[:, : whole * TILE].view(len(q), whole, TILE)
            best[:, first : first + whole] = tiled.amax(2)
        if whole * TILE < len(block):  # only the last block ends within a tile
            best[:, -1] = s[:, whole * TILE :].amax(1)
    return best


def _nearest_in(
    tiles: NDArray[np.int64],
    q: NDArray[np.float32],
    vectors: NDArray[np.float32],
    k: int,
    rounding: float,
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Return distances and rows of the k nearest in some tiles, in double precision, (k,) each.

    In numpy: torch would wake its threads for each of these small steps, for every query.
    """
    squared, rows = np.empty(0), np.empty(0, dtype=np.int64)
    # Mostly a few tiles, but all of them where all vectors coincide: so in parts, to bound memory.
    for start in range(0, len(tiles), 256):
        part = tiles[start : start + 256]
        new = (part[:, None] * TILE + np.arange(TILE)).reshape(-1)
        new = new[new < len(vectors)]
        together = part[-1] - part[0] + 1 == len(part)  # then nothing need be copied
        x = vectors[new[0] : new[-1] + 1] if together else vectors[new]
        if len(new) > 2 * k:  # once more by the product, now of single rows
            s = x @ q
            bar = np.partition(s, len(s) - k)[len(s) - k] - rounding
            x, new = x[s >= bar], new[s >= bar]
        # Differences, not 2 − 2 q·x: that would lose the digits in which near neighbours differ.
        difference = x.astype(np.float64) - q
        squared = np.concatenate([squared, np.einsum("nd,nd->n", difference, difference)])
        rows = np.concatenate([rows, new])
        order = squared.argsort(kind="stable")[:k]  # rows ascend, so that stable means ties by row
        squared, rows = squared[order], rows[order]
    return np.sqrt(squared), rows


def neighbours(
    vectors: NDArray[np.float32], *, k: int = 10, queries: int = 5000, seed: int = 0
) -> Neighbours:
    """Find the k nearest neighbours of all items, or of `queries` random ones if there are more."""
    count = len(vectors)
    k = min(k, count - 1)
    chosen = np.sort(np.random.default_rng(seed).permutation(count)[:queries]).astype(np.int64)
    x = torch.from_numpy(np.ascontiguousarray(vectors))
    distances, rows = (found.numpy() for found in nearest(x[chosen], x, k + 1))
    is_itself = rows == chosen[:, None]
    is_itself[~is_itself.any(1), -1] = True  # copies of it, all as close, fill the list
    shape = len(chosen), max(k, 0)
    return Neighbours(chosen, rows[~is_itself].reshape(shape), distances[~is_itself].reshape(shape))


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
