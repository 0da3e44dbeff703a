"""`torchrun … -m nofuss train`, with real processes that are killed, hang, or lose each other.

What takes longer than the quick suite may is run where NOFUSS_LONG is set.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from nofuss.distributed import processes
from nofuss.training.parallel import whole_batch
from tests.training.together import (
    HERE,
    end,
    environment,
    fork_together,
    start,
    torchrun,
    wait_for,
    workers,
)

PROGRAM = str(HERE / "sharded_cli.py")
linux = pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's /proc")
long = pytest.mark.skipif("NOFUSS_LONG" not in os.environ, reason="a minute; set NOFUSS_LONG=1")
QUICK_STEPS = ("--epochs", "30", "--batch-size", "8", "--dim", "8", "--folds", "0")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Vectors around a centre a class; 13 classes to train on, which two can't share evenly."""
    random = np.random.default_rng(0)
    labels = np.repeat(np.arange(26), 6)
    vectors = random.normal(size=(26, 16))[labels] + 0.5 * random.normal(size=(len(labels), 16))
    file = tmp_path_factory.mktemp("data") / "vectors.npz"
    np.savez(file, vectors=vectors.astype(np.float32), labels=labels)
    return file


def train_command(data: Path, run: Path, *more: str) -> list[str]:
    return ["train", str(data), "--out", str(run), *QUICK_STEPS, *more]


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
    assert said.count("2 processes on this machine, over loopback") == 1
    assert "asks for no password" in said
    assert said.count("run directory") == 1  # one of them speaks
    assert list((folder / "run" / "checkpoints" / "step-270").glob("shard-*"))
    return folder / "run"


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "model" / "weights.safetensors")


def test_the_run_is_that_of_one_process(data: Path, whole: Path, tmp_path: Path) -> None:
    """The same files; weights after 270 steps in single precision to 1e-4, the same scores."""
    single = [sys.executable, "-m", "nofuss", *train_command(data, tmp_path / "run")]
    run_to_the_end(single, tmp_path)
    found, wanted = weights(whole), weights(tmp_path / "run")
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert (found[name] - tensor).abs().max() <= 1e-4 * tensor.abs().max(), name
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
    command = train_command(data, run, "--checkpoint-seconds", "0")
    agent = start(torchrun(2, PROGRAM, *command, options=options), log, NOFUSS_CACHE=str(tmp_path))
    try:
        some = _steps_beyond(run, 30)
        wait_for(some, seconds=90, what="the first steps")
        before = workers(agent.pid)
        os.kill(before[1], signal.SIGKILL)
        # Seconds on an idle machine (LOG.md); a busy one gets its time.
        wait_for(lambda: not _alive(before[0]), seconds=90, what="the end of the other rank")
        wait_for(_steps_beyond(run, _last_step(run)), seconds=180, what="new steps")
        assert agent.wait(timeout=120) == 0, log.read_text()
    finally:
        end(agent)
    assert "resuming at epoch" in log.read_text()
    assert _same_bits(run, whole), log.read_text()


@long
@linux
def test_a_hung_rank_is_named(data: Path, tmp_path: Path) -> None:
    run, log = tmp_path / "run", tmp_path / "log"
    agent = start(
        torchrun(3, PROGRAM, *train_command(data, run)),
        log,
        NOFUSS_TIMEOUT="5",
        NOFUSS_CACHE=str(tmp_path),
    )
    try:
        wait_for(_steps_beyond(run, 9), seconds=120, what="the first epoch")
        os.kill(workers(agent.pid)[2], signal.SIGSTOP)
        assert agent.wait(timeout=90) != 0  # torchrun kills the hung one after 30 s
    finally:
        end(agent)
    assert "rank 2 has not answered for 5 s" in log.read_text()
    assert "--resume" in log.read_text()


@long
@linux
def test_a_stop_is_heard_by_all(data: Path, whole: Path, tmp_path: Path) -> None:
    """SIGTERM to torchrun: a checkpoint, and the rest in one process."""
    run, log = tmp_path / "run", tmp_path / "log"
    agent = start(torchrun(2, PROGRAM, *train_command(data, run)), log, NOFUSS_CACHE=str(tmp_path))
    try:
        wait_for(_steps_beyond(run, 9), seconds=90, what="the first epoch")
        agent.terminate()
        agent.wait(timeout=60)
    finally:
        end(agent)
    assert "stopped; resume with" in log.read_text()
    command = [sys.executable, PROGRAM, "train", "--out", str(run), "--resume"]
    said = run_to_the_end(command, tmp_path)
    assert "resuming at epoch" in said
    for name, tensor in weights(whole).items():
        assert (weights(run)[name] - tensor).abs().max() <= 1e-4 * tensor.abs().max(), name


@long
@linux
def test_two_torchruns_come_back_from_kills(data: Path, whole: Path, tmp_path: Path) -> None:
    """They count restarts apart, and keep a store in which the dead have left their addresses."""
    run, logs, agents = tmp_path / "run", [tmp_path / "log0", tmp_path / "log1"], []
    with socket.create_server(("127.0.0.1", 0)) as free:
        place = f"127.0.0.1:{free.getsockname()[1]}"
    hosts = ("--nnodes", "2", "--max-restarts", "2", "--rdzv-backend", "c10d")
    for number, log in enumerate(logs):
        told = (*hosts, "--rdzv-endpoint", place, "--rdzv-conf", f"is_host={1 - number}")
        command = train_command(data, run, "--checkpoint-seconds", "0")
        agents.append(start(torchrun(1, PROGRAM, *command, options=told), log))
    try:
        for _ in range(2):
            wait_for(_steps_beyond(run, _last_step(run)), seconds=90, what="new steps")
            (victim,) = workers(agents[1].pid).values()
            os.kill(victim, signal.SIGKILL)
            wait_for(lambda gone=victim: not _alive(gone), seconds=10, what="its end")
        for agent in agents:
            assert agent.wait(timeout=180) == 0, "".join(log.read_text() for log in logs)
    finally:
        for agent in agents:
            end(agent)
    assert _same_bits(run, whole)


