"""The training loop. Its position is two integers (epoch, step) and a few tensors.

Order and augmentation are pure functions of (seed, epoch, step), randomness inside the model is
seeded by them at every step, and rates are computed from them. A run that was interrupted
anywhere and resumed therefore ends with the same bits as one that was not.

Under torchrun each process runs the network on its rows of the batch (DistributedDataParallel), and
all compute one loss of the gathered embeddings. Batch norm then has the statistics of a process's
rows: see docs/scale.md.
"""

import copy
import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer

from nofuss.config import Settings
from nofuss.data.loader import Batch, on_device
from nofuss.distributed.device import device_of, seeded
from nofuss.distributed.processes import all_sum, any_true, copy_from_first, rank, world
from nofuss.distributed.shard import gather
from nofuss.errors import TrainingError
from nofuss.geometry import normalize
from nofuss.losses.clustering import StructuredClustering
from nofuss.losses.proxy_loss import ProxyLoss
from nofuss.progress import working
from nofuss.proxies.assignment import Dynamic
from nofuss.proxies.balanced import Balanced
from nofuss.training.callbacks import Callbacks, Kind, Tell, nobody
from nofuss.training.checkpoint import (
    Checkpoint,
    Sharded,
    load_checkpoint,
    module_tensors,
    optimizer_tensors,
    restore_module,
    restore_optimizer,
    save_checkpoint,
)
from nofuss.training.optim import build_optimizer, set_rates

log = logging.getLogger("nofuss")
COLLAPSED = 0.01
"""Spread below which all embeddings point the same way."""


class Feed(Protocol):
    """Batches of an epoch, from a step on; every epoch has as many."""

    def __len__(self) -> int: ...

    def __call__(self, epoch: int, start: int) -> Iterable[Batch]:
        """Yield the epoch's batches without the first `start`."""


@dataclass(frozen=True)
class Control:
    """How a training is watched, stopped and resumed from outside; by default not at all."""

    callbacks: Callbacks = field(default_factory=Callbacks)
    stop: Callable[[], bool] = lambda: False
    checkpoints: Path | None = None
    """The folder of checkpoints; None writes none."""
    resume: bool = False
    """Continue from the newest of them."""
    metrics: Callable[[list[dict[str, Any]]], object] = lambda history: None
    """Called with the rows of all epochs after each of them."""
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))


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
        """Return a training at its first step; its parameters are those of the model by part."""
        assert settings.epochs is not None
        optimizer = build_optimizer(
            settings.optimizer,
            backbone=backbone,
            head=head,
            proxies=criterion.parameters(),
            lr=settings.lr,
            head_lr=settings.head_lr or 0.0,
            proxy_lr=settings.proxy_lr or 0.0,
            weight_decay=settings.weight_decay,
        )
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


def run_watched(
    t: Training,
    feed: Feed,
    control: Control,
    *,
    validate: Callable[[], dict[str, float]] | None = None,
    before_epoch: Callable[[int], None] | None = None,
) -> None:
    """Restore the last checkpoint or rehearse on one batch, then run the loop and report it."""
    callbacks, steps = control.callbacks, len(feed)
    if control.resume and control.checkpoints is not None:
        checkpoint = load_checkpoint(control.checkpoints, sharded=t.sharded)
        if checkpoint is None:
            log.warning("no intact checkpoint to resume from; training starts from the beginning")
        else:
            t.restore(checkpoint)
            callbacks.step, callbacks.epoch = t.epoch * steps + t.step, t.epoch
            control.metrics(t.history)
            log.info(f"resuming at epoch {t.epoch + 1}, step {t.step + 1}")
    elif t.epochs and control.checkpoints is not None:
        if before_epoch:
            before_epoch(0)
        with working(callbacks.progress, "checking that the loss falls on one batch"):
            first = next(iter(feed(0, 0)))
            check_before_training(t.model, t.criterion, t.optimizer, first)
    total = t.epochs * steps
    what = f"training, {t.epochs} epoch{'' if t.epochs == 1 else 's'}"

    def tell(kind: Kind, step: int, epoch: int, values: Mapping[str, Any]) -> None:
        if kind == "epoch":
            control.metrics(t.history)
        callbacks.tell(kind, step, epoch, values)
        if kind == "epoch" or step < total:  # the last step ends with its epoch
            callbacks.progress(what, step, total)

    callbacks.progress(what, callbacks.step, total)
    run_loop(
        t,
        feed,
        tell=tell,
        validate=validate,
        before_epoch=before_epoch,
        checkpoints=control.checkpoints,
        stop=control.stop,
    )


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


