"""Where tensors live and are computed with: the CPU, or a GPU of this process's own."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from nofuss.distributed.processes import world
from nofuss.errors import UsageError


def choose_device(name: str = "auto") -> torch.device:
    """The device of a name as torch has them; "auto" is a GPU (CUDA, ROCm) if there is one.

    Under torchrun each process of a machine takes the GPU of its number.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        if world() > 1:
            device = _own_device(device)
        elif device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:  # as torch refuses them
        reason = str(error).splitlines()[0].rstrip(".")
        raise UsageError(f"can't use --device {name}: {reason}; leave it out, or: cpu") from None
    return device


def _own_device(device: torch.device) -> torch.device:
    """What nccl and gloo can talk over: the CPU, or the GPU that no other process has."""
    number, there = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
    if device.type == "cpu":
        return device
    if device.type != "cuda" or device.index is not None:
        raise UsageError(f"--device {device} is for one process; under torchrun: auto, cuda, cpu")
    if number >= there > 0:
        raise UsageError(
            f"process {number + 1} of this machine has no GPU of its own, there are {there}; "
            "start fewer, or all with --device cpu"
        )
    torch.cuda.set_device(number)
    return torch.device("cuda", number)


def describe_device(name: str = "auto") -> str:
    """What a reader of the numbers would call it."""
    device = choose_device(name)
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)


def device_of(module: nn.Module) -> torch.device:
    """Where a module's parameters are; the CPU for one without any."""
    return next((p.device for p in module.parameters()), torch.device("cpu"))


@contextmanager
def own_random_numbers(device: torch.device) -> Iterator[Callable[[int], None]]:
    """Hands out what seeds the CPU's and the device's generators; they are put back after."""
    generators = [torch.default_generator]
    if on_device := getattr(getattr(torch, device.type, None), "default_generators", None):
        generators.append(on_device[device.index or 0])
    states = [generator.get_state() for generator in generators]

    def seed(number: int) -> None:
        for generator in generators:
            generator.manual_seed(number)

    try:
        yield seed
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
