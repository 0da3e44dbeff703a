"""The training loop. Its position is two integers (epoch, step) and a few tensors.

Order and augmentation are pure functions of (seed, epoch, step), randomness inside the model is
seeded by them at every step, and rates are computed from them. A run that was interrupted
anywhere and resumed therefore ends with the same bits as one that was not.

Backbone, head and proxies have separate rates: proxies start far from their final places, each
receives few gradients, and they need a rate that would destroy a pretrained backbone.

Under torchrun each process runs the network on its rows of the batch (DistributedDataParallel), and
all compute one loss of the gathered embeddings. Batch norm then has the statistics of a process's
rows: see docs/scale.md.
"""

import copy
import logging
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import get_total_norm
from torch.optim import Adam, AdamW, Optimizer, RMSprop

from nofuss.config import OptimizerName, Schedule, Settings
from nofuss.data.loader import Batch
from nofuss.distributed.device import device_of, seeded
from nofuss.distributed.processes import all_sum, any_true, copy_from_first, rank, world
from nofuss.distributed.shard import gather
from nofuss.errors import TrainingError
from nofuss.geometry import normalize
from nofuss.losses.clustering import StructuredClustering
from nofuss.losses.proxy_loss import ProxyLoss
from nofuss.progress import working
from nofuss.proxies.assignment import Balanced, Dynamic
from nofuss.training.callbacks import Control
from nofuss.training.checkpoint import (
    Sharded,
    load_checkpoint,
    module_tensors,
    optimizer_tensors,
    restore_module,
    restore_optimizer,
    save_checkpoint,
)

log = logging.getLogger("nofuss")
CHECKPOINT_SECONDS = 60.0
"""Between two checkpoints of an epoch."""
COLLAPSED = 0.01
"""Spread below which all embeddings point the same way."""
RAMP = 1 / 3
"""Epochs in which the rates of the schedule "ramp" rise: Adam's first steps are its least certain,
and would be as large as all others."""


def _cosine(epoch: float, epochs: int) -> float:
    return (1 + math.cos(math.pi * min(1.0, epoch / epochs))) / 2


SCHEDULES: dict[Schedule, Callable[[float, int], float]] = {
    "cosine": _cosine,
    "ramp": lambda epoch, epochs: min(1.0, 0.03 + epoch / RAMP) * _cosine(epoch, epochs),
    "constant": lambda epoch, epochs: 1.0,
}
OPTIMIZERS: dict[OptimizerName, Callable[[list[dict[str, Any]]], Optimizer]] = {
    "adam": partial(Adam, fused=True),
    "adamw": partial(AdamW, fused=True),
    "rmsprop": partial(RMSprop, alpha=0.9, foreach=True),
}


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
    schedule: Schedule
    epochs: int
    seed: int
    epoch: int = 0
    step: int = 0
    loss_sum: float = 0.0
    seconds: float = 0.0
    history: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def of(
        cls,
        settings: Settings,
        model: nn.Module,
        criterion: nn.Module,
        *,
        backbone: Iterable[nn.Parameter],
        head: Iterable[nn.Parameter],
    ) -> "Training":
        """Return a training at its first step, with a rate for each part; proxies do not decay."""
        assert settings.epochs is not None
        parts = (
            ("backbone", backbone, settings.lr, settings.weight_decay),
            ("head", head, settings.head_lr or 0.0, settings.weight_decay),
            ("proxies", criterion.parameters(), settings.proxy_lr or 0.0, 0.0),
        )
        groups: list[dict[str, Any]] = [
            {"params": held, "lr": lr, "base_lr": lr, "name": name, "weight_decay": decay}
            for name, parameters, lr, decay in parts
            if (held := list(parameters))
        ]
        optimizer = OPTIMIZERS[settings.optimizer](groups)
        schedule, epochs, seed = settings.schedule, settings.epochs, settings.seed
        return cls(model, criterion, optimizer, schedule, epochs, seed)

    @property
    def sharded(self) -> Sharded | None:
        """Which tensors are this process's rows, if proxies are distributed over processes."""
        if not isinstance(self.criterion, ProxyLoss) or self.criterion.shard is None:
            return None
        held = [p for group in self.optimizer.param_groups for p in group["params"]]
        number = next(i for i, p in enumerate(held) if p is self.criterion.proxies)
        return Sharded(self.criterion.shard, ("criterion.proxies", f"optimizer.{number}."))

    def save(self, folder: Path, steps: int) -> None:
        """Write a checkpoint named after the steps done so far; an epoch has `steps`."""
        tensors = (
            module_tensors("model", self.model)
            | module_tensors("criterion", self.criterion)
            | optimizer_tensors(self.optimizer)
        )
        # "at" is the step within the epoch; "step" names the checkpoint.
        state: dict[str, Any] = {"epoch": self.epoch, "at": self.step}
        state |= {name: getattr(self, name) for name in ("loss_sum", "seconds", "history")}
        done = self.epoch * steps + self.step
        save_checkpoint(folder, done, tensors, state, sharded=self.sharded)

    def resume(self, folder: Path) -> bool:
        """Continue from the newest intact checkpoint; return whether there is one."""
        checkpoint = load_checkpoint(folder, sharded=self.sharded)
        if checkpoint is None:
            return False
        restore_module("model", self.model, checkpoint.tensors)
        restore_module("criterion", self.criterion, checkpoint.tensors)
        restore_optimizer(self.optimizer, checkpoint.tensors)
        state = checkpoint.state
        self.epoch, self.step = state["epoch"], state["at"]
        self.loss_sum, self.seconds = state["loss_sum"], state["seconds"]
        self.history = state["history"]
        return True


