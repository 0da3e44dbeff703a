"""Collectives that gradients flow through, for one loss that several processes compute together.

Each process holds some rows of the batch and some of the proxies. All have the whole batch of
embeddings x and compute the same loss L, each its part:

                 forward                    backward
    gather       own rows → whole batch     the own rows of ∂L/∂x
    to_shards    whole batch → itself       the sum of all processes' parts of ∂L/∂x
    from_shards  own part → sum of parts    ∂L/∂sum as it is, the same in every process

There is one L, not one a process: adding the gradients of N equal losses would make those of the
proxies N times too large.
"""

from typing import Any

import torch
from torch import Tensor

from nofuss.distributed.processes import all_sum, gather_rows, share, world


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


def to_shards(x: Tensor) -> Tensor:
    """Return x itself, for each process's part of a loss."""
    same: Tensor = _ToShards.apply(x)  # type: ignore[no-untyped-call]
    return same


def from_shards(part: Tensor) -> Tensor:
    """Return the sum of all processes' parts."""
    whole: Tensor = _FromShards.apply(part)  # type: ignore[no-untyped-call]
    return whole


def _refuse_second_derivatives() -> None:
    """Raise if autograd is on in a backward: its result is to be differentiated again."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            "a loss over several processes can't be differentiated twice; compute it in one process"
        )


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, count: int) -> Tensor:
        return gather_rows(own, count)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        _refuse_second_derivatives()
        return grad[share(len(grad))] * world(), None


class _ToShards(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        _refuse_second_derivatives()
        return all_sum(grad.clone(memory_format=torch.contiguous_format))


class _FromShards(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor) -> Tensor:
        return all_sum(part.clone())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        _refuse_second_derivatives()
        return grad
