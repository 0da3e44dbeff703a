"""Measure the peak memory of each command, and whether it grows with the epochs of training."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from torture.training import FLAGS, command, environment, write_pictures


class Peak(NamedTuple):
    """The largest resident set of one process."""

    what: str
    megabytes: float


def peak(home: Path, *words: object) -> float:
    """Run the real command; return its largest resident set in MB.

    It is at least this process's own, which Linux counts from the moment of the fork.
    """
    log = home / "said.txt"
    with log.open("w") as said:
        process = subprocess.Popen(
            command(*words), cwd=home, env=environment(home), stdout=said, stderr=said
        )
        _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0:
        raise RuntimeError(f"{' '.join(map(str, words))}: {log.read_text()}")
    return usage.ru_maxrss / 1024  # Linux counts in KB


def every_command(home: Path) -> Iterator[Peak]:
    """Measure on the built-in characters, and with the largest default network on photographs."""
    photos = write_pictures(home / "photos")
    train = ("train", "--out", "run", "--epochs", "1")
    yield Peak("train (characters, 1 epoch)", peak(home, *train))
    yield Peak("evaluate", peak(home, "evaluate", "run"))
    yield Peak("index", peak(home, "index", "run"))
    query = next(photos.rglob("*.png"))
    yield Peak("search", peak(home, "search", "run", query))
    yield Peak("embed (32 pictures)", peak(home, "embed", "run", photos, "--out", "x.npz"))
    yield Peak("doctor (32 pictures)", peak(home, "doctor", photos, "--run", "run"))
    yield Peak("export", peak(home, "export", "run", "--onnx", "x.onnx"))
    small = ("train", photos, "--epochs", "1", "--out")
    yield Peak("train --preset frozen", peak(home, *small, "f", "--preset", "frozen"))
    fine = ("--preset", "finetune", "--batch-size", "8")
    yield Peak("train --preset finetune --batch-size 8", peak(home, *small, "t", *fine))
    whole = (*fine, "--unfreeze", "all")
    yield Peak(
        "train --preset finetune --unfreeze all --batch-size 8", peak(home, *small, "w", *whole)
    )


def over_epochs(home: Path, *epochs: int) -> Iterator[Peak]:
    """Measure the same training with more and more epochs: a leak grows with them."""
    photos = write_pictures(home / "photos")
    for count in epochs:
        words = ("train", photos, "--out", f"run-{count}", *FLAGS, "--epochs", str(count))
        yield Peak(f"{count} epochs", peak(home, *words))
