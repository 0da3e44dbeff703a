"""Whole trainings of several processes beside those of one: weights and checkpoints.

In double precision, so that what is asked is the mathematics: weights after three epochs of Adam
agree to 1e-6 of the largest. Batch norm is frozen, and nothing is dropped at random: both depend on
how many rows a process has.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from nofuss.distributed import processes
from nofuss.errors import DataError
from nofuss.losses import ProxyAnchor, ProxyNCA, SemiHardTriplet
from nofuss.proxies.assignment import Balanced, Dynamic
from nofuss.training.callbacks import Control
from nofuss.training.checkpoint import (
    Checkpoint,
    load_checkpoint,
    module_tensors,
    optimizer_tensors,
)
from nofuss.training.loop import Training, rehearse, run_loop
from tests.training.small_training import Items, Pictures, Recorder, make_training


class Shares(Pictures):
    """The same pictures in double precision, each process its share."""

    def __call__(self, epoch: int, start: int) -> Iterator[Items]:
        for inputs, labels, indices in super().__call__(epoch, start):
            own = inputs[processes.share(len(inputs))].double()
            yield Items(own, labels, indices)


FEED = Shares(batch=9)  # three share it evenly, two and four do not


class Frozen(torch.nn.Module):
    """The small network, whose batch norm keeps its statistics; nothing in it is random."""

    def __init__(self, network: torch.nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        self.network.eval()
        found: Tensor = self.network(x)
        return found


def make(kind: str, *, sharded: bool) -> Training:
    """A training of a network with frozen batch norm."""
    more = {"sharded": True} if sharded else {}
    criterion = {
        "static": lambda: ProxyNCA(7, 4, scale=16, seed=3, **more),
        "anchor": lambda: ProxyAnchor(5, 4, scale=16, seed=3, **more),
        "dynamic": lambda: ProxyNCA(5, 4, scale=16, seed=3, assignment=Dynamic(9)),
        "balanced": lambda: ProxyNCA(9, 4, scale=16, seed=3, assignment=Balanced(9, 5)),
        "pairs": SemiHardTriplet,
    }[kind]()
    t = make_training(criterion=criterion.double())
    t.model = Frozen(t.model.double())
    return t


def weights(t: Training) -> dict[str, Tensor]:
    """All that training moved."""
    return (
        module_tensors("model", t.model)
        | module_tensors("criterion", t.criterion)
        | optimizer_tensors(t.optimizer)
    )


def check_training() -> None:
    """Weights and moments after three epochs, replicated and sharded; the check before them."""
    for kind, sharded in (
        ("static", True),
        ("static", False),
        ("anchor", True),
        ("dynamic", False),
        ("balanced", False),
        ("pairs", False),
    ):
        with processes.alone():
            expected = make(kind, sharded=False)
            run_loop(expected, FEED)
        t = make(kind, sharded=sharded)
        run_loop(t, FEED)
        assert [row["loss"] for row in t.history] == pytest.approx(
            [row["loss"] for row in expected.history], rel=1e-9
        )
        compare(t, weights(expected), rel=1e-6)
    t = make("static", sharded=True)
    batch = next(iter(FEED(0, 0)))
    found = rehearse(t, batch, repeats=3)
    with processes.alone():
        t = make("static", sharded=False)
        batch = next(iter(FEED(0, 0)))
        expected_losses = rehearse(t, batch, repeats=3)
    assert found == pytest.approx(expected_losses, rel=1e-9)


def compare(t: Training, whole: dict[str, Tensor], *, rel: float) -> None:
    """Own rows beside those rows of the whole."""
    ours, sharded = weights(t), t.sharded
    assert ours.keys() == whole.keys()
    for name, tensor in ours.items():
        wanted = whole[name]
        if sharded and sharded.has(name, tensor.ndim):
            wanted = wanted[sharded.shard.rows]
            assert len(tensor) < sharded.shard.total or processes.world() == 1
        assert tensor.shape == wanted.shape, name
        error = (tensor.double() - wanted.double()).abs().max()
        assert error <= rel * wanted.double().abs().max(), f"{name}: {error}"


def write_checkpoint(folder: Path) -> None:
    """Two epochs of three, then the whole state of it as one process would have it."""
    t, told = make("static", sharded=True), Recorder()
    with pytest.raises(KeyboardInterrupt):
        run_loop(t, FEED, Control(told, checkpoints=folder, stop=lambda: len(told.losses) >= 8))


def read_checkpoint(folder: Path, expected: Path) -> None:
    """Go on from what other processes wrote: bit for bit what they had, and the same end."""
    t = make("static", sharded=processes.world() > 1)
    with processes.alone():
        whole = load_checkpoint(folder)
        end = load_checkpoint(expected)
    assert isinstance(whole, Checkpoint)
    assert isinstance(end, Checkpoint)
    assert len(whole.tensors["criterion.proxies"]) == 7
    assert t.resume(folder)
    compare(t, whole.tensors, rel=0)
    run_loop(t, FEED)
    compare(t, end.tensors, rel=1e-6)


def write_the_end(folder: Path) -> None:
    """Three epochs at a stretch in one process."""
    run_loop(make("static", sharded=False), FEED, Control(checkpoints=folder))


def check_batch_norm() -> None:
    """Statistics are of a process's rows, and those of the first are all processes' in the end."""
    t = make_training()
    t.model.double()
    t.criterion.double()
    run_loop(t, FEED)
    for name, tensor in module_tensors("model", t.model).items():
        expected = tensor.clone()
        processes.copy_from_first([expected])
        assert torch.equal(tensor, expected), name


def check_words() -> None:
    """Texts of all, the first one's work, and a difference that is refused."""
    me = f"née {processes.rank()}" * (1 + processes.rank())
    texts = processes.exchange(me)
    assert texts[processes.rank()] == me
    assert len(texts) == processes.world()
    assert processes.from_first(lambda: f"rank {processes.rank()}") == "rank 0"
    assert processes.any_true(processes.rank() == processes.world() - 1, False) == (True, False)
    processes.check_same("data", lambda: "same")
    if processes.world() > 1:
        with pytest.raises(ValueError, match="rank 1 has other data"):
            processes.check_same("data", lambda: str(min(1, processes.rank())))
    with processes.in_turn():
        assert processes.world() == 1
    number = processes.rank()
    assert processes.leave() == (number == 0)
    assert (processes.world(), processes.rank()) == (1, number)
    assert processes.any_true(number == 0) == (number == 0,)


def check_failure() -> None:
    """If the first process fails or is stopped, all end with its exit code."""

    def fail(error: BaseException) -> str:
        raise error

    for error, code in ((DataError("bad"), 2), (ValueError("bad"), 1), (KeyboardInterrupt(), 130)):
        wanted = type(error) if processes.first() else SystemExit
        with pytest.raises(wanted) as caught:
            processes.from_first(lambda error=error: fail(error))
        if not processes.first():
            assert caught.value.code == code
