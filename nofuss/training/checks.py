"""Checks before the first step: mistakes that would otherwise fail silently, hours later."""

import copy
import logging

from torch import nn
from torch.optim import Optimizer

from nofuss.data.loader import Batch
from nofuss.distributed.device import device_of, seeded
from nofuss.errors import TrainingError
from nofuss.losses.proxy_loss import ProxyLoss
from nofuss.training.step import parallel, train_step

log = logging.getLogger("nofuss")


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