# One step: forward, loss, a look at the numbers, backward, update


class NonFiniteLoss(TrainingError):
    """The loss or its gradient is NaN or infinite; nothing was updated."""

    def __init__(self, message: str, indices: Tensor) -> None:
        super().__init__(message)
        self.indices = indices


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
    model: nn.Module,
    criterion: nn.Module,
    optimizer: Optimizer,
    batch: Batch,
) -> tuple[float, Tensor]:
    """Update once; the loss before it and the embeddings. Raises before a NaN can spread."""
    optimizer.zero_grad()
    embeddings = gather(model(batch.inputs.to(device_of(model))), len(batch.indices))
    loss = batch_loss(criterion, embeddings, batch.labels)
    value = loss.item()
    if not math.isfinite(value):
        raise NonFiniteLoss(f"the loss is {value}", batch.indices)
    loss.backward()  # type: ignore[no-untyped-call]
    average_gradients(criterion)
    gradients = [p.grad for g in optimizer.param_groups for p in g["params"] if p.grad is not None]
    if any_true(not torch.isfinite(get_total_norm(gradients)))[0]:
        raise NonFiniteLoss(
            f"the loss is {value:.4g} but its gradient is not finite", batch.indices
        )
    optimizer.step()
    return value, embeddings.detach()


# Before the first step: mistakes that would otherwise fail silently, hours later


def check_before_training(
    model: nn.Module,
    criterion: nn.Module,
    optimizer: Optimizer,
    batch: Batch,
    *,
    repeats: int = 5,
) -> None:
    """Raise on what can't work and log what looks wrong; change nothing."""
    check_optimizer(criterion, optimizer)
    if isinstance(criterion, ProxyLoss):
        check_labels_fit(criterion, batch)
        check_scale(criterion)
    first, last = loss_on_one_batch(model, criterion, optimizer, batch, repeats=repeats)
    if not last < first:
        log.warning(
            f"the loss does not fall on one batch seen {repeats} times ({first:.4g} → {last:.4g}); "
            "try lower rates, or check the labels"
        )


def check_optimizer(criterion: nn.Module, optimizer: Optimizer) -> None:
    """Raise if a parameter of the criterion (its proxies) is not in the optimizer."""
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    forgotten = [name for name, p in criterion.named_parameters() if id(p) not in held]
    if forgotten:
        raise TrainingError(
            f"{', '.join(forgotten)} of {type(criterion).__name__} would never be trained, without "
            "the optimizer; add criterion.parameters() as a group with its own rate"
        )


def check_labels_fit(criterion: ProxyLoss, batch: Batch) -> None:
    """Raise if labels reach beyond the classes that the proxies stand for."""
    if batch.labels is not None and int(batch.labels.max()) >= criterion.num_classes:
        raise TrainingError(
            f"labels reach {int(batch.labels.max())} but the criterion has "
            f"{criterion.num_classes} classes; renumber them with compact_labels()"
        )


def check_scale(criterion: ProxyLoss) -> None:
    """Warn of a scale below 4, too soft for a log-sum-exp loss, or above 64, too hard."""
    scale = criterion.scale
    if criterion.needs_scale and scale is not None and not 4 <= float(scale) <= 64:
        log.warning(f"scale is {float(scale):g}; losses like this one train well between 8 and 32")


def loss_on_one_batch(
    model: nn.Module,
    criterion: nn.Module,
    optimizer: Optimizer,
    batch: Batch,
    *,
    repeats: int,
) -> tuple[float, float]:
    """Return the loss on one batch before and after `repeats` steps on it, made on copies."""
    copies: tuple[nn.Module, nn.Module] = copy.deepcopy((model, criterion))
    twins = dict(
        zip(
            (p for m in (model, criterion) for p in m.parameters()),
            (p for m in copies for p in m.parameters()),
            strict=True,
        )
    )
    groups = [
        {**group, "params": [twins[p] for p in group["params"]]} for group in optimizer.param_groups
    ]
    rehearsal = type(optimizer)(groups)  # type: ignore[call-arg]
    with seeded(device_of(model)) as seed:
        seed(0)
        model = parallel(copies[0])
        losses = [train_step(model, copies[1], rehearsal, batch)[0] for _ in range(repeats)]
    return losses[0], losses[-1]
