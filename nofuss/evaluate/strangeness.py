"""How strange a query is, by its vicinity: the larger, the less its class seems to be there.

The distance to the nearest item alone lets most strangers through. Two things help (Mensink et al.
2013 on class means; local density as in Breunig et al. 2000 and the cohorts of speaker
verification): the nearest *class mean* varies less than the nearest item, and how near an item must
be depends on how crowded the place is.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from nofuss.evaluate.vicinity import Vicinity

CROWD = 10, 50
"""Ranks from and up to which neighbours say how crowded the place is; fewer in a small index."""


@torch.no_grad()
def nearest_class(around: Vicinity, labels: Tensor) -> Tensor:
    """Return the cosine to the nearest class mean within the vicinity, (Q,).

    labels (Q, M): codes of the items, below 0 for items without a class, which stand alone.
    """
    same = (labels[:, :, None] == labels[:, None]) & (labels >= 0)[:, None]
    same |= torch.eye(labels.shape[1], dtype=torch.bool)
    member = (same & around.exists[:, None]).float()  # (Q, M, M): j is of i's class
    to_class = (around.gram * member).sum(2)  # xᵢ·Σx of its class, whose sum is |Σx|²
    sums = member @ torch.stack([around.near, to_class], 2)
    cosine = sums[..., 0] / sums[..., 1].clamp_min(1e-12).sqrt()
    return cosine.masked_fill(~around.exists, -1.0).amax(1)


def background(around: Vicinity) -> Tensor:
    """Return the mean cosine to items that are near but not the nearest, (Q,)."""
    counts = around.exists.sum(1, keepdim=True)
    first, stop = (counts // 10).clamp_max(CROWD[0]), ((counts + 1) // 2).clamp_max(CROWD[1])
    place = torch.arange(around.near.shape[1])
    crowd = (place >= first) & (place < stop) & around.exists
    return (around.near * crowd).sum(1) / crowd.sum(1).clamp_min(1)


def _nearest(around: Vicinity, labels: Tensor) -> Tensor:
    return -around.near.masked_fill(~around.exists, -1.0).amax(1)


RULES: dict[str, Callable[[Vicinity, Tensor], Tensor]] = {
    "nearest item": _nearest,
    "nearest class mean": lambda around, labels: -nearest_class(around, labels),
    "class mean, half density": lambda around, labels: (
        background(around) / 2 - nearest_class(around, labels)
    ),
    "class mean, density": lambda around, labels: (
        background(around) - nearest_class(around, labels)
    ),
}
"""Name → strangeness (Q,) of queries by their vicinity and the labels (Q, M) of its items."""
