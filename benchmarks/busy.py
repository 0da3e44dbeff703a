"""Commands beside other busy processes: what threads cost that spin while they wait.

`python -m benchmarks --only busy`. The program sets OMP_WAIT_POLICY=PASSIVE unless the user has set
it. Each of train, embed and search runs alone, beside one and beside three processes that compute
without a pause, with that setting and with the default of the library of threads, in turns.
Features are not cached; the graph of the backbone is. Wall-clock seconds; the limit is the same
command alone.
"""

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from PIL import Image

from benchmarks.timing import Growth, Row

POLICIES = {"nofuss, waiting threads sleep": "PASSIVE", "default, they spin first": ""}
"""Method → OMP_WAIT_POLICY; an empty one counts as not set, and the program does not replace it."""


def rows(*, quick: bool) -> Iterator[Row]:
    """Yield seconds of each command, beside no, one and three busy processes."""
    repeats, busy = (1, (0, 1)) if quick else (3, (0, 1, 3))
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        photos = _write_photos(home / "photos", classes=4 if quick else 20, each=15)
        _write_photos(home / "few", classes=4, each=4)
        _run(home, "PASSIVE", "warm", "train", home / "few", "--out", home / "first")
        _run(home, "PASSIVE", "warm-too", "train", photos, "--out", home / "run")
        words: dict[str, tuple[object, ...]] = {
            "train": ("train", photos, "--out", home / "new"),
            "embed": ("embed", home / "run", photos, "--out", home / "new.npz"),
            "search": ("search", home / "run", next(photos.rglob("*.jpg"))),
        }
        for name, command in words.items():
            alone = dict[str, float]()
            for count in busy:
                times: dict[str, list[float]] = {method: [] for method in POLICIES}
                with _busy(count):
                    for _ in range(repeats):
                        for method, policy in POLICIES.items():
                            times[method].append(_measure(home, policy, command))
                for method, each in times.items():
                    seconds = statistics.median(each)
                    alone.setdefault(method, seconds)
                    case = f"{name}, {len(list(photos.rglob('*.jpg')))} photographs, "
                    case += f"beside {count} busy processes"
                    yield Row("busy", case, method, seconds, limit_seconds=alone[method])


def growth(*, quick: bool) -> Iterator[Growth]:
    """Yield nothing: three points are no curve."""
    yield from ()


def _write_photos(folder: Path, *, classes: int, each: int) -> Path:
    """Write JPEGs of the size of CUB's, smooth enough to be of a photograph's length."""
    random = np.random.default_rng(0)
    for c in range(classes):
        (folder / f"class {c}").mkdir(parents=True)
        base = random.integers(0, 256, (24, 32, 3))
        for i in range(each):
            small = (base + random.integers(-40, 40, base.shape)).clip(0, 255).astype(np.uint8)
            picture = Image.fromarray(small).resize((500, 375), Image.Resampling.BICUBIC)
            picture.save(folder / f"class {c}" / f"{i}.jpg")
    return folder


@contextmanager
def _busy(count: int) -> Iterator[None]:
    """Keep `count` processes computing."""
    command = [sys.executable, "-c", "while True: pass"]
    processes = [subprocess.Popen(command) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _measure(home: Path, policy: str, command: tuple[object, ...]) -> float:
    """Return the seconds of a command that finds no features in the cache."""
    shutil.copytree(home / "warm", home / "cache")
    began = time.perf_counter()
    _run(home, policy, "cache", *command)
    seconds = time.perf_counter() - began
    shutil.rmtree(home / "cache")
    shutil.rmtree(home / "new", ignore_errors=True)
    (home / "new.npz").unlink(missing_ok=True)
    return seconds


def _run(home: Path, policy: str, cache: str, *words: object) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
    environment |= {"OMP_WAIT_POLICY": policy, "NOFUSS_CACHE": str(home / cache)}
    subprocess.run(
        [sys.executable, "-m", "nofuss", *map(str, words)],
        env=environment,
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
