"""Strong and weak scaling of the sharded Proxy-NCA: a million classes over several processes.

Strong: the same million over two processes of one thread each, beside one process of two threads
on the same cores. Weak: half a million each, beside one process with half a million on one core.
Measured are forward + backward with the gathering of embeddings, and the whole step with Adam, in
wall-clock seconds; and the peak resident size above that before the proxies were made.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch.optim import Adam

from benchmarks.timing import Growth, Row, resident_mb
from nofuss.distributed import processes
from nofuss.distributed.shard import gather
from nofuss.losses.proxy_nca import ProxyNCA

BATCH, DIM, MILLION = 512, 64, 1_000_000
ROUNDS, REPEATS = 3, 3
EFFICIENCY = 0.85
"""The least that two processes may reach of one with two threads."""


class Measured(NamedTuple):
    """Medians of one way to run: seconds of the loss, of the whole step, and MB per process."""

    loss: float
    step: float
    mb: float


def rows(*, quick: bool) -> Iterator[Row]:
    """Measure strong, then weak scaling; ways take turns, each in new processes."""
    classes = MILLION // 10 if quick else MILLION
    ways = {
        "one process, two threads": (1, 2, classes),
        "nofuss, two processes": (2, 1, classes),
        "one process, half the classes": (1, 1, classes // 2),
    }
    runs: dict[str, list[Measured]] = {name: [] for name in ways}
    for _ in range(ROUNDS):
        for name, way in ways.items():
            runs[name].append(_run(*way))
    one, two, half = (
        Measured(*map(statistics.median, zip(*each, strict=True))) for each in runs.values()
    )
    case = f"B {BATCH}, D {DIM}, C {classes:,}"
    yield from _rows(f"strong scaling, {case}", "one process, two threads", one, two)
    yield from _rows(f"weak scaling, {case}", "one process, half the classes", half, two)


def growth(*, quick: bool) -> Iterator[Growth]:
    """Return no figure: there are only two cores."""
    return iter(())


def _rows(case: str, name: str, limit: Measured, ours: Measured) -> Iterator[Row]:
    barred = case.startswith("strong")
    for what in ("loss", "step"):
        alone, together = getattr(limit, what), getattr(ours, what)
        title = f"{case}, {'forward + backward' if what == 'loss' else 'whole step with Adam'}"
        yield Row("scaling", title, name, alone, alone, limit.mb)
        yield Row(
            "scaling",
            title,
            "nofuss, two processes",
            together,
            alone,
            ours.mb,
            f"efficiency {alone / together:.2f}; MB are of each process",
            1 / EFFICIENCY if barred and what == "loss" else float("nan"),
        )


def _run(count: int, threads: int, classes: int) -> Measured:
    """Measure one way in new processes."""
    module = ["-m", "benchmarks.scaling", str(classes)]
    start = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
    done = subprocess.run(
        [sys.executable, *(start if count > 1 else []), *module],
        env=os.environ | {"OMP_NUM_THREADS": str(threads)},
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    line = next(line for line in done.stdout.splitlines() if line.startswith("["))
    return Measured(*json.loads(line))


def _measure(classes: int) -> Measured:
    """Measure as one of the processes; return the slowest time and the largest memory."""
    before = resident_mb()
    criterion = ProxyNCA(classes, DIM, seed=0, sharded=processes.world() > 1)
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(BATCH, DIM, generator=generator)
    labels = torch.randint(classes, (BATCH,), generator=generator)
    own = whole[processes.share(BATCH)].clone().requires_grad_()
    optimizer = Adam(criterion.parameters(), fused=True)
    losses, steps = [], []
    for turn in range(REPEATS + 2):
        processes.any_true(True)  # a barrier: all start together
        began = time.perf_counter()
        criterion(gather(own, BATCH), labels).backward()
        between = time.perf_counter()
        optimizer.step()
        optimizer.zero_grad()
        ended = time.perf_counter()
        if turn >= 2:
            losses.append(between - began)
            steps.append(ended - began)
    mb = resident_mb(highest=True) - before
    found = torch.tensor([statistics.median(losses), statistics.median(steps), mb])
    return Measured(*processes.all_max(found).tolist())


def main() -> None:
    """Print the measurements as a JSON line, in the first process."""
    with processes.joined():
        found = _measure(int(sys.argv[1]))
        if processes.first():
            print(json.dumps(found))


if __name__ == "__main__":
    main()
