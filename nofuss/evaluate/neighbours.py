"""The k nearest rows, exactly: one blocked matrix product, then double precision for the few.

The product is reduced at once to the best similarity in each tile of rows. The k nearest rows lie
in the tiles whose best comes within rounding of the k-th best tile's, so only those are looked at
again, in double precision. Equal distances are ordered by row, whatever the blocks.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

TILE = 64
"""Rows that share one maximum: few maxima to choose from, few rows to look at again."""
_PRODUCT = 2**20  # entries of one block of the product: stays in the cache until it is reduced
_MAXIMA = 2**24  # entries of the table of maxima
_QUERIES = 1024


@torch.no_grad()
def nearest(queries: Tensor, vectors: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Distances |q − x| and rows, both (Q, k), nearest first, ties by row; all unit, float32."""
    k = min(k, len(vectors))
    found = np.empty((len(queries), k), dtype=np.float32)
    rows = np.empty((len(queries), k), dtype=np.int64)
    tiles = -(-len(vectors) // TILE)
    step = max(1, min(_QUERIES, _MAXIMA // max(1, tiles)))
    rounding = vectors.shape[1] * torch.finfo(torch.float32).eps  # twice a dot product's error
    for start in range(0, len(queries) if k else 0, step):
        q = queries[start : start + step]
        best = _best_of_tiles(q, vectors, tiles)  # (B, tiles)
        bar = best.topk(min(k, tiles), dim=1).values[:, -1:] - rounding
        near = (best >= bar).numpy()
        for i in range(len(q)):
            chosen = np.flatnonzero(near[i])
            d, r = _nearest_in(chosen, q[i].numpy(), vectors.numpy(), k)
            found[start + i], rows[start + i] = d, r
    return torch.from_numpy(found), torch.from_numpy(rows)


def _best_of_tiles(q: Tensor, vectors: Tensor, tiles: int) -> Tensor:
    """The largest q·x of each tile, (B, tiles)."""
    best = torch.empty(len(q), tiles)
    width = max(1024, _PRODUCT // len(q)) // TILE * TILE
    product = torch.empty(len(q) * min(width, len(vectors)))
    for start in range(0, len(vectors), width):
        block = vectors[start : start + width]
        s = product[: len(q) * len(block)].view(len(q), len(block))
        torch.mm(q, block.T, out=s)
        first, whole = start // TILE, len(block) // TILE
        if whole:
            tiled = s[:, : whole * TILE].view(len(q), whole, TILE)
            best[:, first : first + whole] = tiled.amax(2)
        if whole * TILE < len(block):
            best[:, -1] = s[:, whole * TILE :].amax(1)
    return best


def _nearest_in(
    tiles: NDArray[np.int64], q: NDArray[np.float32], vectors: NDArray[np.float32], k: int
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """The k nearest rows of some tiles, in double precision, (k,) each.

    In numpy: torch would wake its threads for each of these small steps, for every query.
    """
    found, rows = np.empty(0), np.empty(0, dtype=np.int64)
    # A few tiles; but all of them where everything is one point, so not all at once.
    for start in range(0, len(tiles), 256):
        new = (tiles[start : start + 256, None] * TILE + np.arange(TILE)).reshape(-1)
        new = new[new < len(vectors)]
        apart = vectors[new].astype(np.float64) - q
        found = np.concatenate([found, np.einsum("nd,nd->n", apart, apart)])
        rows = np.concatenate([rows, new])
        order = found.argsort(kind="stable")[:k]  # rows ascend, so that stable means ties by row
        found, rows = found[order], rows[order]
    return np.sqrt(found), rows
