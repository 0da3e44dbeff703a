"""`torchrun … -m nofuss train`, with two real processes that are killed, hang or are stopped."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from nofuss.model.saved import model_files
from tests.training.together import HERE, end, environment, start, torchrun, wait_for, workers

PROGRAM = str(HERE / "sharded_cli.py")
pytestmark = pytest.mark.torchrun
linux = pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's /proc")
QUICK_STEPS = ("--batch-size", "8", "--dim", "8")
HALF = ("--test-fraction", "0.5")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Vectors around a centre a class; 13 classes to train on, which two can't share evenly."""
    random = np.random.default_rng(0)
    labels = np.repeat(np.arange(26), 6)
    vectors = random.normal(size=(26, 16))[labels] + 0.5 * random.normal(size=(len(labels), 16))
    file = tmp_path_factory.mktemp("data") / "vectors.npz"
    np.savez(file, vectors=vectors.astype(np.float32), labels=labels)
    return file


def train_command(
    data: Path, run: Path, split: tuple[str, str] = HALF, epochs: int = 30
) -> list[str]:
    return ["train", str(data), "--out", str(run), "--epochs", str(epochs), *QUICK_STEPS, *split]


def run_to_the_end(command: list[str], folder: Path, **env: str) -> str:
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment(NOFUSS_CACHE=str(folder / "cache"), **env),
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def whole(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two processes that nothing happened to."""
    folder = tmp_path_factory.mktemp("whole")
    said = run_to_the_end(torchrun(2, PROGRAM, *train_command(data, folder / "run")), folder)
    assert said.count("2 processes") == said.count("run directory") == 1  # one of them speaks
    return folder / "run"


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(model_files(run / "model")[1])


def test_the_run_is_that_of_one_process(data: Path, whole: Path, tmp_path: Path) -> None:
    """The same files; weights after 270 steps in single precision to 1e-4, the same scores."""
    single = [sys.executable, "-m", "nofuss", *train_command(data, tmp_path / "run")]
    run_to_the_end(single, tmp_path)
    _check_close(tmp_path / "run", whole)
    names = [{p.name for p in run.iterdir()} for run in (whole, tmp_path / "run")]
    assert names[0] == names[1]
    first, second = (
        json.loads((run / "scores.json").read_text()) for run in (whole, tmp_path / "run")
    )
    for name in ("recall@1", "map@r", "nmi"):
        assert first[name] == pytest.approx(second[name], abs=0.02), name


@linux
def test_a_killed_rank_comes_back_and_ends_with_the_same_bits(
    data: Path, whole: Path, tmp_path: Path
) -> None:
    options = ("--standalone", "--max-restarts", "2")
    run, log = tmp_path / "run", tmp_path / "log"
    command = train_command(data, run)
    agent = start(torchrun(2, PROGRAM, *command, options=options), log, NOFUSS_CACHE=str(tmp_path))
    try:
        some = _steps_beyond(run, 30)
        wait_for(some, seconds=90, what="the first steps")
        before = workers(agent.pid)
        os.kill(before[1], signal.SIGKILL)
        # Seconds on an idle machine (docs/lab); a busy one gets its time.
        wait_for(lambda: not _alive(before[0]), seconds=90, what="the end of the other rank")
        wait_for(_steps_beyond(run, _last_step(run)), seconds=180, what="new steps")
        assert agent.wait(timeout=120) == 0, log.read_text()
    finally:
        end(agent)
    assert "resuming at epoch" in log.read_text()
    assert _same_bits(run, whole), log.read_text()


@linux
def test_a_rank_that_hangs_ends_the_others(data: Path, tmp_path: Path) -> None:
    run, log = tmp_path / "run", tmp_path / "log"
    few = ("--test-fraction", "0.9")  # three classes to train on, which are not folded
    command = torchrun(2, PROGRAM, *train_command(data, run, few, epochs=3000))
    agent = start(command, log, NOFUSS_TIMEOUT="10", NOFUSS_CACHE=str(tmp_path))
    try:
        wait_for(_steps_beyond(run, 8), seconds=120, what="the first epoch")
        ranks = workers(agent.pid)
        os.kill(ranks[1], signal.SIGSTOP)
        wait_for(lambda: not _alive(ranks[0]), seconds=60, what="the end of the other rank")
        os.kill(ranks[1], signal.SIGKILL)  # torchrun does so, after 30 s
        assert agent.wait(timeout=60) != 0
    finally:
        end(agent)
    assert "another process has ended or hangs" in log.read_text()
    assert "--resume" in log.read_text()


@linux
def test_a_stop_is_heard_by_all_and_one_process_resumes(
    data: Path, whole: Path, tmp_path: Path
) -> None:
    """SIGTERM to one of two: a checkpoint, and the rest in one process."""
    run, log = tmp_path / "run", tmp_path / "log"
    agent = start(torchrun(2, PROGRAM, *train_command(data, run)), log, NOFUSS_CACHE=str(tmp_path))
    try:
        wait_for(_steps_beyond(run, 8), seconds=90, what="the first epoch")
        os.kill(workers(agent.pid)[1], signal.SIGTERM)
        assert agent.wait(timeout=60) != 0
    finally:
        end(agent)
    assert "stopped; resume with" in log.read_text()
    assert not (run / "scores.json").exists()
    command = [sys.executable, PROGRAM, "train", "--out", str(run), "--resume"]
    assert "resuming at epoch" in run_to_the_end(command, tmp_path)
    _check_close(run, whole)


def _check_close(run: Path, other: Path) -> None:
    """Weights after 270 steps in single precision, whoever took them."""
    found, wanted = weights(run), weights(other)
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert (found[name] - tensor).abs().max() <= 1e-4 * tensor.abs().max(), name


def _steps_beyond(run: Path, step: int) -> Callable[[], bool]:
    return lambda: _last_step(run) > step


def _last_step(run: Path) -> int:
    return max((int(p.stem[5:]) for p in (run / "checkpoints").glob("step-*")), default=0)


def _same_bits(a: Path, b: Path) -> bool:
    x, y = weights(a), weights(b)
    return x.keys() == y.keys() and all(torch.equal(x[k], y[k]) for k in x)


def _alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().split()[2] != "Z"
    except FileNotFoundError:
        return False
