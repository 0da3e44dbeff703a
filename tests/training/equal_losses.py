"""Every loss of several processes beside that of one, in double precision.

Each process first computes loss and gradients alone, with all proxies and the whole batch, then
with the others: its rows of the batch through a model under DistributedDataParallel, its rows of
the proxies. Both must agree to 1e-6 of the largest gradient.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from nofuss.distributed import processes
from nofuss.distributed.collectives import gather
from nofuss.losses import INSTANCE_LOSSES, ProxyAnchor, ProxyNCA, ProxyNCAPlusPlus, ProxyTriplet
from nofuss.losses.proxy_loss import ProxyLoss
from nofuss.training.parallel import average_gradients, parallel
from nofuss.training.step import batch_loss

BATCH, WIDTH, DIM = 15, 6, 5
Make = Callable[..., nn.Module]


def sharded_cases() -> Iterator[tuple[str, Make, bool]]:
    """Name, how to make it, whether it is asked with labels."""
    for classes in (7, 12):  # which two, three and four processes can't share evenly, and can
        for loss in (ProxyNCA, ProxyNCAPlusPlus, ProxyTriplet, ProxyAnchor):
            for name, options in {
                "static": {},
                "static, plain": {"fused": False},
                "static, fused": {"fused": True},
                "fractional": {"proxies_per_class": 0.6},
                "several": {"proxies_per_class": 2.5},
                "free norms": {"scale": None},
                "very large scale": {"scale": 2000.0},
                "dynamic": {"assignment": "dynamic"},
                "balanced": {"assignment": "balanced", "proxies_per_class": 0.7},
                "given proxies": {"proxies": torch.arange(7.0 * DIM).view(7, DIM).cos()},
            }.items():
                if classes == 12 and name != "static":
                    continue
                if loss is ProxyAnchor and name in ("free norms", "dynamic"):
                    continue
                if loss is ProxyNCAPlusPlus and "scale" in options:
                    continue
                yield f"{loss.__name__} {name} {classes}", maker(loss, classes, options), True
    for loss in (ProxyNCA, ProxyTriplet):
        yield f"{loss.__name__} triplets", maker(loss, 9, {"assignment": "dynamic"}), False


def maker(loss: type[ProxyLoss], classes: int, options: dict[str, Any]) -> Make:
    return lambda **more: loss(classes, DIM, seed=1, **options, **more).double()


def both(make: Make, labelled: bool, *, sharded: bool) -> None:
    """Loss, gradients of the model and of the proxies: alone and together."""
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(BATCH, WIDTH, generator=generator, dtype=torch.float64)
    labels = torch.randint(7, (BATCH,), generator=generator) if labelled else None
    with processes.alone():
        expected = one_step(make(), inputs, labels)
    found = one_step(make(sharded=True) if sharded else make(), inputs, labels)
    criterion = found[1]
    assert isinstance(criterion, ProxyLoss) or not sharded
    close(found[0], expected[0])
    for name, gradient in expected[2].items():
        own = found[2][name]
        if sharded and name == "proxies":
            assert len(own) < len(gradient) or processes.world() == 1
            gradient = gradient[criterion.shard.rows]  # type: ignore[index, union-attr]
        close(own, gradient)


def one_step(
    criterion: nn.Module, inputs: Tensor, labels: Tensor | None
) -> tuple[Tensor, nn.Module, dict[str, Tensor]]:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = nn.Linear(WIDTH, DIM).double()
    wrapped = parallel(model)
    x = gather(wrapped(inputs[processes.share(BATCH)]), BATCH)
    loss = batch_loss(criterion, x, labels)
    loss.backward()
    if getattr(criterion, "shard", None) is None:
        average_gradients(criterion.parameters())
    named = [*model.named_parameters(), *criterion.named_parameters()]
    return loss.detach(), criterion, {k: p.grad for k, p in named if p.grad is not None}


def close(a: Tensor, b: Tensor) -> None:
    assert a.shape == b.shape
    error = (a - b).abs().max() if a.numel() else torch.zeros(())
    assert error <= 1e-6 * b.abs().max() + 1e-14, f"{error} off {b.abs().max()}"


def check_losses() -> None:
    """All of them, as one of several processes."""
    for name, make, labelled in sharded_cases():
        for sharded in (True, False):
            try:
                both(make, labelled, sharded=sharded)
            except AssertionError as error:
                raise AssertionError(f"{name}, sharded={sharded}: {error}") from error
    for loss in INSTANCE_LOSSES.values():
        both(loss, True, sharded=False)
