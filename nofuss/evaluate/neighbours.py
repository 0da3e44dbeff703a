"""The k nearest rows, exactly: a matrix product in blocks, then double precision for a few tiles.

The product is reduced at once to the best similarity in each tile of rows. The k nearest rows lie
in the tiles whose best comes within rounding of the k-th best tile's, so only the distances to
their rows are computed again, in double precision. Equal distances are ordered by row, whatever
the blocks.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

TILE = 64
"""Rows that share one maximum: the more, the fewer maxima, but the more rows in double."""
_PRODUCT = 2**20  # entries of one block of the product: stays in the cache until it is reduced
_MAXIMA = 2**24  # entries of the table of maxima
_QUERIES = 1024


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
    width = max(1024, _PRODUCT // len(q)) // TILE * TILE
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
