"""How things are measured: interleaved medians, peak memory of one call, both allocators.

Seconds differ between machines and hours; ratios of medians taken in turns in one run carry
over. Memory is the highest resident size during one call above the resident size before it.
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
        """Times the limit."""
        return self.seconds / self.limit_seconds


@dataclass(frozen=True)
class Growth:
    """One log-log figure: seconds of each method against a size; nan where it was not run."""

    name: str
    title: str
    axis: str
    sizes: tuple[int, ...]
    seconds: dict[str, tuple[float, ...]]


def interleaved(
    works: dict[str, Callable[[], object]], *, repeats: int = 5, warmups: int = 1
) -> dict[str, float]:
    """Median seconds of each, run in turns so that noise falls on all alike.

    Each turn has an order of its own: whoever always ran after a peer that empties the cache, or
    gives its memory back to the system, would pay for that peer.

    With one thread (OMP_NUM_THREADS=1) these are seconds of CPU time, which are wall-clock
    seconds on a core of one's own: for a machine that others use too. What takes longer than
    PATIENCE is run once.
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
    """Peak resident memory during one call above that before it; nan without Linux's /proc."""
    if platform.system() != "Linux":
        return math.nan
    gc.collect()
    # Memory that was freed but kept would hide what the call takes.
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # forgets the highest resident size so far
    before = _status("VmRSS")
    work()
    return (_status("VmHWM") - before) / 1024


def resident_mb(*, highest: bool = False) -> float:
    """What this process holds now, or the most it ever held; nan without Linux's /proc."""
    if platform.system() != "Linux":
        return math.nan
    return _status("VmHWM" if highest else "VmRSS") / 1024


def _status(field: str) -> int:
    """A field of /proc/self/status, in kB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


def keep_memory() -> None:
    """Tell glibc to keep what it has, instead of mapping every large block anew (Linux)."""
    m_trim_threshold, m_mmap_max = -1, -4
    libc = ctypes.CDLL(None)
    libc.mallopt(m_mmap_max, 0)
    libc.mallopt(m_trim_threshold, 2**31 - 1)


@cache
def optional(name: str) -> ModuleType | None:
    """A peer's module, or None with a word where it is not installed."""
    if importlib.util.find_spec(name.partition(".")[0]) is None:
        print(f"{name} is not installed: its rows are left out")
        return None
    return importlib.import_module(name)
