"""Two commands at once on one run: real processes, real signals."""

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nofuss.cli import main
from nofuss.files import LOCK, OWNER
from nofuss.search import Index
from tests.running import started
from tests.training.together import end, start, torchrun, wait_for, workers
from tests.training.together import environment as together
from torture.training import FLAGS, command, environment, write_pictures

LONG = ("--epochs", "100000")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pictures, a cache and a finished run."""
    home = tmp_path_factory.mktemp("home")
    write_pictures(home / "data")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NOFUSS_CACHE", str(home / "cache"))
        words = ("train", home / "data", "--out", home / "whole", *FLAGS, "--epochs", "1")
        assert main([str(word) for word in words]) == 0
    return home


@pytest.fixture
def training(home: Path, tmp_path: Path) -> Iterator["subprocess.Popen[str]"]:
    """A training into tmp_path/run that is at work, and would be for hours."""
    words = ("train", home / "data", "--out", tmp_path / "run", *FLAGS, *LONG)
    running = started(command(*words), after="epoch   2", env=environment(home))
    yield running
    running.kill()
    running.communicate()


@pytest.fixture
def call(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str]]:
    """A command in this process: its exit code, and all that it says."""
    monkeypatch.setenv("NOFUSS_CACHE", str(home / "cache"))

    def run(*words: object) -> tuple[int, str]:
        capsys.readouterr()
        code = main([str(word) for word in words])
        return code, "".join(capsys.readouterr())

    return run


def resume_and_stop(run: Path, home: Path) -> None:
    """Resume a long training and stop it, as Ctrl-C does."""
    words = command("train", "--out", run, "--resume")
    running = started(words, after="resuming at epoch", env=environment(home))
    running.send_signal(signal.SIGINT)
    said, _ = running.communicate(timeout=120)
    assert running.returncode == 130, said


@pytest.mark.slow
def test_a_run_has_one_writer(
    training: "subprocess.Popen[str]",
    call: Callable[..., tuple[int, str]],
    home: Path,
    tmp_path: Path,
) -> None:
    """Whatever comes second is told who is first; after a SIGKILL nobody is."""
    run = tmp_path / "run"
    for words in (
        ("train", "--out", run, *FLAGS, "--epochs", "1"),
        ("train", "--out", run, "--resume"),
        ("evaluate", run),
        ("index", run),
    ):
        code, said = call(*words)
        assert code == 2, said
        line = said.strip().splitlines()[-1]
        assert f"run is being written by process {training.pid} ('nofuss train', since 2" in line
    training.kill()
    training.wait()
    assert (run / OWNER).is_file()
    resume_and_stop(run, home)
    assert {path.name for path in run.rglob(".*")} <= {LOCK}


@pytest.mark.slow
def test_two_trainings_into_one_folder(home: Path, tmp_path: Path) -> None:
    """Started together: one trains, the other says so and leaves no trace."""
    both = [
        subprocess.Popen(
            command("train", home / "data", "--out", tmp_path / "run", *FLAGS, *flags),
            env=environment(home),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for flags in (("--epochs", "30", "--seed", "1"), ("--epochs", "30", "--seed", "2"))
    ]
    said = [process.communicate(timeout=300)[0] for process in both]
    codes = [process.returncode for process in both]
    assert sorted(codes) == [0, 2], said
    winner, loser = codes.index(0), codes.index(2)
    lines = said[loser].splitlines()
    words = ("is being written by process", "is not empty and is never overwritten")
    assert any(each in lines[-1] for each in words), lines
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["seed"] == winner + 1


@pytest.mark.slow
def test_two_updates_of_one_index_lose_nothing(home: Path, tmp_path: Path) -> None:
    """Each with a folder of its own, again and again until both are done."""
    run = tmp_path / "run"
    shutil.copytree(home / "whole", run)
    trained = len(Index.load(run / "index"))
    classes = [home / "data" / f"class {i}" for i in (0, 1)]
    folders = [Path(shutil.copytree(c, tmp_path / "new" / c.name)) for c in classes]
    left = list(folders)
    for _ in range(20):
        running = [
            (folder, subprocess.Popen(command("index", run, folder), env=environment(home)))
            for folder in left
        ]
        codes = {folder: process.wait(timeout=300) for folder, process in running}
        assert set(codes.values()) <= {0, 2}
        left = [folder for folder in left if codes[folder]]
        if not left:
            break
    assert not left
    kept = {str(Path(name).parent) for name in Index.load(run / "index").names}
    assert set(map(str, folders)) <= kept
    assert len(Index.load(run / "index")) == trained + 8


@pytest.mark.slow
@pytest.mark.torchrun
@pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's /proc")
def test_processes_of_one_torchrun_share_the_lock(
    home: Path, call: Callable[..., tuple[int, str]], tmp_path: Path
) -> None:
    """One run, two processes; others are kept out, and a second torchrun ends in one line."""
    run, log = tmp_path / "run", tmp_path / "log"
    words = ["train", str(home / "data"), "--out", str(run), *FLAGS]
    agent = start(torchrun(2, "-m", "nofuss", *words, *LONG), log, NOFUSS_CACHE=str(home / "cache"))
    try:
        wait_for(lambda: "epoch   2" in log.read_text(), seconds=120, what="the second epoch")
        code, said = call("train", "--out", run, "--resume")
        assert code == 2
        assert "run is being written by process" in said
        second = subprocess.run(
            torchrun(2, "-m", "nofuss", "train", "--out", str(run), "--resume"),
            env=together(NOFUSS_CACHE=str(home / "cache")),
            capture_output=True,
            text=True,
            timeout=180,
            check=False,
        )
        lines = [line for line in second.stderr.splitlines() if line.startswith("nofuss: ")]
        assert second.returncode != 0
        assert len(lines) == 1, second.stderr
        assert "run is being written by process" in lines[0]
    finally:
        ours = workers(agent.pid)
        end(agent)
    for process in ours.values():
        gone = Path(f"/proc/{process}")
        wait_for(lambda gone=gone: not gone.exists(), seconds=30, what="their end")
    resume_and_stop(run, home)