@pytest.fixture
def two_hosts() -> Iterator[tuple[str, str, Callable[[], None]]]:
    """Two network namespaces with a link between them, and a way to cut it."""
    names = [f"nofuss{os.getpid() % 10_000}{side}" for side in "ab"]

    def ip(*arguments: str) -> None:
        subprocess.run(["ip", *arguments], check=True, capture_output=True)

    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", "link0", "netns", names[0], "type", "veth", "peer", "name", "link0",
           "netns", names[1])  # fmt: skip
        for number, name in enumerate(names, 1):
            ip("-n", name, "addr", "add", f"10.97.8.{number}/24", "dev", "link0")
            ip("-n", name, "link", "set", "link0", "up")
            ip("-n", name, "link", "set", "lo", "up")
    except (OSError, subprocess.CalledProcessError) as error:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
        pytest.skip(f"no network namespaces here: {error}")
    try:
        yield names[0], names[1], lambda: ip("-n", names[1], "link", "set", "link0", "down")
    finally:
        for name in names:
            ip("netns", "del", name)


@long
@linux
def test_two_hosts_and_a_cut_link(
    data: Path, whole: Path, tmp_path: Path, two_hosts: tuple[str, str, Callable[[], None]]
) -> None:
    """One torchrun in each; after the cut both end with a clear line, and the run goes on."""
    first, second, cut = two_hosts
    run = tmp_path / "run"
    hosts = ("--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "10.97.8.1:29512")
    logs, agents = [tmp_path / "log0", tmp_path / "log1"], []
    for number, (place, log) in enumerate(zip((first, second), logs, strict=True)):
        # Both have this machine's name, so each is told its address and who is the host.
        told = ("--local-addr", f"10.97.8.{number + 1}", "--rdzv-conf", f"is_host={1 - number}")
        command = torchrun(1, PROGRAM, *train_command(data, run), options=(*hosts, *told))
        agents.append(
            start(
                ["ip", "netns", "exec", place, *command],
                log,
                NOFUSS_TIMEOUT="10",
                NOFUSS_CACHE=str(tmp_path / place),
            )
        )
        time.sleep(1)
    try:
        wait_for(_steps_beyond(run, 9), seconds=120, what="the first epoch")
        ours = [process for agent in agents for process in workers(agent.pid).values()]
        cut()
        # A torchrun that lost the one it met at takes minutes to give up; its processes do not.
        wait_for(lambda: not any(map(_alive, ours)), seconds=60, what="the end of both")
        assert agents[0].wait(timeout=60) != 0
    finally:
        for agent in agents:
            end(agent)
    assert "2 processes on 2 machines" in logs[0].read_text()
    assert "rank 1 has not answered for 10 s" in logs[0].read_text()
    assert "rank 0 has not answered for 10 s" in logs[1].read_text()
    resumed = run_to_the_end(torchrun(2, PROGRAM, "train", "--out", str(run), "--resume"), tmp_path)
    assert "resuming at epoch" in resumed
    assert _same_bits(run, whole)


def _steps_beyond(run: Path, step: int) -> Callable[[], bool]:
    return lambda: _last_step(run) > step


def _last_step(run: Path) -> int:
    return max((int(p.name[5:]) for p in (run / "checkpoints").glob("step-*")), default=0)


def _same_bits(a: Path, b: Path) -> bool:
    x, y = weights(a), weights(b)
    return x.keys() == y.keys() and all(torch.equal(x[k], y[k]) for k in x)


def _alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().split()[2] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_dropout_of_two_processes_is_that_of_one(layout: torch.memory_format) -> None:
    x = torch.ones(7, 3, 4, 5).to(memory_format=layout)
    torch.manual_seed(3)
    expected = torch.nn.functional.dropout(x, 0.4, training=True)

    def work() -> None:
        torch.manual_seed(3)
        own = processes.share(7)
        layer = torch.nn.Dropout(0.4)
        with whole_batch(7):
            assert torch.equal(layer(x[own]), expected[own])
            layer.eval()
            assert torch.equal(layer(x[own]), x[own])

    fork_together(2, work)


def test_half_precision_and_batch_norm_of_all_rows(tmp_path: Path) -> None:
    """Batch norm over two processes sums in single precision what autocast gives in half."""
    random = np.random.default_rng(0)
    labels = np.repeat(np.arange(8), 6)
    images = random.integers(0, 256, (len(labels), 16, 16), dtype=np.uint8)
    np.savez(tmp_path / "images.npz", images=images, labels=labels)
    command = ["train", "images.npz", "--preset", "small", "--precision", "bf16", "--device", "cpu"]
    command += ["--epochs", "1", "--dim", "8", "--batch-size", "8", "--out", "run"]
    run_to_the_end(torchrun(2, "-m", "nofuss", *command), tmp_path)
    assert (tmp_path / "run" / "scores.json").is_file()
