"""A small training that every test here builds anew: bit for bit the same each time."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from nofuss.losses import ProxyNCA
from nofuss.training.callbacks import Event
from nofuss.training.loop import Training
from tests.asked import settings_of


class Items(NamedTuple):
    inputs: Tensor
    labels: Tensor | None
    indices: Tensor


class Pictures:
    """A `Feed` of random 3-channel pictures in a few classes, drawn from (epoch, step)."""

    def __init__(self, steps: int = 4, batch: int = 8, classes: int = 5) -> None:
        self.steps, self.batch, self.classes = steps, batch, classes

    def __len__(self) -> int:
        return self.steps

    def __call__(self, epoch: int, start: int) -> Iterator[Items]:
        for step in range(start, self.steps):
            g = torch.Generator().manual_seed(1000 * epoch + step)
            inputs = torch.randn(self.batch, 3, 6, 6, generator=g)
            labels = torch.randint(self.classes, (self.batch,), generator=g)
            yield Items(inputs, labels, 100 * step + torch.arange(self.batch))


class Recorder:
    """Keeps what the loop tells."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.rows: list[Mapping[str, Any]] = []

    def __call__(self, event: Event) -> None:
        if event.kind == "step":
            self.losses.append(event.values["loss"])
        elif event.kind == "epoch":
            self.rows.append(event.values)


class DropConnect(nn.Module):
    """Leaves out whole items at random, as EfficientNet does with its blocks."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        kept = (torch.rand(len(x), 1, 1, 1) > 0.3).to(x.dtype)
        return x * kept / 0.7


def small_network() -> nn.Module:
    """Channels last, batch norm and randomness: all that a resume could get wrong."""
    with torch.random.fork_rng():
        torch.manual_seed(7)
        network = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            DropConnect(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(8, 4),
        )
    return network.to(memory_format=torch.channels_last)


def make_training(
    optimizer: str = "adam",
    schedule: str = "cosine",
    criterion: nn.Module | None = None,
    epochs: int = 3,
) -> Training:
    network = small_network()
    criterion = ProxyNCA(5, 4, scale=16, seed=3) if criterion is None else criterion
    *body, head = network.children()
    settings = replace(
        settings_of(),
        optimizer=optimizer,  # type: ignore[arg-type]
        schedule=schedule,  # type: ignore[arg-type]
        epochs=epochs,
        seed=11,
        lr=1e-3,
        head_lr=1e-2,
        proxy_lr=1e-1,
        weight_decay=0.01 if optimizer == "adamw" else 0.0,
    )
    backbone = [p for layer in body for p in layer.parameters()]
    return Training.of(settings, network, criterion, backbone=backbone, head=head.parameters())
