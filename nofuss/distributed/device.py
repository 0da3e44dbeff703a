"""The device that holds the tensors: the CPU, or one GPU a process."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from nofuss.distributed.processes import world
from nofuss.errors import UsageError


def choose_device(name: str = "auto") -> torch.device:
    """Return torch's device of a name; "auto" is a GPU (CUDA, ROCm) if there is one.

    Under torchrun each process of a machine takes the GPU with its local rank.
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
        raise UsageError(f"can't use device {name}: {reason}; leave it out, or use cpu") from None
    return device


def _own_device(device: torch.device) -> torch.device:
    """Return the device of this process, one that nccl or gloo supports: the CPU or its GPU."""
    if device.type == "cpu":
        return device
    if device.type != "cuda" or device.index is not None:
        raise UsageError(
            f"device {device} is for one process; under torchrun choose from auto, cuda, cpu"
        )
    own = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(own)  # which torch refuses where there are fewer GPUs than processes
    return own


def describe_device(name: str = "auto") -> str:
    """Return the device's name for people: the GPU's model, or "cpu"."""
    device = choose_device(name)
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)


def device_of(module: nn.Module) -> torch.device:
    """Return the device of a module's parameters; the CPU if it has none."""
    return next((p.device for p in module.parameters()), torch.device("cpu"))


@contextmanager
def seeded(device: torch.device) -> Iterator[Callable[[int], None]]:
    """Yield a function that seeds the CPU's and the device's generators, then restore them."""
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
