"""Disks that stop responding while a command uses them: Ctrl-C must end it all the same.

The data, the run, the cache or the place for results is on a file system that dies
(`dead_mount.py`): before its first answer, within the list of its files, or within one of them.
"""

import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

from torture.dead_mount import can_mount, dying
from torture.forked import Forked, run_forked
from torture.measured import Case, Ended
from torture.training import FLAGS, write_pictures

STOP_SECONDS = 4.0
"""Ctrl-C must end it within two; the rest is for a busy machine."""
WAITING = 1.0
"""Seconds between the last answer of the disk and Ctrl-C."""

Words = tuple[object, ...]


def commands(home: Path) -> dict[str, Words]:
    """Return what is run; DEAD is the disk."""
    whole, dead = home / "whole", home / "DEAD"
    picture = dead / "data" / "class 0" / "0.png"
    train: Words = ("train", home / "data", *FLAGS, "--epochs", "1")
    return {
        "doctor, the data": ("doctor", dead / "data"),
        "doctor, a table of them": ("doctor", home / "x.csv"),
        "train, the data": ("train", dead / "data", "--out", home / "new", *FLAGS),
        "train, the results": (*train, "--out", dead / "new"),
        "train, the weights": (*train, "--out", home / "new", "--weights", dead / "w.pth"),
        "evaluate, the run": ("evaluate", dead / "whole"),
        "search, the run": ("search", dead / "whole", home / "data" / "class 0" / "0.png"),
        "search, the picture": ("search", whole, picture),
        "index, the data": ("index", whole, dead / "data"),
        "embed, the data": ("embed", whole, dead / "data", "--out", home / "e.npz"),
        "serve, the run": ("serve", dead / "whole", "--port", "0"),
    }


def campaign(home: Path, seed: int) -> Iterator[Case]:
    """Run every command on disks that die at several moments."""
    if not can_mount():
        return
    prepare(home)
    for name, words in commands(home).items():
        for after, count in (("mount", 1), ("lookup", 2), ("opendir", 1), ("open", 1), ("open", 5)):
            case = run_dying(home, f"{name}, after {after} {count}", words, after, count)
            if case is not None:
                yield case


def prepare(home: Path) -> None:
    """Make what is shown on the disk: pictures, a run, a table that names files there."""
    data, whole = write_pictures(home / "data"), home / "whole"
    for words in (("train", data, "--out", whole, *FLAGS, "--epochs", "1"), ("index", whole)):
        ended = run_forked(home, *words)
        assert ended.code == 0, ended.said
    (home / "shown").mkdir()
    for folder in (data, whole):
        shutil.copytree(folder, home / "shown" / folder.name)
    (home / "shown" / "w.pth").write_bytes(bytes(10))
    rows = [f"DEAD/{p.relative_to(home)},{p.parent.name}" for p in data.rglob("*.png")]
    (home / "x.csv").write_text("\n".join(["path,label", *rows]))


def run_dying(home: Path, name: str, words: Words, after: str, count: int) -> Case | None:
    """Run a command until the disk is dead, then send Ctrl-C; None if it ended before."""
    shutil.rmtree(home / "new", ignore_errors=True)
    with dying(home / "shown", home / "DEAD", after, count) as dead:
        started = Forked(home, *words)
        while started.process.is_alive() and not dead.exists():
            time.sleep(0.02)
        time.sleep(WAITING)
        began = time.monotonic()
        if not started.process.is_alive():
            ended = started.wait()
            return None if ended.code == 0 or ended.refused else _case(name, ended, 0.0)
        assert started.process.pid is not None
        os.kill(started.process.pid, signal.SIGINT)
        # What counts is its last line. The kernel ends no process that has a file open on a FUSE
        # file system before that has answered the file's close; here it never does.
        while started.process.is_alive() and "nofuss: stopped" not in started.said:
            if time.monotonic() - began > 10:
                break
            time.sleep(0.02)
        seconds = time.monotonic() - began
    return _case(name, started.wait(), seconds)  # the disk is gone, so that it can end


def _case(name: str, ended: Ended, seconds: float) -> Case:
    complaints = [] if ended.code == 130 else [f"exit {ended.code}, said {ended.line!r}"]
    if seconds > STOP_SECONDS:
        complaints.append(f"Ctrl-C took {seconds:.1f} s")
    if not ended.line.startswith("nofuss: stopped") or "Traceback" in ended.said:
        complaints.append(f"said {ended.said[-300:]!r}")
    return Case(name, True, seconds, ended.megabytes, complaints)
