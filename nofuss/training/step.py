"""One training step: forward, loss, a look at the numbers, backward, update.

Under torchrun each process runs the network on its rows of the batch (DistributedDataParallel), and
all compute one loss of the gathered embeddings. Batch norm then has the statistics of a process's
rows: see docs/scale.md.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer

from nofuss.data.loader import Batch
from nofuss.distributed.device import device_of
from nofuss.distributed.processes import all_sum, any_true, world
from nofuss.distributed.shard import gather
from nofuss.errors import TrainingError
from nofuss.losses.proxy_loss import ProxyLoss


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
