"""Checks before training: each catches its mistake, and none leaves a trace."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from nofuss.errors import TrainingError
from nofuss.losses import ProxyAnchor, ProxyNCA
from nofuss.training.checkpoint import module_tensors, optimizer_tensors
from nofuss.training.checks import check_before_training, check_scale, loss_on_one_batch
from nofuss.training.loop import Training
from nofuss.training.step import NonFiniteLoss
from tests.training.small_training import Items, Pictures, make_training


def first_batch() -> Items:
    return next(iter(Pictures()(0, 0)))


def check(t: Training, batch: Items | None = None) -> None:
    check_before_training(t.model, t.criterion, t.optimizer, batch or first_batch())


def test_a_sound_training_passes_in_silence(caplog: pytest.LogCaptureFixture) -> None:
    check(make_training())
    assert caplog.messages == []


@pytest.mark.parametrize("name", ["adam", "adamw", "rmsprop"])
def test_everything_is_left_as_it_was(name: str) -> None:
    torch.manual_seed(3)
    t = make_training(name)
    before = {
        k: v.clone()
        for k, v in (module_tensors("m", t.model) | module_tensors("c", t.criterion)).items()
    }
    rates = [group["lr"] for group in t.optimizer.param_groups]
    random = torch.get_rng_state()
    check(t)
    after = module_tensors("m", t.model) | module_tensors("c", t.criterion)
    assert all(torch.equal(before[k], after[k]) for k in before)
    assert not optimizer_tensors(t.optimizer)
    assert [group["lr"] for group in t.optimizer.param_groups] == rates
    assert torch.equal(torch.get_rng_state(), random)
    assert all(p.grad is None for p in t.model.parameters())


def test_proxies_forgotten_in_the_optimizer() -> None:
    t = make_training()
    t.optimizer = torch.optim.Adam(t.model.parameters())
    with pytest.raises(TrainingError, match="proxies of ProxyNCA would never be trained"):
        check(t)


def test_labels_beyond_the_proxies() -> None:
    batch = first_batch()
    assert batch.labels is not None
    with pytest.raises(TrainingError, match="labels reach 5 but the criterion has 5 classes"):
        check(make_training(), batch._replace(labels=batch.labels.clamp(min=3) + 1))


@pytest.mark.parametrize(("scale", "lines"), [(1.0, 1), (8.0, 0), (32.0, 0), (500.0, 1)])
def test_scale(scale: float, lines: int, caplog: pytest.LogCaptureFixture) -> None:
    check_scale(ProxyNCA(5, 4, scale=scale))
    assert len(caplog.messages) == lines


def test_free_norms_have_no_scale_to_check(caplog: pytest.LogCaptureFixture) -> None:
    check_scale(ProxyNCA(5, 4, scale=None))
    assert caplog.messages == []


def test_a_loss_that_does_not_fall_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    check(make_training(criterion=Uphill()))
    (line,) = caplog.messages
    assert "does not fall" in line


class Uphill(nn.Module):
    """A loss whose gradient points the wrong way."""

    def forward(self, embeddings: Any, labels: Any) -> Any:
        value = embeddings.square().sum()
        return 2 * value.detach() - value


def test_nan_is_found_before_training() -> None:
    batch = first_batch()
    batch.inputs[0] = float("nan")
    with pytest.raises(NonFiniteLoss):
        check(make_training(), batch)


@pytest.mark.parametrize("make", [ProxyNCA, ProxyAnchor])
def test_the_rehearsal_is_what_training_would_do(make: Callable[..., nn.Module]) -> None:
    """Against five plain steps on the things themselves; no randomness in this model."""
    torch.manual_seed(0)
    model, criterion, batch = nn.Linear(6, 4), make(5, 4, seed=0), first_batch()
    batch = batch._replace(inputs=batch.inputs.flatten(1)[:, :6])
    parameters = [*model.parameters(), *criterion.parameters()]
    optimizer = torch.optim.RMSprop(parameters, lr=1e-2)
    found = loss_on_one_batch(model, criterion, optimizer, batch, repeats=5)
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        loss = criterion(model(batch.inputs), batch.labels)
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
    assert found == (losses[0], losses[-1])
