"""Data that a stranger made: `nofuss doctor` and `nofuss train` on each of `data_bombs.py`."""

import shutil
from collections.abc import Iterator
from pathlib import Path

from torture.data_bombs import data_bombs
from torture.forked import run_forked
from torture.measured import Case, judged
from torture.training import FLAGS

SECONDS, MEGABYTES = 30.0, 1000.0
"""Most that a command may take; torch alone has more than 300 MB."""


def campaign(home: Path, seed: int) -> Iterator[Case]:
    """Run both commands on each bomb."""
    for name, make in data_bombs().items():
        for command in ("doctor", "train"):
            place = home / "data"
            shutil.rmtree(place, ignore_errors=True)
            place.mkdir()
            words: list[object] = [command, make(place)]
            if command == "train":
                words += ["--out", place / "run", *FLAGS, "--epochs", "1"]
            ended = run_forked(home, *words)
            costs = [(ended.seconds, SECONDS, "s"), (ended.megabytes, MEGABYTES, "MB")]
            others = [f"took {spent:.0f} {unit}" for spent, most, unit in costs if spent > most]
            yield judged(f"{name}, {command}", ended, *others)
