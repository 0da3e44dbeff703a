"""Every loss of several processes beside that of one.

Each process first computes loss and gradients alone, with all proxies and the whole batch, then
with the others: its rows of the batch through a model under DistributedDataParallel, its rows of
the proxies. Both must agree, relative to the largest gradient.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nofuss.distributed import processes
from nofuss.distributed.shard import gather
from nofuss.losses import INSTANCE_LOSSES, ProxyAnchor, ProxyNCA, ProxyNCAPlusPlus, ProxyTriplet
from nofuss.losses.proxy_loss import ProxyLoss
from nofuss.training.loop import average_gradients, batch_loss, parallel

BATCH, WIDTH, DIM = 15, 6, 5
Make = Callable[..., nn.Module]


def cases() -> Iterator[tuple[str, Make, bool, bool]]:
    """Name, how to make it, whether it is asked with labels, whether it can be sharded."""
    for classes in (7, 12):  # which two, three and four processes can't share evenly, and can
        for loss in (ProxyNCA, ProxyNCAPlusPlus, ProxyTriplet, ProxyAnchor):
            for name, options, shards in OPTIONS:
                if classes == 12 and name != "static":
                    continue
                if loss is ProxyAnchor and name in ("free norms", "dynamic", "matched"):
                    continue
                if loss is ProxyNCAPlusPlus and "scale" in options:
                    continue
                yield (
                    f"{loss.__name__} {name} {classes}",
                    maker(loss, classes, options),
                    True,
                    shards,
                )
    for loss in (ProxyNCA, ProxyTriplet):
        yield f"{loss.__name__} triplets", maker(loss, 9, {"assignment": "dynamic"}), False, False
    for name, make in INSTANCE_LOSSES.items():
        yield name, lambda make=make, **_: make(), True, False


OPTIONS: tuple[tuple[str, dict[str, Any], bool], ...] = (
    ("static", {}, True),
    ("static, fused", {"fused": True}, True),
    ("fractional", {"proxies_per_class": 0.6}, True),
    ("large scale", {"scale": 200.0}, True),
    ("given proxies", {"proxies": torch.arange(7.0 * DIM).view(7, DIM).cos()}, True),
    ("static, plain", {"fused": False}, False),
    ("several", {"proxies_per_class": 2.5}, False),
    ("free norms", {"scale": None}, False),
    ("dynamic", {"assignment": "dynamic"}, False),
    ("matched", {"assignment": "matched", "proxies_per_class": 0.7}, False),
    ("balanced", {"assignment": "balanced", "proxies_per_class": 0.7}, False),
)


def maker(loss: type[ProxyLoss], classes: int, options: dict[str, Any]) -> Make:
    return lambda **more: loss(classes, DIM, seed=1, **options, **more)


def both(make: Make, labelled: bool, *, sharded: bool) -> None:
    """Loss, gradients of the model and of the proxies: alone and together."""
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(BATCH, WIDTH, generator=generator, dtype=torch.float64)
    labels = torch.randint(7, (BATCH,), generator=generator) if labelled else None
    with processes.alone():
        expected = one_step(make().double(), inputs, labels)
    criterion = make(sharded=True) if sharded else make()
    found = one_step(criterion.double(), inputs, labels)
    close(found[0], expected[0], 1e-6 * expected[0].abs())
    largest = max(gradient.abs().max() for gradient in expected[1].values())
    for name, gradient in expected[1].items():
        own = found[1][name]
        if sharded and name == "proxies":
            assert len(own) < len(gradient) or processes.world() == 1
            gradient = gradient[criterion.shard.rows]  # type: ignore[index, union-attr]
        close(own, gradient, 1e-6 * largest)


def one_step(
    criterion: nn.Module, inputs: Tensor, labels: Tensor | None
) -> tuple[Tensor, dict[str, Tensor]]:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = nn.Linear(WIDTH, DIM).to(inputs.dtype)
    wrapped = parallel(model)
    x = gather(wrapped(inputs[processes.share(BATCH)]), BATCH)
    loss = batch_loss(criterion, x, labels)
    loss.backward()
    average_gradients(criterion)
    named = [*model.named_parameters(), *criterion.named_parameters()]
    return loss.detach(), {k: p.grad for k, p in named if p.grad is not None}


def close(a: Tensor, b: Tensor, error: Tensor) -> None:
    assert a.shape == b.shape
    found = (a - b).abs().max() if a.numel() else torch.zeros(())
    assert found <= error + 1e-14, f"{found} off, {error} allowed"


def check_losses() -> None:
    """All of them, as one of several processes; what can't be sharded says so."""
    for name, make, labelled, shards in cases():
        for sharded in (True, False) if shards else (False,):
            try:
                both(make, labelled, sharded=sharded)
            except AssertionError as error:
                raise AssertionError(f"{name}, sharded={sharded}: {error}") from error
        if not shards and name not in INSTANCE_LOSSES:
            with pytest.raises(ValueError, match="no sharded form; leave sharded out"):
                make(sharded=True)


class WithCriterion(nn.Module):
    """Model and criterion as one module, as many scripts wrap them: its buffers are broadcast."""

    def __init__(self, criterion: nn.Module) -> None:
        super().__init__()
        self.model, self.criterion = nn.Linear(WIDTH, DIM), criterion

    def forward(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """Return the loss."""
        loss: Tensor = self.criterion(self.model(inputs), labels)
        return loss


def check_wrapped_criteria() -> None:
    """Each process has its own rows, of its own labels: they agree on proxies, or refuse."""
    generator = torch.Generator().manual_seed(5)
    labels = torch.arange(BATCH) // 2
    inputs = torch.randn(BATCH, WIDTH, generator=generator)
    rows = processes.share(BATCH)
    balanced = ProxyNCA(8, DIM, assignment="balanced", proxies_per_class=0.5, seed=1)
    wrapped = nn.parallel.DistributedDataParallel(WithCriterion(balanced))
    tables = []
    for _ in range(3):
        wrapped(inputs[rows], labels[rows]).backward()
        tables.append(balanced.assignment.proxy_of_label.tolist())
    assert tables[0] == tables[1] == tables[2], "a label keeps its proxy"
    assert sorted(tables[0]) == [0, 0, 1, 1, 2, 2, 3, 3]
    assert {*processes.exchange(str(tables[0]))} == {str(tables[0])}
    with pytest.raises(ValueError, match="the processes have different batches; ProxyAnchor sums"):
        ProxyAnchor(8, DIM, seed=1)(inputs[rows, :DIM], labels[rows])