def set_rates(optimizer: Optimizer, schedule: Schedule, epoch: float, epochs: int) -> None:
    """Set the rates, a pure function of the epoch: a resumed run needs no scheduler state."""
    factor = SCHEDULES[schedule](epoch, epochs)
    for group in optimizer.param_groups:
        group["lr"] = group["base_lr"] * factor


def resume_or_begin(
    t: Training,
    feed: Feed,
    control: Control,
    *,
    validate: Callable[[], dict[str, float]] | None = None,
    before_epoch: Callable[[int], None] = lambda epoch: None,
) -> None:
    """Continue from the last checkpoint, or rehearse on one batch; then run the loop."""
    if control.checkpoints is not None:
        if t.resume(control.checkpoints):
            log.info(f"resuming at epoch {t.epoch + 1}, step {t.step + 1}")
        elif t.epochs:
            before_epoch(0)
            with working(control.progress, "checking that the loss falls on one batch"):
                rehearse(t, next(iter(feed(0, 0))))
    run_loop(t, feed, control, validate=validate, before_epoch=before_epoch)


def run_loop(
    t: Training,
    feed: Feed,
    control: Control | None = None,
    *,
    validate: Callable[[], dict[str, float]] | None = None,
    before_epoch: Callable[[int], None] = lambda epoch: None,
) -> None:
    """Run `t` to its last epoch; `validate` returns scores for the epoch's row.

    control: is told each step with loss and rates, and each epoch with its row. Checkpoints are
    written every `CHECKPOINT_SECONDS`, and after every epoch.
    """
    control = control or Control()
    steps, device, folder = len(feed), device_of(t.model), control.checkpoints
    what = f"training, {t.epochs} epoch{'' if t.epochs == 1 else 's'}"
    control.step, control.epoch = t.epoch * steps + t.step, t.epoch
    control.progress(what, control.step, t.epochs * steps)
    with seeded(device) as seed:
        while t.epoch < t.epochs:
            before_epoch(t.epoch)
            t.model.train()
            t.criterion.train()
            if isinstance(t.criterion, StructuredClustering):
                t.criterion.set_epoch(t.epoch)
            model = parallel(t.model)
            saved = time.monotonic()
            began = saved - t.seconds  # before an interruption, too
            embeddings, asked = None, False
            for batch in feed(t.epoch, t.step):
                set_rates(t.optimizer, t.schedule, t.epoch + t.step / steps, t.epochs)
                seed(_step_seed(t.seed, t.epoch * steps + t.step) + rank())
                loss, embeddings = train_step(model, t.criterion, t.optimizer, batch)
                t.step += 1
                t.loss_sum, t.seconds = t.loss_sum + loss, time.monotonic() - began
                rates = {f"lr/{group['name']}": group["lr"] for group in t.optimizer.param_groups}
                done = t.epoch * steps + t.step
                control.tell("step", {"loss": loss} | rates, step=done, epoch=t.epoch)
                asked, due = any_true(control.stop(), time.monotonic() - saved > CHECKPOINT_SECONDS)
                if t.step == steps:
                    break  # the epoch's row is written first: it needs the last embeddings
                control.progress(what, done, t.epochs * steps)
                if folder and (asked or due):
                    t.save(folder, steps)
                    saved = time.monotonic()
                if asked:
                    raise KeyboardInterrupt
            copy_from_first(t.model.buffers())  # each has batch norm's statistics of its rows
            seconds = time.monotonic() - began
            row = {"epoch": t.epoch + 1, "loss": t.loss_sum / steps, "seconds": seconds}
            row |= _health(t, embeddings)
            if validate:
                t.model.eval()
                row |= validate()
            t.history.append(row)
            t.epoch, t.step, t.loss_sum, t.seconds = t.epoch + 1, 0, 0.0, 0.0
            control.tell("epoch", row, step=t.epoch * steps, epoch=t.epoch)
            control.progress(what, t.epoch * steps, t.epochs * steps)
            if folder:
                t.save(folder, steps)
            if any_true(asked or control.stop())[0]:
                raise KeyboardInterrupt


