"""Measure time and memory: interleaved medians, peak memory of one call, both allocators.

Seconds differ between machines and hours; ratios of medians that are measured in turns in one run
differ less. Memory is the peak resident size during one call above that before it.
"""

import ctypes
import gc
import importlib
import importlib.util
import math
import platform
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType

import torch

PATIENCE = 60
"""Seconds; what takes longer is run once, and its memory is not measured."""


@dataclass(frozen=True)
class Row:
    """One line of the table: a method in a case, beside the limit of the same run."""

    section: str
    case: str
    method: str
    seconds: float
    limit_seconds: float = math.nan
    extra_mb: float = math.nan
    note: str = ""
    bar: float = math.nan
    """The most that seconds / limit_seconds may be."""

    @property
    def ratio(self) -> float:
        """Multiple of the limit."""
        return self.seconds / self.limit_seconds


@dataclass(frozen=True)
class Growth:
    """One log-log figure: values of each method against a size; nan where it was not run."""

    name: str
    title: str
    axis: str
    sizes: tuple[int, ...]
    values: dict[str, tuple[float, ...]]
    unit: str = "seconds"


def interleaved(
    works: dict[str, Callable[[], object]], *, repeats: int = 5, warmups: int = 1
) -> dict[str, float]:
    """Return median seconds of each, run in turns so that noise affects all alike.

    Each turn has another random order: a method that always ran after a peer that empties the
    cache, or returns memory to the system, would pay for that peer.

    With one thread (OMP_NUM_THREADS=1) these are seconds of CPU time, which equal wall-clock
    seconds on a free core, so that a busy machine can be used. What takes longer than PATIENCE is
    run once.
    """
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    times: dict[str, list[float]] = {name: [] for name in works}
    for turn in range(warmups + repeats):
        for name, work in random.Random(turn).sample([*works.items()], len(works)):
            if times[name] and times[name][-1] > PATIENCE:
                continue
            start = clock()
            work()
            if turn >= warmups:
                times[name].append(clock() - start)
    return {name: statistics.median(each) for name, each in times.items()}


def extra_mb(work: Callable[[], object]) -> float:
    """Return the peak memory during one call above that before; nan without Linux's /proc."""
    if platform.system() != "Linux":
        return math.nan
    gc.collect()
    # Freed memory that the allocator kept would hide what the call needs.
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak resident size
    before = _status("VmRSS")
    work()
    return (_status("VmHWM") - before) / 1024


def resident_mb(*, highest: bool = False) -> float:
    """Return the resident memory of this process, now or at its peak; nan without /proc."""
    if platform.system() != "Linux":
        return math.nan
    return _status("VmHWM" if highest else "VmRSS") / 1024


def _status(field: str) -> int:
    """Return a field of /proc/self/status, in kB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


def keep_memory() -> None:
    """Make glibc keep freed memory instead of mapping every large block again (Linux)."""
    m_trim_threshold, m_mmap_max = -1, -4
    libc = ctypes.CDLL(None)
    libc.mallopt(m_mmap_max, 0)
    libc.mallopt(m_trim_threshold, 2**31 - 1)


@cache
def optional(name: str) -> ModuleType | None:
    """Import a peer's module; print a line and return None if it is not installed."""
    if importlib.util.find_spec(name.partition(".")[0]) is None:
        print(f"{name} is not installed: its rows are left out")
        return None
    return importlib.import_module(name)
