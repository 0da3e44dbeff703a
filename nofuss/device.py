"""Where tensors live and are computed with: the CPU, or a GPU of this process's own."""

import os
from contextlib import AbstractContextManager

import torch
from torch import nn

from nofuss.errors import UsageError


def choose_device(name: str = "auto") -> torch.device:
    """The device of a name as torch has them; "auto" is a GPU (CUDA, ROCm) if there is one.

    Under torchrun each process of a machine takes the GPU of its number.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", _own_gpu())
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:  # as torch refuses them
        reason = str(error).splitlines()[0].rstrip(".")
        raise UsageError(f"can't use --device {name}: {reason}; leave it out, or: cpu") from None
    return device


def describe_device(name: str = "auto") -> str:
    """What a reader of the numbers would call it."""
    device = choose_device(name)
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)


def device_of(module: nn.Module) -> torch.device:
    """Where a module's parameters are; the CPU for one without any."""
    return next((p.device for p in module.parameters()), torch.device("cpu"))


def own_random_numbers(device: torch.device) -> AbstractContextManager[None]:
    """Inside, seeds may be set: the generators of the CPU and the device are put back after."""
    accelerator = torch.accelerator.current_accelerator()  # has generators of its own
    if accelerator is not None and accelerator.type == device.type:
        return torch.random.fork_rng(devices=[device], device_type=device.type)
    return torch.random.fork_rng(devices=[])


def _own_gpu() -> int:
    number, there = int(os.environ.get("LOCAL_RANK", 0)), torch.cuda.device_count()
    if number >= there > 0:
        raise UsageError(
            f"process {number + 1} of this machine has no GPU of its own, there are {there}; "
            "start fewer, or all with --device cpu"
        )
    return number
