"""The largest entry of each row of left @ right.T and its column, without holding the product.

K-means scores vectors against centroids in this way. Products are computed in blocks that stay in
a core's cache; after some columns have changed, only what may have changed with them is computed.
"""

from itertools import pairwise

import torch
from torch import Tensor

from nofuss.evaluate.task import blocks

BLOCK = 384  # rows and columns of one product, which then stays in a core's cache
FEW = BLOCK  # columns up to which all of them are in one product


def row_maxima(
    left: Tensor, right: Tensor, *, exclude: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the maximum of each row of left @ right.T and its column, never its `exclude`."""
    score = left.new_full((len(left),), -torch.inf)
    index = torch.zeros(len(left), dtype=torch.int64, device=left.device)
    _improve(left, right, torch.arange(len(right), device=left.device), score, index, exclude)
    return score, index


def best_columns(left: Tensor, right: Tensor, before: Tensor | None = None) -> Tensor:
    """Return the column of the maximum of each row of left @ right.T, of FEW columns at most.

    before: the columns of another time; one that has the maximum again is kept, and of the rows
    that keep theirs none is searched.
    """
    n, k = len(left), len(right)
    size = max(BLOCK, BLOCK * BLOCK // k)
    found = torch.empty(n, dtype=torch.int64, device=left.device) if before is None else before
    found, buffer = found.clone(), left.new_empty(size * k)
    for rows in blocks(0, n, size):
        x, at = left[rows], found[rows]
        s = torch.mm(x, right.T, out=buffer[: len(x) * k].view(len(x), k))
        if before is None:
            at.copy_(s.max(1).indices)
            continue
        # The index costs more than the maximum: look for it only where it changes.
        lower = (s.gather(1, at[:, None])[:, 0] < s.amax(1)).nonzero()[:, 0]
        at[lower] = s[lower].argmax(1)
    return found


def update_maxima(
    left: Tensor,
    right: Tensor,
    changed: Tensor,
    stale: Tensor,
    score: Tensor,
    index: Tensor,
    exclude: Tensor | None = None,
) -> None:
    """Update score and index in place after the columns `changed` have changed.

    All rows are compared with these columns; only the rows `stale`, whose score had to be lowered,
    are compared with the other columns too.
    """
    _improve(left, right, changed.nonzero()[:, 0], score, index, exclude)
    rows, same = stale.nonzero()[:, 0], (~changed).nonzero()[:, 0]
    best, at = score[rows], index[rows]
    _improve(left[rows], right, same, best, at, None if exclude is None else exclude[rows])
    score[rows], index[rows] = best, at


def _improve(
    left: Tensor,
    right: Tensor,
    columns: Tensor,
    score: Tensor,
    index: Tensor,
    exclude: Tensor | None,
) -> None:
    """Replace score and index, in place, where left @ right[columns].T is higher."""
    if exclude is not None:  # from columns of `right` to places among `columns`, −1 if not there
        place = torch.full((len(right),), -1, device=columns.device)
        place[columns] = torch.arange(len(columns), device=columns.device)
        exclude = place[exclude]
    right = right[columns]
    buffer = left.new_empty(BLOCK * BLOCK)
    parts = [right[j].T for j in blocks(0, len(right), BLOCK)]
    for rows in blocks(0, len(left), BLOCK):
        x, top, at = left[rows], score[rows], index[rows]
        hidden = None if exclude is None else _cells(exclude[rows], len(right))
        for j, y in enumerate(parts):
            product = buffer[: len(x) * y.shape[1]]
            s = torch.mm(x, y, out=product.view(len(x), -1))
            if hidden is not None:
                product.index_fill_(0, hidden[j], -torch.inf)
            # The index costs more than the maximum: look for it only where it changes.
            highest = s.amax(1)
            better = (highest > top).nonzero()[:, 0]
            top[better] = highest[better]
            at[better] = columns[s[better].argmax(1) + j * BLOCK]


def _cells(column: Tensor, width: int) -> list[Tensor]:
    """Return, for each block of a strip, the flat positions of the rows' given columns.

    One position a row is filled, without a mask over the whole block.
    """
    order = column.argsort()
    column = column[order]
    start = column // BLOCK * BLOCK
    cell = order * (width - start).clamp_max(BLOCK) + column - start  # the last block is narrower
    ends = torch.arange(0, width + BLOCK, BLOCK, device=column.device)
    bounds = torch.searchsorted(column, ends).tolist()  # −1, no column, lies before the first
    return [cell[i:j] for i, j in pairwise(bounds)]
