"""Callbacks: what they are told, in which order, also after a resume; Ctrl-C; TensorBoard."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import nofuss
from nofuss.training.callbacks import Event, flat_numbers
from tests.tiny_run import write_pictures

SMALL = {"preset": "small", "dim": 8, "size": 24, "batch_size": 8}


@pytest.mark.slow
def test_a_callback_hears_everything_in_order(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """And from Python nothing is printed."""
    data, events = write_pictures(tmp_path / "data"), list[Event]()
    run = nofuss.train(data, out=tmp_path / "run", epochs=2, callback=events.append, **SMALL)
    assert capfd.readouterr() == ("", "")
    told, events = events, [event for event in events if event.kind != "progress"]
    kinds = [event.kind for event in events]
    steps = kinds.count("step") // 2
    assert kinds == ["start", *(["step"] * steps + ["epoch"]) * 2, "end"]
    assert [e.step for e in events if e.kind == "step"] == [*range(1, 2 * steps + 1)]
    assert events[0].values["epochs"] == 2
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [dict(e.values) for e in events if e.kind == "epoch"] == rows
    losses = [e.values["loss"] for e in events if e.kind == "step"]
    assert np.mean(losses[:steps]) == pytest.approx(rows[0]["loss"])
    scores = json.loads((run / "scores.json").read_text())
    assert events[-1].values["recall@1"] == scores["recall@1"]
    assert {e.run for e in events} == {run}
    assert {"lr/head", "lr/proxies"} <= events[1].values.keys()
    works = [event.values for event in told if event.kind == "progress"]
    assert {"checking files", "training, 2 epochs", "writing the report"} <= {
        work["what"] for work in works
    }
    training = [work["done"] for work in works if work["what"] == "training, 2 epochs"]
    assert training == sorted(training)
    assert (training[0], training[-1]) == (0, 2 * steps)
    assert {event.run for event in told} == {None, run}  # files are checked before it is made


PROGRAM = """
import signal, sys, time
from nofuss.training.callbacks import stop_on_signals

signal.signal(signal.SIGINT, signal.default_int_handler)  # also where nohup has it ignored
with stop_on_signals() as stop:
    print("begun", flush=True)
    while not stop():
        time.sleep(0.01)
    print("asked", flush=True)
    if "twice" in sys.argv:
        time.sleep(600)
try:
    print("saved", flush=True)
    time.sleep(600 if "later" in sys.argv else 0)
except KeyboardInterrupt:
    print("Ctrl-C as before")
"""


def ask(number: signal.Signals, *words: str) -> tuple[int, list[str]]:
    """Send a signal to a program that trains, and another one as the words say."""
    command = [sys.executable, "-c", PROGRAM, *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        process.send_signal(number)
        assert process.stdout.readline() == "asked\n"
        if "twice" in words:
            process.send_signal(number)
        if "later" in words:
            assert process.stdout.readline() == "saved\n"
            process.send_signal(number)
        said = process.stdout.read().splitlines()
    return process.returncode, said


@pytest.mark.slow
def test_the_first_signal_asks_and_the_second_ends_at_once() -> None:
    assert ask(signal.SIGTERM) == (0, ["saved"])
    assert ask(signal.SIGINT, "twice") == (130, [])


@pytest.mark.slow
def test_afterwards_signals_are_as_before() -> None:
    assert ask(signal.SIGINT, "later") == (0, ["Ctrl-C as before"])


def test_numbers_of_nested_scores() -> None:
    scores = {"recall@1": 0.5, "gain": {"over": "PCA", "recall@1": [0.1, 0.0, 0.2]}, "folds": True}
    assert flat_numbers(scores | {"baselines": {"PCA": {"nmi": 1}}}) == {
        "recall@1": 0.5,
        "baselines/PCA/nmi": 1.0,
    }


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(folder)).Reload()
    return {tag: [(e.step, e.value) for e in read.Scalars(tag)] for tag in read.Tags()["scalars"]}


@pytest.mark.slow
def test_a_resumed_run_continues_its_curves(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="needs pip install 'nofuss[tensorboard]'")
    data, board = write_pictures(tmp_path / "data"), tmp_path / "board"

    def stop(event: Event) -> None:
        if event.kind == "step" and event.epoch == 1:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        nofuss.train(
            data, out=tmp_path / "run", epochs=3, tensorboard=board, callback=stop, **SMALL
        )
    run = nofuss.train(data, out=tmp_path / "run", resume=True, tensorboard=str(board))
    found = scalars(board / "run")
    steps = [step for step, _ in found["step/loss"]]
    assert steps == [*range(1, len(steps) + 1)]
    each = len(steps) // 3
    assert [step for step, _ in found["epoch/loss"]] == [each, 2 * each, 3 * each]
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [value for _, value in found["epoch/loss"]] == pytest.approx([r["loss"] for r in rows])
    scores = json.loads((run / "scores.json").read_text())
    assert found["scores/recall_at_1"][0][1] == pytest.approx(scores["recall@1"])
