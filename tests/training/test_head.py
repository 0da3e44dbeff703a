"""A head's schedule follows from the number of steps; trained maps compose with their start."""

import pytest
import torch

from nofuss.config import TrainConfig
from nofuss.geometry import normalize
from nofuss.model.start import Affine
from nofuss.training.head import MOVE, PROXY_FACTOR, composed, head_schedule, prepare_head
from nofuss.training.loop import run_loop
from nofuss.training.presets import resolve


def config(**options: object) -> TrainConfig:
    return resolve(TrainConfig(**{"dim": 64, **options}), kind="vectors", small=False)  # type: ignore[arg-type]


@pytest.mark.parametrize("items", [100, 800, 5864, 80_000, 1_000_000])
def test_rate_times_steps_is_the_same_for_any_number_of_items(items: int) -> None:
    found = head_schedule(config(), items, 50)
    assert found.epochs is not None
    assert found.head_lr is not None
    assert found.proxy_lr == PROXY_FACTOR * found.head_lr
    steps = found.epochs * max(1, items // min(128, items))
    assert found.head_lr * steps * 64**0.5 == pytest.approx(MOVE)
    assert found.epochs >= 1
    assert steps <= 3500 or found.epochs == 1


def test_what_the_user_says_stays() -> None:
    found = head_schedule(config(epochs=3, head_lr=0.5, proxy_lr=0.25), 1000, 10)
    assert (found.epochs, found.head_lr, found.proxy_lr) == (3, 0.5, 0.25)


def test_training_starts_at_the_closed_form_and_composes_with_it() -> None:
    g = torch.Generator().manual_seed(0)
    labels = torch.arange(12).repeat_interleave(10)
    inputs = torch.randn(12, 6, generator=g)[labels] + torch.randn(120, 6, generator=g)
    training, feed = prepare_head(config(), inputs, labels, device=torch.device("cpu"))
    start = Affine(torch.randn(6, 9, generator=g), torch.randn(6, generator=g))
    same = composed(training.model, start)
    assert torch.equal(same.weight, start.weight)
    assert torch.equal(same.bias, start.bias)
    means = torch.stack([normalize(inputs[labels == c]).mean(0) for c in range(12)])
    torch.testing.assert_close(
        training.criterion.proxies.detach(), normalize(means), rtol=0, atol=1e-6
    )
    run_loop(training, feed)
    x = torch.randn(5, 9, generator=g)
    with torch.no_grad():
        torch.testing.assert_close(
            composed(training.model, start)(x), training.model(start(x)), rtol=1e-4, atol=1e-4
        )
    assert training.history[-1]["loss"] < training.history[0]["loss"]
