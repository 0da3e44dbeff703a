"""Cached activations: read back as computed, by record; kills, damage and full disks."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from nofuss.cache import cache_directory
from nofuss.data.sampling import Indices
from nofuss.model.activations import Activations

SHAPE, COUNT, VIEWS = (3, 4, 4), 20, 3
SIZE = 3 * 4 * 4 * 2 + 4
NAME = f"activations-{1:032x}"


class Computed:
    """Random activations by (view, row), and which were asked for."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, int]] = []

    def __call__(self, view: int, rows: Indices) -> Tensor:
        """Return them in single precision."""
        self.asked += [(view, int(row)) for row in rows]
        return torch.stack([expected(view, int(row)) for row in rows])


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Room is made among the files of the cache: not among the user's."""
    monkeypatch.setenv("NOFUSS_CACHE", str(tmp_path))


def expected(view: int, row: int) -> Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(100 * view + row))


def opened(name: str | None) -> tuple[Activations, Computed]:
    compute = Computed()
    return Activations(compute, shape=SHAPE, count=COUNT, views=VIEWS, name=name), compute


def rounded(view: int, rows: Indices) -> Tensor:
    return torch.stack([expected(view, int(row)).half().float() for row in rows])


ROWS = np.array([3, 0, 17])


def take_all(activations: Activations, view: int, rows: Indices = ROWS) -> None:
    torch.testing.assert_close(activations.take(view, rows), rounded(view, rows), rtol=0, atol=0)


def test_what_is_cached_is_what_was_computed(caplog: pytest.LogCaptureFixture) -> None:
    activations, compute = opened(NAME)
    for view in range(VIEWS):
        for _ in range(2):
            take_all(activations, view)
    assert len(compute.asked) == len(ROWS) * VIEWS
    again, compute = opened(NAME)
    take_all(again, 1, ROWS[::-1].copy())
    assert not compute.asked
    assert (cache_directory() / f"{NAME}.records").stat().st_size == COUNT * VIEWS * SIZE
    uncached, compute = opened(None)
    for _ in range(2):
        take_all(uncached, 2)
    assert len(compute.asked) == 2 * len(ROWS)
    assert not caplog.records


def test_a_damaged_record_is_computed_again() -> None:
    file = cache_directory() / f"{NAME}.records"
    opened(NAME)[0].take(0, ROWS)
    content = bytearray(file.read_bytes())
    content[17 * SIZE + 50] ^= 1
    file.write_bytes(content)
    activations, compute = opened(NAME)
    take_all(activations, 0)
    assert (0, 17) in compute.asked
    activations, compute = opened(NAME)
    take_all(activations, 0)
    assert not compute.asked


def test_views_over_the_limit_are_computed_in_every_epoch(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("nofuss.cache.LIMIT", 2 * COUNT * SIZE)
    caplog.set_level("INFO")
    activations, compute = opened(NAME)
    for view in (0, 2, 0, 2):
        take_all(activations, view)
    assert compute.asked.count((0, 17)) == 1
    assert compute.asked.count((2, 17)) == 2
    [message] = caplog.messages
    assert "room for activations of 2 of 3 views" in message


def run_here(script: str) -> subprocess.Popen[str]:
    """Start a process with what this module has."""
    here = f"import sys\nsys.path.insert(0, {str(Path(__file__).parent)!r})\n"
    whole = f"{here}from test_activations import *\n{script}"
    return subprocess.Popen([sys.executable, "-c", whole], stdout=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_a_full_disk_is_one_line() -> None:
    """A limit on the size of files stands in for the disk: fallocate fails in the same place."""
    process = run_here("""
import logging, resource
logging.basicConfig(level="INFO", format="%(message)s", stream=sys.stdout)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
activations, compute = opened(NAME)
for _ in range(2):
    take_all(activations, 0)
""")
    said, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    assert said.count("\n") == 1
    assert "activations can't be cached (File too large)" in said
    assert not (cache_directory() / f"{NAME}.records").exists()


@pytest.mark.slow
def test_killed_while_writing() -> None:
    """What a killed process has written is used; the rest is computed, and all of it is right."""
    process = run_here("""
activations, _ = opened(NAME)
for row in range(COUNT):
    activations.take(0, np.array([row]))
    print(row, flush=True)
""")
    assert process.stdout is not None
    while int(process.stdout.readline()) < 5:
        pass
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    activations, compute = opened(NAME)
    for row in range(COUNT):
        take_all(activations, 0, np.array([row]))
    assert not {(0, row) for row in range(6)} & set(compute.asked)
