"""Proxies distributed over processes: each holds neighbouring rows, their gradients and moments.

A positive is its row among *all* proxies; the columns of a logit matrix are this process's rows.
Each process also holds some rows of the batch: `gather` gives all of them the whole batch of
embeddings x, and the own rows of ∂L/∂x in backward. All compute the same loss L, each its part, and
add up their parts of ∂L/∂x (losses/chunked.py). There is one L, not one a process: adding the
gradients of N equal losses would make those of the proxies N times too large.
"""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from nofuss.distributed.processes import all_sum, first, gather_rows, share, world
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

    def take(self, proxies: Tensor, rows: Tensor) -> Tensor:
        """Return the given rows of all proxies, from the processes that hold them."""
        held = self.holds(rows)
        return all_sum(proxies[(rows - self.start) * held] * held[:, None])

    def collect(self, own: Tensor) -> Tensor | None:
        """Return all rows in the first process, from all processes' own; None in the others."""
        own = own.detach().cpu().contiguous()
        if not first():
            dist.send(own, 0)
            return None
        whole = own.new_empty(self.total, *own.shape[1:])
        whole[self.rows] = own
        for number in range(1, world()):
            dist.recv(whole[share(self.total, number)], number)
        return whole


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


def gather(own: Tensor, count: int | None = None) -> Tensor:
    """Return the whole batch (count, …) from all processes' rows, `share(count)` of it each.

    Its gradient is N times that of the own rows: DistributedDataParallel then takes the mean over
    N processes, where the sum is needed.
    """
    if world() == 1:
        return own
    if count is None:
        count = int(all_sum(torch.tensor(len(own))))
    part = share(count)
    if len(own) != part.stop - part.start:
        raise ValueError(
            f"got {len(own)} of {count} rows; processes.share({count}) is rows {part.start} to "
            f"{part.stop}"
        )
    whole: Tensor = _Gather.apply(own, count)  # type: ignore[no-untyped-call]
    return whole


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, count: int) -> Tensor:
        return gather_rows(own, count)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        if torch.is_grad_enabled():  # in a backward: its result is to be differentiated again
            raise RuntimeError(
                "a loss over several processes can't be differentiated twice; compute it in one "
                "process"
            )
        return grad[share(len(grad))] * world(), None
