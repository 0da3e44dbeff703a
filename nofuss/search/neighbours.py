"""The k nearest rows, exactly: one blocked matrix product, then double precision for the few.

The product is reduced at once to the best similarity in each tile of rows. The k nearest rows lie
in the tiles whose best comes within rounding of the k-th best tile's, so only those are looked at
again, in double precision. Equal distances are ordered by row, whatever the blocks.
"""

import torch
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
    found = torch.empty(len(queries), k)
    rows = torch.empty(len(queries), k, dtype=torch.int64)
    if not k:
        return found, rows
    tiles = -(-len(vectors) // TILE)
    step = max(1, min(_QUERIES, _MAXIMA // tiles))
    rounding = vectors.shape[1] * torch.finfo(torch.float32).eps  # twice a dot product's error
    for start in range(0, len(queries), step):
        q = queries[start : start + step]
        best = _best_of_tiles(q, vectors, tiles)  # (B, tiles)
        bar = best.topk(min(k, tiles), dim=1).values[:, -1:] - rounding
        for i in range(len(q)):
            near = (best[i] >= bar[i]).nonzero().squeeze(1)
            found[start + i], rows[start + i] = _nearest_in(near, q[i], vectors, k)
    return found, rows


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


def _nearest_in(tiles: Tensor, q: Tensor, vectors: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k nearest rows of some tiles, in double precision, (k,) each."""
    found, rows = torch.empty(0, dtype=torch.float64), torch.empty(0, dtype=torch.int64)
    for some in torch.split(
        tiles, max(1, 2**14 // TILE)
    ):  # all tiles, where everything is one point
        new = (some[:, None] * TILE + torch.arange(TILE)).flatten()
        new = new[new < len(vectors)]
        apart = (vectors[new].double() - q.double()).square().sum(1)
        found, rows = torch.cat([found, apart]), torch.cat([rows, new])
        order = found.argsort(stable=True)[:k]  # rows ascend, so that stable means ties by row
        found, rows = found[order], rows[order]
    return found.sqrt().float(), rows