def _step_seed(seed: int, step: int) -> int:
    """Mix seed and step, so that neighbouring ones give unrelated seeds."""
    return (seed * 0x9E3779B97F4A7C15 + step * 0xBF58476D1CE4E5B9) % 2**63


def _health(t: Training, embeddings: Tensor | None) -> dict[str, float]:
    """Measure signs of collapse at the end of an epoch: spread of embeddings, proxies in use."""
    health = {}
    if embeddings is not None and len(embeddings) > 1:
        health["spread"] = spread = spread_of(embeddings)
        before = t.history[-1].get("spread", 1) if t.history else 1
        if spread < COLLAPSED <= before:
            log.warning(
                f"the embeddings have collapsed: all point the same way (spread {spread:.1e}); "
                "lower the rates or raise the scale"
            )
    assignment = getattr(t.criterion, "assignment", None)
    if isinstance(assignment, Dynamic | Balanced):
        health["proxies_in_use"] = assignment.fraction_in_use()
    return health


def spread_of(vectors: Tensor) -> float:
    """Return 1 − |mean direction|²: 0 where all vectors point the same way."""
    return 1 - float(normalize(vectors.cpu().double()).mean(0).square().sum())


# One step: forward, loss, a look at the numbers, backward, update


class NonFiniteLoss(TrainingError):
    """The loss or its gradient is NaN or infinite; nothing was updated."""

    def __init__(self, what: str) -> None:
        super().__init__(f"{what}; nothing was updated; try lower rates, or a lower scale")


def parallel(model: nn.Module) -> nn.Module:
    """Wrap the model so that gradients are averaged over processes; freeze parts of it before."""
    return model if world() == 1 else DistributedDataParallel(model)


def average_gradients(criterion: nn.Module) -> None:
    """Average the gradients of replicated proxies, so that they stay equal on unequal machines."""
    if world() == 1 or (isinstance(criterion, ProxyLoss) and criterion.shard):
        return
    for parameter in criterion.parameters():
        if parameter.grad is not None:
            all_sum(parameter.grad).div_(world())


def batch_loss(criterion: nn.Module, embeddings: Tensor, labels: Tensor | None) -> Tensor:
    """The criterion on a labelled batch, or on thirds of anchors, positives and negatives."""
    if labels is not None:
        loss: Tensor = criterion(embeddings, labels)
    else:
        anchors, positives, negatives = embeddings.chunk(3)
        loss = criterion(anchors, positives=positives, negatives=negatives)
    return loss


def train_step(
    model: nn.Module, criterion: nn.Module, optimizer: Optimizer, batch: Batch
) -> tuple[float, Tensor]:
    """Update once; return the loss before it and the embeddings. Raise before a NaN can spread."""
    optimizer.zero_grad()
    embeddings = gather(
        model(batch.inputs.to(device_of(model), non_blocking=True)), len(batch.indices)
    )
    loss = batch_loss(criterion, embeddings, batch.labels)
    value = loss.item()
    if not math.isfinite(value):
        raise NonFiniteLoss(f"the loss is {value}")
    loss.backward()  # type: ignore[no-untyped-call]
    average_gradients(criterion)
    gradients = [p.grad for g in optimizer.param_groups for p in g["params"] if p.grad is not None]
    if any_true(not torch.isfinite(get_total_norm(gradients)))[0]:
        raise NonFiniteLoss(f"the loss is {value:.4g} but its gradient is not finite")
    optimizer.step()
    return value, embeddings.detach()


def rehearse(t: Training, batch: Batch, *, repeats: int = 5) -> tuple[float, float]:
    """Train copies on one batch, and log if the loss does not fall; return its first and last.

    Mistakes that would otherwise fail silently, hours later, show here. Nothing is changed.
    """
    copies: tuple[nn.Module, nn.Module] = copy.deepcopy((t.model, t.criterion))
    own = (p for module in (t.model, t.criterion) for p in module.parameters())
    twins = dict(zip(own, (p for module in copies for p in module.parameters()), strict=True))
    groups = [{**g, "params": [twins[p] for p in g["params"]]} for g in t.optimizer.param_groups]
    optimizer = type(t.optimizer)(groups)  # type: ignore[call-arg]
    with seeded(device_of(t.model)) as seed:
        seed(0)
        model = parallel(copies[0])
        losses = [train_step(model, copies[1], optimizer, batch)[0] for _ in range(repeats)]
    if not losses[-1] < losses[0]:
        log.warning(
            f"the loss does not fall on one batch seen {repeats} times ({losses[0]:.4g} → "
            f"{losses[-1]:.4g}); try lower rates, or check the labels"
        )
    return losses[0], losses[-1]
