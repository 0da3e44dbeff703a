"""What every loss asks of its batch: one line of error instead of a silent zero or a NaN."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from nofuss.geometry import Array, as_tensor


def full_precision(x: Tensor) -> Tensor:
    """Half and bfloat16 become float32; float32 and float64 stay."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def without_autocast(x: Tensor) -> AbstractContextManager[None]:
    """Full precision on the device of x; costs nothing where autocast is off, as it mostly is."""
    device = x.device.type
    try:
        on = torch.is_autocast_enabled(device)
    except RuntimeError:  # a device that has no autocast
        on = False
    return torch.autocast(device, enabled=False) if on else nullcontext()


def check_embeddings(x: Tensor, dim: int | None = None, *, name: str = "embeddings") -> None:
    """(B, D) floating point with at least one row."""
    if x.ndim != 2 or not x.is_floating_point():
        raise ValueError(
            f"{name} are {tuple(x.shape)} {x.dtype}; expected (batch, dim) floating point"
        )
    if len(x) == 0:
        raise ValueError(f"{name} are empty; a batch needs at least one row")
    if dim is not None and x.shape[1] != dim:
        raise ValueError(
            f"{name} have {x.shape[1]} columns but the proxies have dim {dim}; make them equal"
        )


def check_labels(labels: Array, x: Tensor, num_classes: int | None = None) -> Tensor:
    """(B,) whole numbers 0 … num_classes − 1, as an int64 tensor on the device of x."""
    labels = as_tensor(labels)
    if labels.ndim != 1 or len(labels) != len(x):
        raise ValueError(f"labels are {tuple(labels.shape)}; expected ({len(x)},), one a row")
    if labels.dtype != torch.int64 or labels.device != x.device:
        if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
            raise ValueError(f"labels are {labels.dtype}; expected int64 class numbers")
        labels = labels.to(x.device, torch.int64)
    if num_classes is not None:
        low, high = _ends(labels)
        if low < 0:
            raise ValueError(f"labels go down to {low}; renumber them with compact_labels()")
        if high >= num_classes:
            raise ValueError(
                f"labels reach {high} but there are {num_classes} classes (0 to "
                f"{num_classes - 1}); renumber them with compact_labels()"
            )
    return labels


def _ends(labels: Tensor) -> tuple[int, int]:
    """Least and largest; of few on the CPU in Python, where a call of torch takes longer."""
    if len(labels) <= 64 and labels.device.type == "cpu":
        values = labels.tolist()
        return min(values), max(values)
    low, high = labels.aminmax()
    return int(low), int(high)


def zero_with_graph(x: Tensor) -> Tensor:
    """A zero whose backward gives zero gradients: a batch that has nothing to say."""
    return (x * 0).sum()
