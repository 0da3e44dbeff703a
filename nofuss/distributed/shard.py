"""Proxies dealt out over processes: each holds neighbouring rows, their gradients and moments.

Positives are told by their row among *all* proxies; columns of a logit matrix are the own rows.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from nofuss.distributed.processes import all_min, all_sum, share
from nofuss.geometry import normalize

CHUNK = 2**14


class Shard(NamedTuple):
    """Rows start … stop − 1 of `total` proxies: those that this process holds."""

    start: int
    stop: int
    total: int

    @property
    def rows(self) -> slice:
        """The own rows among all."""
        return slice(self.start, self.stop)

    def holds(self, row: Tensor) -> Tensor:
        """Which of these rows are own ones."""
        return (row >= self.start) & (row < self.stop)

    def nearest(self, distances: Tensor) -> Tensor:
        """The row among all proxies of the least distance, from (N, own rows); ties: the lowest.

        Of NaN it is the last: an index as any other, and the loss says what is wrong.
        """
        least, column = distances.min(1)
        mine = least == all_min(least.clone())
        return all_min(torch.where(mine, column + self.start, self.total - 1))

    def take(self, proxies: Tensor, rows: Tensor) -> Tensor:
        """Rows among all proxies, from whoever holds them."""
        held = self.holds(rows)
        return all_sum(proxies[(rows - self.start) * held] * held[:, None])


def own_shard(total: int) -> Shard:
    """The rows of this process; one at least for each."""
    own = share(total)
    if own.stop == own.start:
        raise ValueError(f"{total} proxies can't be dealt out over more processes than that")
    return Shard(own.start, own.stop, total)


def first_proxies(
    total: int, dim: int, shard: Shard | None, generator: torch.Generator | None
) -> Tensor:
    """Random directions (own rows, dim): the same rows whatever the number of processes.

    All are drawn, a chunk at a time, and those of others forgotten: chunks hold a multiple of the
    16 numbers that torch draws at once, so that they continue each other as one draw would.
    """
    if shard is None:
        return normalize(torch.randn(total, dim, generator=generator))
    own = torch.empty(shard.stop - shard.start, dim)
    for start in range(0, total, CHUNK):
        # A last chunk of less than 16 numbers would be drawn in another way.
        stop = total if total - start < 2 * CHUNK else start + CHUNK
        drawn = torch.randn(stop - start, dim, generator=generator)
        low, high = max(start, shard.start), min(stop, shard.stop)
        if low < high:
            own[low - shard.start : high - shard.start] = drawn[low - start : high - start]
        if stop == total:
            break
    return normalize(own)


def copy_proxies(proxies: Tensor, total: int, dim: int, shard: Shard | None) -> Tensor:
    """Return a float32 copy (own rows, dim) of given proxies (total, dim), checked."""
    if proxies.shape != (total, dim) or not proxies.is_floating_point():
        raise ValueError(
            f"proxies are {tuple(proxies.shape)} {proxies.dtype}; expected ({total}, {dim}) "
            "floating point: pass one row a proxy, or change num_classes, proxies_per_class or dim"
        )
    if not proxies.isfinite().all():
        raise ValueError("proxies hold NaN or infinity; expected finite numbers: replace them")
    own = proxies.detach() if shard is None else proxies.detach()[shard.rows]
    # On the default device, beside the buffers of the assignment, wherever they came from.
    return torch.empty(own.shape, dtype=torch.float32).copy_(own)
