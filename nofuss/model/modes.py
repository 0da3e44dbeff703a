"""A module whose modes are changed for a while and then restored, each part's its own."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Put a module into eval mode, and restore the mode of each of its parts afterwards."""
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for part, training in modes:
            part.training = training


@contextmanager
def left_as_given(module: nn.Module) -> Iterator[None]:
    """Restore modes, and which parameters are frozen; what they have learned stays."""
    frozen = [(parameter, parameter.requires_grad) for parameter in module.parameters()]
    modes = [(part, part.training) for part in module.modules()]
    try:
        yield
    finally:
        for parameter, required in frozen:
            parameter.requires_grad_(required)
        for part, training in modes:
            part.training = training
