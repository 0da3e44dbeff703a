"""Whole trainings of several processes beside those of one: weights, checkpoints, scores.

In double precision, so that what is asked is the mathematics: weights after three epochs of Adam
agree to 1e-6 of the largest.
"""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from nofuss.distributed import processes
from nofuss.evaluate import row_maxima
from nofuss.evaluate.kmeans import kmeans
from nofuss.evaluate.precision import precisions
from nofuss.evaluate.recall import ranks_of_first_positive
from nofuss.losses import ProxyAnchor, ProxyNCA, SemiHardTriplet
from nofuss.proxies.assignment import Dynamic
from nofuss.proxies.balanced import Balanced
from nofuss.training.checkpoint import (
    Checkpoint,
    load_checkpoint,
    module_tensors,
    optimizer_tensors,
)
from nofuss.training.checks import loss_on_one_batch
from nofuss.training.loop import Interrupted, Training, run_loop
from tests.training.small_training import Items, Pictures, Recorder, make_training


class Shares(Pictures):
    """The same pictures in double precision, each process its share."""

    def __call__(self, epoch: int, start: int) -> Iterator[Items]:
        for inputs, labels, indices in super().__call__(epoch, start):
            own = inputs[processes.share(len(inputs))].double()
            yield Items(own, labels, indices)


FEED = Shares(batch=9)  # three share it evenly, two and four do not


def make(kind: str, *, sharded: bool) -> Training:
    """A training with batch norm and random numbers in it."""
    more = {"sharded": True} if sharded else {}
    criterion = {
        "static": lambda: ProxyNCA(7, 4, scale=16, seed=3, **more),
        "anchor": lambda: ProxyAnchor(5, 4, scale=16, seed=3, **more),
        "dynamic": lambda: ProxyNCA(5, 4, scale=16, seed=3, assignment=Dynamic(9), **more),
        "balanced": lambda: ProxyNCA(9, 4, scale=16, seed=3, assignment=Balanced(9, 5), **more),
        "pairs": SemiHardTriplet,
    }[kind]()
    t = make_training(criterion=criterion.double())
    t.model.double()
    return t


def weights(t: Training) -> dict[str, Tensor]:
    """All that training moved."""
    return (
        module_tensors("model", t.model)
        | module_tensors("criterion", t.criterion)
        | optimizer_tensors(t.optimizer)
    )


def check_training() -> None:
    """Weights and moments after three epochs, replicated and dealt out; the check before them."""
    for kind, sharded in (
        ("static", True),
        ("static", False),
        ("anchor", True),
        ("dynamic", True),
        ("balanced", True),
        ("balanced", False),
        ("pairs", False),
    ):
        with processes.alone():
            expected = make(kind, sharded=False)
            run_loop(expected, FEED, watch=Recorder())
        t = make(kind, sharded=sharded)
        run_loop(t, FEED, watch=Recorder())
        assert [row["loss"] for row in t.history] == pytest.approx(
            [row["loss"] for row in expected.history], rel=1e-9
        )
        compare(t, weights(expected), rel=1e-6)
        assert isinstance(t.model[1], torch.nn.BatchNorm2d)  # type: ignore[index]
    t = make("static", sharded=True)
    batch = next(iter(FEED(0, 0)))
    found = loss_on_one_batch(t.model, t.criterion, t.optimizer, batch, repeats=3)
    with processes.alone():
        t = make("static", sharded=False)
        batch = next(iter(FEED(0, 0)))
        expected_losses = loss_on_one_batch(t.model, t.criterion, t.optimizer, batch, repeats=3)
    assert found == pytest.approx(expected_losses, rel=1e-9)


def compare(t: Training, whole: dict[str, Tensor], *, rel: float) -> None:
    """Own rows beside those rows of the whole."""
    ours, cut = weights(t), t.cut
    parts = cut.parts(ours) if cut else {}
    assert ours.keys() == whole.keys()
    assert bool(parts) == (cut is not None)
    for name, tensor in ours.items():
        wanted = whole[name]
        if cut and name in parts:
            wanted = wanted[cut.shard.rows]
        assert tensor.shape == wanted.shape, name
        error = (tensor.double() - wanted.double()).abs().max()
        assert error <= rel * wanted.double().abs().max(), f"{name}: {error}"


def write_checkpoint(folder: Path) -> None:
    """Two epochs of three, then the whole state of it as one process would have it."""
    t, watch = make("static", sharded=True), Recorder()
    with pytest.raises(Interrupted):
        run_loop(t, FEED, watch=watch, checkpoints=folder, stop=lambda: len(watch.losses) >= 8)


def read_checkpoint(folder: Path, expected: Path) -> None:
    """Go on from what other processes wrote: bit for bit what they had, and the same end."""
    t = make("static", sharded=processes.world() > 1)
    with processes.alone():
        whole = load_checkpoint(folder, say=pytest.fail)
        end = load_checkpoint(expected, say=pytest.fail)
    assert isinstance(whole, Checkpoint)
    assert isinstance(end, Checkpoint)
    assert len(whole.tensors["criterion.proxies"]) == 7
    own = load_checkpoint(folder, say=pytest.fail, cut=t.cut)
    assert own is not None
    t.restore(own)
    compare(t, whole.tensors, rel=0)
    run_loop(t, FEED, watch=Recorder())
    compare(t, end.tensors, rel=1e-6)


def write_the_end(folder: Path) -> None:
    """Three epochs at a stretch in one process."""
    run_loop(make("static", sharded=False), FEED, watch=Recorder(), checkpoints=folder)


def check_scores() -> None:
    """Ranks, precisions and clusters are the same, bit for bit."""
    row_maxima.SPREAD = 0  # so that few clusters are shared too
    generator = torch.Generator().manual_seed(2)
    labels = torch.randint(40, (1300,), generator=generator)
    centres = torch.randn(40, 6, generator=generator)
    x = centres[labels] + torch.randn(1300, 6, generator=generator)

    def scores() -> list[Tensor]:
        return [
            ranks_of_first_positive(x, labels),
            *precisions(x, labels)[:2],
            *kmeans(x, 40, seed=0),
            *kmeans(x, 200, seed=0, refine=False),
        ]

    with processes.alone():
        expected = scores()
    for found, wanted in zip(scores(), expected, strict=True):
        assert torch.equal(found.nan_to_num(), wanted.nan_to_num())


def check_words() -> None:
    """Texts of all, the first one's work, and a difference that is refused."""
    me = f"née {processes.rank()}" * (1 + processes.rank())
    texts = processes.exchange(me)
    assert texts[processes.rank()] == me
    assert len(texts) == processes.world()
    assert processes.on_first(lambda: f"rank {processes.rank()}") == "rank 0"
    assert processes.any_true(processes.rank() == processes.world() - 1, False) == (True, False)
    processes.check_same("data", lambda: "same")
    if processes.world() > 1:
        with pytest.raises(ValueError, match="rank 1 has other data"):
            processes.check_same("data", lambda: str(min(1, processes.rank())))
    with tempfile.TemporaryDirectory() as folder, processes.in_turn():
        assert processes.world() == 1
        assert Path(folder).is_dir()
