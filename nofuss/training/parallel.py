"""Run a model on its share of a batch as if it saw the whole batch.

The backbone runs under DistributedDataParallel. Operations that see
the batch as a whole would otherwise depend on the number of processes: `whole_batch` gives batch
norm the statistics of all rows (torch has that for GPUs only), and each row the random numbers that
it has in the whole batch.
"""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode

from nofuss.distributed.processes import all_sum, share, world


def parallel(model: nn.Module) -> nn.Module:
    """Wrap the model so that gradients are averaged over processes; freeze parts of it before."""
    if world() == 1:
        return model
    return DistributedDataParallel(model)


def average_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Average gradients over processes, so that parameters stay equal on different machines."""
    if world() == 1:
        return
    for parameter in parameters:
        if parameter.grad is not None:
            all_sum(parameter.grad).div_(world())


def whole_batch(count: int) -> AbstractContextManager[Any]:
    """Make batch norm and per-row random draws those of a batch of `count` rows."""
    return nullcontext() if world() == 1 else _WholeBatch(count)


class _WholeBatch(TorchFunctionMode):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.count, self.own = count, share(count)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Replace operations over the batch and leave all others as they are."""
        kwargs = kwargs or {}
        own = self.own.stop - self.own.start
        if func is F.batch_norm and kwargs["training"]:
            return _batch_norm(*args, **kwargs)
        if func is torch.rand:
            size = args[0] if isinstance(args[0], list | tuple) else args
            if size[0] == own:
                return func(self.count, *size[1:], **kwargs)[self.own]
        if func is F.dropout and kwargs["training"] and len(args[0]) == own:
            return _dropout(args[0], self.count, self.own, p=kwargs["p"])
        if func is Tensor.bernoulli_ and len(args[0]) == own:
            whole = args[0].new_empty(self.count, *args[0].shape[1:])
            return args[0].copy_(whole.bernoulli_(*args[1:], **kwargs)[self.own])
        return func(*args, **kwargs)


def _dropout(x: Tensor, count: int, own: slice, *, p: float) -> Tensor:
    """F.dropout in training mode, with the mask that these rows have in the whole batch."""
    last = x.ndim == 4 and x.is_contiguous(memory_format=torch.channels_last)
    layout = torch.channels_last if last else torch.contiguous_format
    whole = torch.empty((count, *x.shape[1:]), dtype=x.dtype, device=x.device, memory_format=layout)
    return x * whole.bernoulli_(1 - p)[own].div_(max(1 - p, torch.finfo(x.dtype).tiny))


def _batch_norm(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    *,
    weight: Tensor | None,
    bias: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> Tensor:
    """F.batch_norm in training mode, over the rows of all processes."""
    out, mean, var, count = _BatchNorm.apply(x, weight, bias, eps)  # type: ignore[no-untyped-call]
    if running_mean is not None and running_var is not None:
        running_mean.lerp_(mean, momentum)
        running_var.lerp_(var * (count / (count - 1)), momentum)
    whole: Tensor = out
    return whole


class _BatchNorm(torch.autograd.Function):
    """Mean, then variance around it: two small sums over the processes, one more on the way back.

    Gradients of weight and bias are those of this process's rows, as for any other parameter. What
    autocast gives in half precision is summed in single, in which statistics and weights are.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        over = [d for d in range(x.ndim) if d != 1]
        whole = x.to(torch.promote_types(x.dtype, torch.float32))
        own = whole.new_tensor([x.numel() // x.shape[1]])
        sums = all_sum(torch.cat([whole.sum(over), own]))
        count = sums[-1:].clone()
        mean = sums[:-1] / count
        var = all_sum((whole - _along(mean, x)).square_().sum(over)) / count
        out = F.batch_norm(whole, mean, var, weight, bias, eps=eps).to(x.dtype)
        ctx.save_for_backward(x, weight, mean, (var + eps).rsqrt_(), count)
        ctx.mark_non_differentiable(mean, var, count)
        return out, mean, var, count

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, inverse, count = ctx.saved_tensors
        over = [d for d in range(x.ndim) if d != 1]
        grad = grad.to(mean.dtype)
        around = (x - _along(mean, x)) * _along(inverse, x)
        dweight, dbias = (grad * around).sum(over), grad.sum(over)
        along, level = all_sum(torch.stack([dweight, dbias])) / count
        dx = grad - _along(level, x) - around * _along(along, x)
        dx = dx * _along(inverse if weight is None else inverse * weight, x)
        needed = ctx.needs_input_grad
        return dx.to(x.dtype), dweight if needed[1] else None, dbias if needed[2] else None, None


def _along(channel: Tensor, x: Tensor) -> Tensor:
    """(C,) against (B, C, …)."""
    return channel.view(1, -1, *[1] * (x.ndim - 2))
