"""Proxies distributed over processes: each holds neighbouring rows, their gradients and moments.

A positive is its row among *all* proxies; the columns of a logit matrix are this process's rows.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from nofuss.distributed.processes import all_min, all_sum, share
from nofuss.geometry import normalize

CHUNK = 2**14  # rows drawn at once: bounds the memory for rows of other processes


class Shard(NamedTuple):
    """Rows start … stop − 1 of `total` proxies: those that this process holds."""

    start: int
    stop: int
    total: int

    @property
    def rows(self) -> slice:
        """Return this process's rows among all."""
        return slice(self.start, self.stop)

    def holds(self, row: Tensor) -> Tensor:
        """Return which of the given rows this process holds."""
        return (row >= self.start) & (row < self.stop)

    def nearest(self, distances: Tensor) -> Tensor:
        """Return the row among all of the least distance, from (N, own rows); ties: the lowest.

        With NaN it is the last row: a valid index, and the loss becomes NaN.
        """
        least, column = distances.min(1)
        is_least = least == all_min(least.clone())
        return all_min(torch.where(is_least, column + self.start, self.total - 1))

    def take(self, proxies: Tensor, rows: Tensor) -> Tensor:
        """Return the given rows of all proxies, from the processes that hold them."""
        held = self.holds(rows)
        return all_sum(proxies[(rows - self.start) * held] * held[:, None])


def own_shard(total: int) -> Shard:
    """Return the rows of this process, at least one."""
    own = share(total)
    if own.stop == own.start:
        raise ValueError(
            f"got {total} proxies for more processes than that; expected one for each: start fewer "
            "processes, or leave sharded out"
        )
    return Shard(own.start, own.stop, total)


def first_proxies(
    total: int, dim: int, shard: Shard | None, generator: torch.Generator | None
) -> Tensor:
    """Return random directions (own rows, dim), the same rows for any number of processes.

    All are drawn, a chunk at a time, and those of other processes discarded. A chunk holds a
    multiple of the 16 numbers that torch draws at once, so chunks equal one large draw.
    """
    if shard is None:
        return normalize(torch.randn(total, dim, generator=generator, dtype=torch.float32))
    own = torch.empty(shard.stop - shard.start, dim, dtype=torch.float32)
    for start in range(0, total, CHUNK):
        # torch draws fewer than 16 numbers in another way: the last chunk takes the remainder too.
        stop = total if total - start < 2 * CHUNK else start + CHUNK
        drawn = torch.randn(stop - start, dim, generator=generator, dtype=torch.float32)
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
