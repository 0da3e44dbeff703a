"""The loop: interrupted anywhere and resumed it ends with the same bits; it stops before a NaN.

Before it begins, every check finds its mistake, and none leaves a trace.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_metric_learning import losses as pml
from torch import Tensor, nn

from nofuss.losses import ProxyAnchor, ProxyNCA, StructuredClustering
from nofuss.model.embedder import build_embedder
from nofuss.proxies.assignment import Dynamic
from nofuss.training.callbacks import Control, Event
from nofuss.training.checkpoint import load_checkpoint, module_tensors, optimizer_tensors
from nofuss.training.criterion import build_criterion
from nofuss.training.loop import (
    RAMP,
    SCHEDULES,
    NonFiniteLoss,
    Training,
    rehearse,
    run_loop,
    set_rates,
)
from tests.asked import settings_of
from tests.training.small_training import Items, Pictures, Recorder, make_training

Make = Callable[..., Training]


def bits(t: Training) -> dict[str, Tensor]:
    """Everything that training moved."""
    return (
        module_tensors("model", t.model)
        | module_tensors("criterion", t.criterion)
        | optimizer_tensors(t.optimizer)
    )


def assert_same_bits(a: Training, b: Training) -> None:
    x, y = bits(a), bits(b)
    assert x.keys() == y.keys()
    assert [k for k in x if not torch.equal(x[k], y[k])] == []


def rows(t: Training) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if k != "seconds"} for row in t.history]


class StopAfter:
    """Asks for a stop once so many steps were told."""

    def __init__(self, told: Recorder, steps: int) -> None:
        self.told, self.steps = told, steps

    def __call__(self) -> bool:
        return len(self.told.losses) >= self.steps


def run_in_pieces(make: Make, feed: Any, folder: Path, pieces: list[int]) -> Training:
    """Train, stop after so many steps, and again with everything made anew from the disk."""
    for steps in pieces:
        t, told = make(), Recorder()
        t.resume(folder)
        with pytest.raises(KeyboardInterrupt):
            run_loop(t, feed, Control(told, checkpoints=folder, stop=StopAfter(told, steps)))
    t = make()
    t.resume(folder)
    run_loop(t, feed, Control(checkpoints=folder))
    return t


@pytest.mark.parametrize("name", ["adam", "adamw", "rmsprop"])
@pytest.mark.parametrize("pieces", [[1], [4], [5], [3, 1, 4], [1] * 11], ids=str)
def test_interrupted_equals_uninterrupted(
    name: str, pieces: list[int], tmp_path: Path, feed: Pictures
) -> None:
    """12 steps in three epochs; 4 and 8 are the ends of epochs."""
    whole = make_training(name)
    run_loop(whole, feed)
    broken = run_in_pieces(lambda: make_training(name), feed, tmp_path, pieces)
    assert_same_bits(broken, whole)
    assert rows(broken) == rows(whole)
    assert all("spread" in row for row in broken.history)


def test_dynamic_assignment_resumes_too(tmp_path: Path, feed: Pictures) -> None:
    def make() -> Training:
        criterion = ProxyNCA(5, 4, scale=16, seed=3, assignment=Dynamic(20))
        return make_training(criterion=criterion)

    whole = make()
    run_loop(whole, feed)
    assert_same_bits(run_in_pieces(make, feed, tmp_path, [2, 3, 3]), whole)


def test_the_model_really_is_random(feed: Pictures) -> None:
    """Without the seed of each step the runs would differ: the test above means something."""
    runs = [make_training() for _ in range(2)]
    runs[1].seed += 1
    for t in runs:
        run_loop(t, feed)
    assert rows(runs[0]) != rows(runs[1])


def test_the_callers_random_numbers_are_left_alone(feed: Pictures) -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    run_loop(make_training(), feed)
    assert torch.equal(torch.rand(3), expected)


def test_a_stop_during_validation_is_heeded_at_the_epochs_end(
    tmp_path: Path, feed: Pictures
) -> None:
    asked: list[bool] = []

    def validate() -> dict[str, float]:
        asked.append(True)
        return {}

    t, control = make_training(), Control(checkpoints=tmp_path, stop=lambda: bool(asked))
    with pytest.raises(KeyboardInterrupt):
        run_loop(t, feed, control, validate=validate)
    assert (t.epoch, t.step) == (1, 0)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-4.safetensors"]


def test_checkpoints_by_time_and_by_epoch(
    tmp_path: Path, feed: Pictures, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nofuss.training.loop.CHECKPOINT_SECONDS", 0)
    run_loop(make_training(), feed, Control(checkpoints=tmp_path))
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "step-11.safetensors",
        "step-12.safetensors",
    ]


def test_rows_have_loss_and_scores(feed: Pictures) -> None:
    t, told, modes = make_training(), Recorder(), []

    def validate() -> dict[str, float]:
        modes.append(t.model.training)
        return {"score": 0.5}

    run_loop(t, feed, Control(told), validate=validate)
    assert modes == [False] * 3
    assert [row["epoch"] for row in told.rows] == [1, 2, 3]
    assert all(row["score"] == 0.5 for row in told.rows)
    assert told.rows[0]["loss"] == pytest.approx(sum(told.losses[:4]) / 4)


@pytest.mark.parametrize(
    ("schedule", "factors"),
    [
        ("constant", [1.0] * 12),
        ("cosine", [(1 + math.cos(math.pi * s / 12)) / 2 for s in range(12)]),
    ],
)
def test_rates_follow_the_schedule(schedule: str, factors: list[float], feed: Pictures) -> None:
    t, seen = make_training(schedule=schedule), []

    def tell(event: Event) -> None:
        if event.kind == "step":
            rates = {f"lr/{group['name']}": group["lr"] for group in t.optimizer.param_groups}
            assert rates == {name: x for name, x in event.values.items() if name != "loss"}
            seen.append([*rates.values()])

    run_loop(t, feed, Control(tell))
    bases = (1e-3, 1e-2, 1e-1)
    assert seen == [pytest.approx([base * f for base in bases]) for f in factors]


def test_gamma_of_clustering_decays_by_epochs_also_after_a_stop(
    feed: Pictures, tmp_path: Path
) -> None:
    gammas: list[float] = []

    class Watched(StructuredClustering):
        def _loss(self, x: Tensor, labels: Tensor) -> Tensor:
            gammas.append(self.gamma * self.gamma_decay**self.epoch)
            return super()._loss(x, labels)

    t = make_training(criterion=Watched(gamma_decay=0.94))
    run_loop(t, feed, Control(checkpoints=tmp_path))
    assert gammas == [1.0] * 4 + [0.94] * 4 + [0.94**2] * 4
    resumed = make_training(criterion=Watched(gamma_decay=0.94), epochs=4)
    resumed.resume(tmp_path)
    run_loop(resumed, feed)
    assert gammas[12:] == [0.94**3] * 4


class SpoiltFeed(Pictures):
    """The third batch of the second epoch has a NaN in it."""

    def __call__(self, epoch: int, start: int) -> Iterator[Items]:
        for step, batch in enumerate(super().__call__(epoch, start), start):
            if (epoch, step) == (1, 2):
                batch.inputs[3, 0, 0, 0] = math.nan
            yield batch


def test_nan_loss_stops_before_the_update(tmp_path: Path) -> None:
    t, twin = make_training(), make_training()
    with pytest.raises(NonFiniteLoss, match=r"the loss is nan"):
        run_loop(t, SpoiltFeed(), Control(checkpoints=tmp_path))
    told = Recorder()
    with pytest.raises(KeyboardInterrupt):
        run_loop(twin, Pictures(), Control(told, stop=StopAfter(told, 6)))
    # batch norm's statistics saw the batch; nothing that is learned did
    for a, b in zip(t.model.parameters(), twin.model.parameters(), strict=True):
        assert torch.equal(a, b)
    assert torch.equal(t.criterion.proxies, twin.criterion.proxies)  # type: ignore[arg-type]
    ours, theirs = optimizer_tensors(t.optimizer), optimizer_tensors(twin.optimizer)
    assert all(torch.equal(ours[k], theirs[k]) for k in theirs)
    healthy = load_checkpoint(tmp_path)
    assert healthy is not None
    assert all(x.isfinite().all() for x in healthy.tensors.values())


class InfiniteSlope(nn.Module):
    """Finite loss, infinite gradient: √ at zero."""

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        return (embeddings - embeddings.detach()).abs().sum().sqrt() + 1


def test_nan_gradient_stops_before_the_update(feed: Pictures) -> None:
    t = make_training(criterion=InfiniteSlope())
    before = [p.clone() for p in t.model.parameters()]
    with pytest.raises(NonFiniteLoss, match="gradient"):
        run_loop(t, feed)
    assert all(torch.equal(a, b) for a, b in zip(before, t.model.parameters(), strict=True))
    assert not t.optimizer.state


def test_collapse_is_logged_once(feed: Pictures, caplog: pytest.LogCaptureFixture) -> None:
    t, told = make_training(epochs=2), Recorder()
    head = t.model[-1]  # type: ignore[index]
    with torch.no_grad():
        head.weight.mul_(1e-4)
        head.bias.fill_(1)
    for group in t.optimizer.param_groups:
        group["base_lr"] = 0.0
    run_loop(t, feed, Control(told))
    assert [row["spread"] < 0.01 for row in told.rows] == [True, True]
    (line,) = caplog.messages
    assert "collapsed" in line


def test_a_healthy_training_logs_nothing(feed: Pictures, caplog: pytest.LogCaptureFixture) -> None:
    told = Recorder()
    run_loop(make_training(), feed, Control(told))
    assert caplog.messages == []
    assert all(0.01 < row["spread"] <= 1 for row in told.rows)


def test_proxies_in_use_are_counted(feed: Pictures) -> None:
    criterion = ProxyNCA(5, 4, scale=16, seed=3, assignment="dynamic")
    t, told = make_training(criterion=criterion), Recorder()
    run_loop(t, feed, Control(told))
    assert all(0 < row["proxies_in_use"] <= 1 for row in told.rows)


@pytest.mark.parametrize(
    "criterion",
    [
        lambda: pml.ProxyNCALoss(5, 4),
        lambda: pml.ProxyAnchorLoss(5, 4),
        lambda: pml.NormalizedSoftmaxLoss(5, 4),
        lambda: pml.TripletMarginLoss(),
        lambda: pml.ContrastiveLoss(),
    ],
)
def test_losses_of_pytorch_metric_learning_run_here(
    criterion: Callable[[], nn.Module], tmp_path: Path
) -> None:
    """And resume, as ours do: their proxies are parameters too."""

    def make() -> Training:
        with torch.random.fork_rng():
            torch.manual_seed(1)
            return make_training(criterion=criterion())

    feed, whole = Pictures(), make()
    first = [p.clone() for p in whole.criterion.parameters()]
    run_loop(whole, feed)
    moved = zip(first, whole.criterion.parameters(), strict=True)
    assert not any(torch.equal(a, b) for a, b in moved)
    assert_same_bits(run_in_pieces(make, feed, tmp_path, [3]), whole)


class Thirds(Pictures):
    """Triplets without labels."""

    def __call__(self, epoch: int, start: int) -> Iterator[Items]:
        for batch in super().__call__(epoch, start):
            yield Items(batch.inputs[:6], None, batch.indices[:6])


def test_bare_triplets(tmp_path: Path) -> None:
    def make() -> Training:
        return make_training(
            criterion=ProxyNCA(10, 4, scale=16, seed=3, assignment="dynamic"), epochs=2
        )

    whole = make()
    first = whole.criterion.proxies.clone()  # type: ignore[operator]
    run_loop(whole, Thirds())
    assert not torch.equal(first, whole.criterion.proxies)  # type: ignore[arg-type]
    assert_same_bits(run_in_pieces(make, Thirds(), tmp_path, [3]), whole)


# Before the first step


def first_batch() -> Items:
    return next(iter(Pictures()(0, 0)))


@pytest.mark.parametrize("name", ["adam", "adamw", "rmsprop"])
def test_everything_is_left_as_it_was(name: str, caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(3)
    t = make_training(name)
    before = {k: v.clone() for k, v in bits(t).items()}
    random = torch.get_rng_state()
    rehearse(t, first_batch())
    after = bits(t)
    assert before.keys() == after.keys(), "the optimizer has no state yet"
    assert all(torch.equal(before[k], after[k]) for k in before)
    assert torch.equal(torch.get_rng_state(), random)
    assert all(p.grad is None for p in t.model.parameters())
    assert caplog.messages == []


def test_a_loss_that_does_not_fall_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    rehearse(make_training(criterion=Uphill()), first_batch())
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
        rehearse(make_training(), batch)


@pytest.mark.parametrize("make", [ProxyNCA, ProxyAnchor])
def test_the_rehearsal_is_what_training_would_do(make: Callable[..., nn.Module]) -> None:
    """Against five plain steps on the things themselves; no randomness in this model."""
    torch.manual_seed(0)
    model, criterion, batch = nn.Linear(6, 4), make(5, 4, seed=0), first_batch()
    batch = batch._replace(inputs=batch.inputs.flatten(1)[:, :6])
    parts: Any = {"backbone": (), "head": model.parameters()}
    settings = replace(settings_of(epochs=1, optimizer="rmsprop"), head_lr=1e-2, proxy_lr=1e-2)
    t = Training.of(settings, model, criterion, **parts)
    found = rehearse(t, batch)
    losses = []
    for _ in range(5):
        t.optimizer.zero_grad()
        loss = criterion(model(batch.inputs), batch.labels)
        losses.append(loss.item())
        loss.backward()
        t.optimizer.step()
    assert found == (losses[0], losses[-1])


# Rates


@pytest.mark.parametrize(
    ("name", "kind"),
    [("adam", torch.optim.Adam), ("adamw", torch.optim.AdamW), ("rmsprop", torch.optim.RMSprop)],
)
def test_groups_have_rates_of_their_own_and_proxies_do_not_decay(name: Any, kind: type) -> None:
    rates = {"lr": 1e-4, "head_lr": 1e-3, "proxy_lr": 1e-2}
    settings = replace(settings_of(epochs=1), optimizer=name, weight_decay=0.1, seed=9, **rates)
    embedder = build_embedder("convnet", dim=4, channels=1)
    parts = {"backbone": embedder.backbone_parameters(), "head": embedder.head.parameters()}
    t = Training.of(settings, embedder, build_criterion(settings, 6, 4), **parts)
    groups = t.optimizer.param_groups
    assert type(t.optimizer) is kind
    assert [(g["name"], g["lr"], g["weight_decay"]) for g in groups] == [
        ("backbone", 1e-4, 0.1),
        ("head", 1e-3, 0.1),
        ("proxies", 1e-2, 0.0),
    ]
    assert (t.epochs, t.seed, t.schedule, t.epoch, t.step) == (1, 9, "cosine", 0, 0)
    held = {id(p) for g in groups for p in g["params"]}
    assert held == {id(p) for m in (embedder, t.criterion) for p in m.parameters()}


def test_there_is_no_group_without_parameters() -> None:
    head, settings = nn.Linear(7, 4), settings_of(epochs=1, loss="triplet")
    criterion = build_criterion(settings, 6, 4)
    t = Training.of(settings, head, criterion, backbone=(), head=head.parameters())
    assert [g["name"] for g in t.optimizer.param_groups] == ["head"]


def test_the_cosine_is_torchs_own() -> None:
    """Epoch by epoch as torch's scheduler steps it."""
    optimizer, reference = make_training().optimizer, make_training().optimizer
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(reference, 10)
    for epoch in range(11):
        set_rates(optimizer, "cosine", epoch, 10)
        ours = [g["lr"] for g in optimizer.param_groups]
        expected = [g["lr"] for g in reference.param_groups]
        assert ours == pytest.approx(expected, rel=1e-9, abs=1e-12)
        reference.step()
        scheduler.step()


def test_a_ramp_rises_to_the_cosine_and_no_schedule_rises_after_it() -> None:
    factors = [SCHEDULES["ramp"](e / 30, 5) for e in range(11)]
    assert all(0 < a < b <= 1 for a, b in pairwise(factors))
    assert factors[0] < 0.05
    for epoch in (RAMP, 1.0, 4.9):
        assert SCHEDULES["ramp"](epoch, 5) == SCHEDULES["cosine"](epoch, 5)
    for schedule in SCHEDULES.values():
        factors = [schedule(e / 7, 5) for e in range(3, 36)]
        assert all(0 <= b <= a <= 1 for a, b in pairwise(factors))
