"""One writer at a time: real processes, real kills, and what strangers leave in a run."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nofuss.errors import RunError, TrainingError
from nofuss.files.atomic import temporary_name
from nofuss.files.lock import LOCK, RunLock, check_in_place

HOLD = """
import sys, time
from pathlib import Path
from nofuss.files.lock import RunLock
with RunLock() as lock:
    lock.take(Path(sys.argv[1]))
    print("held", flush=True)
    sys.stdin.read()
"""


def hold(run: Path) -> "subprocess.Popen[str]":
    """Another process that has locked the run until its input ends."""
    other = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(run)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert other.stdout is not None
    assert other.stdout.readline() == "held\n"
    return other


def take(run: Path) -> None:
    with RunLock() as lock:
        lock.take(run)
        assert (run / LOCK).is_file()


def test_a_lock_is_taken_and_leaves_nothing(tmp_path: Path) -> None:
    for _ in range(2):
        take(tmp_path)
        assert list(tmp_path.iterdir()) == []


def test_the_second_is_told_who_is_first(tmp_path: Path) -> None:
    began = time.strftime("%Y-%m-%d")
    other = hold(tmp_path)
    match = rf"is being written by process {other.pid} \('nofuss .*', since {began} \d\d:\d\d"
    for _ in range(2):
        with pytest.raises(RunError, match=match):
            take(tmp_path)
    other.communicate("")
    assert other.returncode == 0
    assert list(tmp_path.iterdir()) == []
    take(tmp_path)


def test_two_threads_of_one_process(tmp_path: Path) -> None:
    with RunLock() as lock:
        lock.take(tmp_path)
        with pytest.raises(RunError, match=f"by process {os.getpid()} "):
            take(tmp_path)
        assert (tmp_path / LOCK).is_file()


def test_a_killed_one_holds_nobody_up(tmp_path: Path) -> None:
    other = hold(tmp_path)
    other.send_signal(signal.SIGKILL)
    other.communicate()
    assert (tmp_path / LOCK).is_file()
    (tmp_path / temporary_name("scores.json")).write_text("half")
    take(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_stopped_one_still_writes(tmp_path: Path) -> None:
    other = hold(tmp_path)
    other.send_signal(signal.SIGSTOP)
    with pytest.raises(RunError, match=f"process {other.pid} "):
        take(tmp_path)
    other.send_signal(signal.SIGCONT)
    other.communicate("")


def test_a_forked_child_does_not_hold_the_lock_of_its_parent(tmp_path: Path) -> None:
    code = HOLD.replace("sys.stdin.read()", "print(os.fork() and os.getpid()); time.sleep(60)")
    other = subprocess.Popen(
        [sys.executable, "-c", f"import os\n{code}", str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert other.stdout is not None
    other.stdout.readline()
    with pytest.raises(RunError, match="is being written"):
        take(tmp_path)
    other.kill()
    other.wait()
    take(tmp_path)
    os.killpg(other.pid, signal.SIGKILL)  # the child, alive until now
    other.stdout.close()


def test_without_locks_of_the_file_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then the process counts that the file names, if it is alive."""

    def refuse(descriptor: int, kind: int) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("fcntl.flock", refuse)
    about = {"host": os.uname().nodename, "since": 0, "command": "nofuss train"}
    finished = subprocess.Popen(["true"])
    finished.wait()
    for process, host, free in (
        (finished.pid, about["host"], True),
        (os.getppid(), about["host"], False),
        (finished.pid, "elsewhere", False),
    ):
        (tmp_path / LOCK).write_text(json.dumps(about | {"process": process, "host": host}))
        if free:
            take(tmp_path)
        else:
            with pytest.raises(RunError, match=f"process {process} "):
                take(tmp_path)


@pytest.mark.parametrize("what", ["link", "dead link", "pipe", "folder", "hard link"])
def test_a_lock_that_a_stranger_made(what: str, tmp_path: Path) -> None:
    run, precious = tmp_path / "run", tmp_path / "precious"
    run.mkdir()
    precious.write_text("precious")
    make = {
        "link": lambda lock: lock.symlink_to(precious),
        "dead link": lambda lock: lock.symlink_to(tmp_path / "none"),
        "pipe": os.mkfifo,
        "folder": Path.mkdir,
        "hard link": lambda lock: lock.hardlink_to(precious),
    }
    make[what](run / LOCK)  # type: ignore[operator]
    with pytest.raises(RunError, match="was not made by nofuss; delete it"):
        take(run)
    assert precious.read_text() == "precious"
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("name", ["index", "checkpoints", "model"])
def test_a_folder_that_is_a_link_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / name).symlink_to(tmp_path / "other")
    with pytest.raises(RunError, match=f"{name} is a link"):
        take(tmp_path / "run")


def test_a_run_that_moves_away(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    with RunLock() as lock:
        lock.take(run)
        check_in_place(run)
        run.rename(tmp_path / "moved")
        with pytest.raises(TrainingError, match="run was moved or deleted while"):
            check_in_place(run)
        run.mkdir()  # another one took its place
        with pytest.raises(TrainingError, match="run was moved or deleted while"):
            check_in_place(run)
    assert list((tmp_path / "moved").iterdir()) == []
    check_in_place(run)
