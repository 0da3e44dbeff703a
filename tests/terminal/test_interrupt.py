"""Ctrl-C ends a process whose disk does not respond: a real file system that dies."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from torture.dead_mount import can_mount, dying

pytestmark = pytest.mark.skipif(not can_mount(), reason="needs /dev/fuse and the right to mount")
PROGRAM = """
import os, sys
from nofuss.terminal.interrupt import ending_in_time, stop_on_signals

with ending_in_time(), stop_on_signals(print):
    os.listdir(sys.argv[1])
"""
LISTING = PROGRAM.replace(", stop_on_signals(print)", "")
STOP_SECONDS = 4.0
"""It should take less than two; the rest is for a busy machine."""


@pytest.mark.parametrize("program", [LISTING, PROGRAM], ids=["a command", "training"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it(program: str, number: signal.Signals, tmp_path: Path) -> None:
    if program is LISTING:  # Python has no handler for SIGTERM, nor for a SIGINT that is ignored
        handle = f"signal.signal({int(number)}, signal.default_int_handler)"
        program = f"import signal; {handle}\n{program}"
    (tmp_path / "shown").mkdir()
    with dying(tmp_path / "shown", tmp_path / "mounted", "mount"):
        words = [sys.executable, "-c", program, str(tmp_path / "mounted")]
        with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as process:
            wait_until_blocked(process.pid)
            began = time.monotonic()
            process.send_signal(number)
            _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert time.monotonic() - began < STOP_SECONDS
    assert said.startswith("nofuss: stopped")


def wait_until_blocked(pid: int) -> None:
    """Wait until a process is in a system call of the dead file system."""
    place = Path(f"/proc/{pid}/wchan")
    until = time.monotonic() + 60
    while "fuse" not in place.read_text() and "request_wait" not in place.read_text():
        assert time.monotonic() < until, place.read_text()
        time.sleep(0.05)


def test_files_are_shown_until_it_dies(tmp_path: Path) -> None:
    (tmp_path / "shown").mkdir()
    (tmp_path / "shown" / "x.txt").write_text("x" * 10_000)
    with dying(tmp_path / "shown", tmp_path / "mounted", "opendir", count=9) as dead:
        assert (tmp_path / "mounted" / "x.txt").read_text() == "x" * 10_000
        assert [p.name for p in (tmp_path / "mounted").iterdir()] == ["x.txt"]
        assert not dead.exists()
    assert list((tmp_path / "mounted").iterdir()) == []  # unmounted
