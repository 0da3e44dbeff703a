"""The small training that is disturbed, on 32 pictures, and the bits it must end with."""

import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image
from safetensors.torch import load_file, save

from nofuss.errors import RunError
from nofuss.model.saved import model_files

STEPS_PER_EPOCH = 2
_SIZES = ("--size", "16", "--batch-size", "8", "--dim", "4", "--val-fraction", "0")
FLAGS = ("--preset", "small", *_SIZES)
LAST_STAGES = (
    *("--preset", "finetune", "--backbone", "convnet", "--warmup", "0"),
    *("--unfreeze", "2", "--views", "2", *_SIZES),
)
"""Flags that train the last stages on kept activations."""


def write_pictures(folder: Path) -> Path:
    """Write eight classes of four pictures each; half of the classes are for training."""
    random = np.random.default_rng(0)
    for c in range(8):
        (folder / f"class {c}").mkdir(parents=True)
        drawn = random.integers(0, 256, (16, 16, 3))
        for i in range(4):
            pixels = (drawn + random.integers(-30, 30, drawn.shape)).clip(0, 255)
            Image.fromarray(pixels.astype(np.uint8)).save(folder / f"class {c}" / f"{i}.png")
    return folder


@contextmanager
def logged() -> Iterator[list[str]]:
    """Collect what nofuss logs, where a checkpoint that should be whole is damaged."""
    lines, handler = list[str](), logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("nofuss").addHandler(handler)
    try:
        yield lines
    finally:
        logging.getLogger("nofuss").removeHandler(handler)


def command(*arguments: object, module: str = "nofuss") -> list[str]:
    """Return the command line of the real program."""
    return [sys.executable, "-m", module, *map(str, arguments)]


def environment(home: Path) -> dict[str, str]:
    """Return the environment: one thread, as the bits of a sum depend on threads, and a cache."""
    return os.environ | {"OMP_NUM_THREADS": "1", "NOFUSS_CACHE": str(home / "cache")}


class Place(NamedTuple):
    """The folder of a campaign: data, cache, and the files of an undisturbed run."""

    home: Path
    data: Path
    epochs: int
    reference: dict[str, bytes]
    flags: tuple[str, ...] = FLAGS

    @property
    def cache(self) -> Path:
        """The folder that holds what can be computed again."""
        return self.home / "cache"

    def first(self, run: Path) -> tuple[str, ...]:
        """Return the arguments that start a run."""
        words = ("train", str(self.data), "--out", str(run), *self.flags)
        return (*words, "--epochs", str(self.epochs))

    def again(self, run: Path) -> tuple[str, ...]:
        """Return the arguments that resume a run, or start it if it does not exist."""
        if not (run / "config.json").is_file():
            return self.first(run)
        return ("train", "--out", str(run), "--resume")


def prepare(home: Path, *, epochs: int, flags: tuple[str, ...] = FLAGS) -> Place:
    """Write the data and train once without disturbance."""
    place = Place(home, write_pictures(home / "data"), epochs, {}, flags)
    run = home / "undisturbed"
    subprocess.run(
        command(*place.first(run)),
        env=environment(home),
        check=True,
        stdout=subprocess.DEVNULL,
    )
    place.reference.update(bits(run))
    return place


def bits(run: Path) -> dict[str, bytes]:
    """Return what must be equal in all finished runs: everything but times and paths."""
    last = max((run / "checkpoints").glob("step-*"), key=lambda path: int(path.stem[5:]))
    files = [
        *model_files(run / "model"),
        run / "proxies.safetensors",
        run / "scores.json",
        run / "data.json",
    ]
    found = {str(file.relative_to(run)): file.read_bytes() for file in files}
    found["checkpoint"] = save(load_file(last))  # weights, proxies, optimizer state
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    found["losses"] = json.dumps([row["loss"] for row in rows]).encode()
    return found


def differing(run: Path, reference: dict[str, bytes]) -> list[str]:
    """Return names of what is missing from a run or differs from the reference."""
    try:
        found = bits(run)
    except (OSError, ValueError, RunError) as error:
        return [f"unfinished: {error}"]
    return [name for name, content in reference.items() if found.get(name) != content]
