"""The training loop. Its position is two integers (epoch, step) and a few tensors.

Order and augmentation are pure functions of (seed, epoch, step), randomness inside the model is
seeded by them at every step, and rates are computed from them. A run that was interrupted
anywhere and resumed therefore ends with the same bits as one that was not.
"""

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

from nofuss.data.loader import Batch, on_device
from nofuss.distributed.device import device_of, seeded
from nofuss.distributed.processes import any_true, copy_from_first, rank
from nofuss.geometry import normalize
from nofuss.losses.clustering import StructuredClustering
from nofuss.losses.proxy_loss import ProxyLoss
from nofuss.proxies.assignment import Dynamic
from nofuss.proxies.balanced import Balanced
from nofuss.training.callbacks import Tell, nobody
from nofuss.training.checkpoint import (
    Checkpoint,
    Sharded,
    module_tensors,
    optimizer_tensors,
    restore_module,
    restore_optimizer,
    save_checkpoint,
)
from nofuss.training.optim import set_rates
from nofuss.training.step import parallel, train_step

log = logging.getLogger("nofuss")
COLLAPSED = 0.01
"""Spread below which all embeddings point the same way."""


class Feed(Protocol):
    """Batches of an epoch, from a step on; every epoch has as many."""

    def __len__(self) -> int: ...

    def __call__(self, epoch: int, start: int) -> Iterable[Batch]:
        """Yield the epoch's batches without the first `start`."""


@dataclass
class Training:
    """Model, criterion, optimizer and the position of training."""

    model: nn.Module
    criterion: nn.Module
    optimizer: Optimizer
    schedule: str
    epochs: int
    seed: int
    epoch: int = 0
    step: int = 0
    loss_sum: float = 0.0
    history: list[dict[str, Any]] = field(default_factory=list)

    @property
    def sharded(self) -> Sharded | None:
        """Which tensors are this process's rows, if proxies are distributed over processes."""
        if not isinstance(self.criterion, ProxyLoss) or self.criterion.shard is None:
            return None
        held = [p for group in self.optimizer.param_groups for p in group["params"]]
        number = next(i for i, p in enumerate(held) if p is self.criterion.proxies)
        return Sharded(self.criterion.shard, ("criterion.proxies", f"optimizer.{number}."))

    def save(self, folder: Path, steps: int) -> None:
        """Write a checkpoint named after the steps done so far."""
        tensors = (
            module_tensors("model", self.model)
            | module_tensors("criterion", self.criterion)
            | optimizer_tensors(self.optimizer)
        )
        state = {k: getattr(self, k) for k in ("epoch", "step", "loss_sum", "history")}
        # "at" is the step within the epoch; "step" names the checkpoint.
        save_checkpoint(
            folder,
            self.epoch * steps + self.step,
            tensors,
            {"at": state.pop("step"), **state},
            sharded=self.sharded,
        )

    def restore(self, checkpoint: Checkpoint) -> None:
        """Continue from the checkpoint's position."""
        restore_module("model", self.model, checkpoint.tensors)
        restore_module("criterion", self.criterion, checkpoint.tensors)
        restore_optimizer(self.optimizer, checkpoint.tensors)
        state = checkpoint.state
        self.epoch, self.step = state["epoch"], state["at"]
        self.loss_sum, self.history = state["loss_sum"], state["history"]


def run_loop(
    t: Training,
    feed: Feed,
    *,
    tell: Tell = nobody,
    validate: Callable[[], dict[str, float]] | None = None,
    before_epoch: Callable[[int], None] | None = None,
    checkpoints: Path | None = None,
    checkpoint_seconds: float = 60.0,
    stop: Callable[[], bool] = lambda: False,
) -> None:
    """Run `t` to its last epoch; `validate` returns scores for the epoch's row.

    tell: called after each step with loss and rates, after each epoch with its row.
    checkpoint_seconds: time between checkpoints; one is also written after every epoch.
    """
    steps, device = len(feed), device_of(t.model)
    with seeded(device) as seed:
        while t.epoch < t.epochs:
            if before_epoch:
                before_epoch(t.epoch)
            t.model.train()
            t.criterion.train()
            if isinstance(t.criterion, StructuredClustering):
                t.criterion.set_epoch(t.epoch)
            model = parallel(t.model)
            began = saved = time.monotonic()
            embeddings, asked = None, False
            for batch in on_device(feed(t.epoch, t.step), device):
                set_rates(t.optimizer, t.schedule, t.epoch + t.step / steps, t.epochs)
                seed(_step_seed(t.seed, t.epoch * steps + t.step) + rank())
                loss, embeddings = train_step(model, t.criterion, t.optimizer, batch)
                t.step += 1
                t.loss_sum += loss
                rates = {f"lr/{group['name']}": group["lr"] for group in t.optimizer.param_groups}
                tell("step", t.epoch * steps + t.step, t.epoch, {"loss": loss} | rates)
                asked, due = any_true(stop(), time.monotonic() - saved > checkpoint_seconds)
                if t.step == steps:
                    break  # the epoch's row is written first: it needs the last embeddings
                if checkpoints and (asked or due):
                    t.save(checkpoints, steps)
                    saved = time.monotonic()
                if asked:
                    raise KeyboardInterrupt
            copy_from_first(t.model.buffers())  # each has batch norm's statistics of its rows
            seconds = time.monotonic() - began
            row = {"epoch": t.epoch + 1, "loss": t.loss_sum / steps, "seconds": seconds}
            row |= _health(t.criterion, embeddings)
            if row.get("spread", 1) < COLLAPSED and not _has_collapsed(t.history):
                log.warning(
                    "the embeddings have collapsed: all point the same way (spread "
                    f"{row['spread']:.1e}); lower the rates or raise the scale"
                )
            if validate:
                t.model.eval()
                row |= validate()
            t.history.append(row)
            t.epoch, t.step, t.loss_sum = t.epoch + 1, 0, 0.0
            tell("epoch", t.epoch * steps, t.epoch, row)
            if checkpoints:
                t.save(checkpoints, steps)
            if any_true(asked or stop())[0]:
                raise KeyboardInterrupt


def _step_seed(seed: int, step: int) -> int:
    """Mix seed and step, so that neighbouring ones give unrelated seeds."""
    return (seed * 0x9E3779B97F4A7C15 + step * 0xBF58476D1CE4E5B9) % 2**63


def _has_collapsed(history: list[dict[str, Any]]) -> bool:
    """Return whether the last epoch ended so already."""
    return bool(history) and history[-1].get("spread", 1) < COLLAPSED


def _health(criterion: nn.Module, embeddings: Tensor | None) -> dict[str, float]:
    """Measure signs of collapse at the end of an epoch: spread of embeddings, proxies in use."""
    health = {}
    if embeddings is not None and len(embeddings) > 1:
        # 1 − |mean direction|²: 0 when all embeddings point the same way.
        health["spread"] = 1 - float(normalize(embeddings.float()).mean(0).square().sum())
    assignment = getattr(criterion, "assignment", None)
    if isinstance(assignment, Dynamic | Balanced):
        health["proxies_in_use"] = assignment.share_in_use()
    return health
