"""Time and memory of train (head), evaluate, index, search, report and page, against their items.

Made vectors of 64 dimensions, 50 a class; the head is that of `nofuss train` by default. Every
stage runs in a new process on the files that the stages before it wrote, as the commands would: its
seconds are those after the imports, its memory is the peak above what the imports took. Scoring
compares all pairs; it is left out above MOST_SCORED items.

A row compares a size with a tenth of it: ten times as many items may take ten times as long, what
compares all pairs of items a hundred times.
"""

import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import cache
from itertools import pairwise
from math import nan
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.timing import Growth, Row, extra_mb

SIZES, QUICK = (1_000, 10_000, 100_000, 1_000_000), (1_000, 10_000)
DIM, EACH = 64, 50
MOST_SCORED = 100_000
"""Items that are scored; ten times as many take an hour."""
LEEWAY = 1.5
"""How many times what its exponent allows a stage may take."""
EXPONENTS = {"train (head)": 1, "report": 1, "evaluate": 2, "index": 1, "search": 1, "page": 1}


class Measured(NamedTuple):
    """Seconds and MB of a stage; nan where it was not run."""

    seconds: float
    mb: float


def rows(*, quick: bool) -> Iterator[Row]:
    """Compare each size with a tenth of it."""
    found = _measure(quick)
    sizes = QUICK if quick else SIZES
    for stage, exponent in EXPONENTS.items():
        for before, size in pairwise(sizes):
            least, now = found[stage, before], found[stage, size]
            case = f"{stage}, {size:,} vectors"
            note = f"N^{_slope(least.seconds, now.seconds):.2f}, " if now.seconds > 0 else ""
            note += f"memory N^{_slope(least.mb, now.mb):.2f}" if now.mb > 0 else ""
            if not math.isfinite(now.seconds):
                note = "not run"
            yield Row(
                "items",
                case,
                f"nofuss, beside {before:,}",
                now.seconds,
                least.seconds,
                now.mb,
                note,
                # Below a second it is the constant part that is measured.
                LEEWAY * 10**exponent if now.seconds >= 1 else nan,
            )


def growth(*, quick: bool) -> Iterator[Growth]:
    """Return one figure of the seconds and one of the memory, with the exponent of each line."""
    found, sizes = _measure(quick), QUICK if quick else SIZES
    for name, unit, title in (
        ("items-time", "seconds", "Seconds after the imports"),
        ("items-memory", "MB", "Peak memory above that of the imports"),
    ):
        values: dict[str, tuple[float, ...]] = {}
        for stage in EXPONENTS:
            of = [found[stage, size] for size in sizes]
            line = [m.seconds if unit == "seconds" else m.mb for m in of]
            known = [value for value in line if math.isfinite(value)]
            slope = _slope(*known[-2:]) if len(known) > 1 else nan
            values[f"{stage}: N^{slope:.2f}"] = tuple(line)
        yield Growth(name, f"{title}, vectors of {DIM} numbers", "items N", sizes, values, unit)


def _slope(before: float, after: float) -> float:
    """Return the exponent of the growth over ten times the size."""
    return math.log10(after / before) if before > 0 and after > 0 else nan


@cache
def _measure(quick: bool) -> dict[tuple[str, int], Measured]:
    found = {}
    for size in QUICK if quick else SIZES:
        with tempfile.TemporaryDirectory() as folder:
            _make_vectors(size, Path(folder))
            for stage in EXPONENTS:
                is_run = stage != "evaluate" or size <= MOST_SCORED
                found[stage, size] = (
                    _in_process(stage, Path(folder)) if is_run else Measured(nan, nan)
                )
                print(f"{stage}, {size:,}: {found[stage, size]}", flush=True)
    return found


def _make_vectors(count: int, folder: Path) -> None:
    """Write `count` vectors around class centers, and one query."""
    random, classes = np.random.default_rng(0), count // EACH
    rest = random.integers(0, classes, count - 2 * classes)
    labels = np.concatenate([np.arange(classes).repeat(2), rest])
    centers = random.standard_normal((classes, DIM), dtype=np.float32)
    vectors = centers[labels] + 1.1 * random.standard_normal((count, DIM), dtype=np.float32)
    np.savez(folder / "vectors.npz", vectors=vectors, labels=labels)
    np.savez(folder / "query.npz", vectors=vectors[:1])


def _in_process(stage: str, folder: Path) -> Measured:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.items", stage, str(folder)],
        env=os.environ | {"NOFUSS_CACHE": str(folder / "cache")},
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    return Measured(*json.loads(done.stdout.splitlines()[-1]))


def _train(folder: Path) -> None:
    from nofuss.config import Options
    from nofuss.training.train import run_training

    data, out = folder / "vectors.npz", folder / "run"
    # No scores, which are a stage of their own.
    run_training(Options(data=data, out=out, test_fraction=0.0))


def _evaluate(folder: Path) -> None:
    from nofuss.commands.scoring import Asked, score_data
    from nofuss.run.directory import Run

    how = Asked([1], rerank="none")
    score_data(Run.open(folder / "run"), folder / "vectors.npz", None, how, device="cpu")


def _index(folder: Path) -> None:
    from nofuss.search.update import update_index

    update_index(folder / "run", folder / "vectors.npz")


def _search(folder: Path) -> None:
    from nofuss.commands.search import main

    main(folder / "run", folder / "query.npz", json=True)


def _report(folder: Path) -> None:
    """Write the report on all items, as after a training that scored them by folds."""
    from nofuss import load
    from nofuss.data.open import open_data
    from nofuss.report import write_report
    from nofuss.run.proxies import RunEmbeddings, load_proxies

    data, encoder = open_data(folder / "vectors.npz"), load(folder / "run")
    kept = load_proxies(folder / "run", encoder.digest, encoder.dim)
    vectors = encoder.embed_collection(data).numpy()
    shown = RunEmbeddings(vectors, np.arange(len(data)), vectors[kept.sample], kept, seen=True)
    write_report(folder / "run", data, shown)


def _page(folder: Path) -> None:
    """Open the page, draw its map, answer a search."""
    from nofuss.run.directory import Run
    from nofuss.search.index import key_of
    from nofuss.search.page.state import open_state
    from nofuss.search.verdict import Query

    state = open_state(Run.open(folder / "run"))
    [name] = state.index.sample(1)
    assert state.map["items"]
    assert state.search(Query(state.base.vectors_of([name])[0]), 10).hits
    assert state.index.find(key_of(name)) == name


STAGES: dict[str, Callable[[Path], None]] = {
    "train (head)": _train,
    "evaluate": _evaluate,
    "index": _index,
    "search": _search,
    "report": _report,
    "page": _page,
}


def main() -> None:
    """Run one stage, and print its seconds and MB as JSON on the last line."""
    import nofuss.commands
    import nofuss.search.page.server
    import nofuss.training.train  # noqa: F401

    stage, folder = sys.argv[1], Path(sys.argv[2])
    seconds = list[float]()

    def work() -> None:
        began = time.perf_counter()
        STAGES[stage](folder)
        seconds.append(time.perf_counter() - began)

    mb = extra_mb(work)
    print(f"\n{json.dumps(Measured(seconds[0], mb))}")


if __name__ == "__main__":
    main()
