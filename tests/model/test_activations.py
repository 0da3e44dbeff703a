"""Kept activations: read back as computed, by record; kills, damage and full disks."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from nofuss.cache import Records
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


def opened(name: str | None) -> tuple[Activations, Computed, list[str]]:
    compute, lines = Computed(), []
    kept = Activations(compute, shape=SHAPE, count=COUNT, views=VIEWS, name=name, say=lines.append)
    return kept, compute, lines


def rounded(view: int, rows: Indices) -> Tensor:
    return torch.stack([expected(view, int(row)).half().float() for row in rows])


ROWS = np.array([3, 0, 17])


def test_what_is_kept_is_what_was_computed(tmp_path: Path) -> None:
    kept, compute, lines = opened(NAME)
    for view in range(VIEWS):
        for _ in range(2):
            torch.testing.assert_close(kept.take(view, ROWS), rounded(view, ROWS), rtol=0, atol=0)
    assert len(compute.asked) == len(ROWS) * VIEWS
    again, compute, _ = opened(NAME)
    torch.testing.assert_close(again.take(1, ROWS[::-1]), rounded(1, ROWS[::-1]), rtol=0, atol=0)
    assert not compute.asked
    assert not lines
    assert Records.file_of(NAME).stat().st_size == COUNT * VIEWS * SIZE


def test_without_a_file_the_values_are_the_same() -> None:
    kept, compute, lines = opened(None)
    for _ in range(2):
        torch.testing.assert_close(kept.take(2, ROWS), rounded(2, ROWS), rtol=0, atol=0)
    assert len(compute.asked) == 2 * len(ROWS)
    assert not lines


@pytest.mark.parametrize("offset", [0, 50, SIZE - 1])
def test_a_damaged_record_is_computed_again(tmp_path: Path, offset: int) -> None:
    file = Records.file_of(NAME)
    opened(NAME)[0].take(0, ROWS)
    content = bytearray(file.read_bytes())
    content[17 * SIZE + offset] ^= 1
    file.write_bytes(content)
    kept, compute, _ = opened(NAME)
    torch.testing.assert_close(kept.take(0, ROWS), rounded(0, ROWS), rtol=0, atol=0)
    assert (0, 17) in compute.asked
    kept, compute, _ = opened(NAME)
    kept.take(0, ROWS)
    assert not compute.asked


def test_views_over_the_limit_are_computed_in_every_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nofuss.cache.LIMIT", 2 * COUNT * SIZE)
    kept, compute, lines = opened(NAME)
    for view in (0, 2, 0, 2):
        torch.testing.assert_close(kept.take(view, ROWS), rounded(view, ROWS), rtol=0, atol=0)
    assert compute.asked.count((0, 17)) == 1
    assert compute.asked.count((2, 17)) == 2
    assert len(lines) == 1
    assert "1 of 3 views are computed again in every epoch" in lines[0]


@pytest.mark.slow
def test_a_full_disk_is_one_line(tmp_path: Path) -> None:
    """A limit on the size of files stands in for the disk: fallocate fails in the same place."""
    script = f"""
import resource, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from test_activations import *
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
kept, compute, lines = opened(NAME)
for _ in range(2):
    torch.testing.assert_close(kept.take(0, ROWS), rounded(0, ROWS), rtol=0, atol=0)
print(*lines, sep="\\n")
"""
    file = Records.file_of(NAME)
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.count("\n") == 1
    assert "activations can't be cached (File too large)" in done.stdout
    assert not file.exists()


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    target = tmp_path / "mine.txt"
    target.write_text("mine")
    Records.file_of(NAME).symlink_to(target)
    kept, _, lines = opened(NAME)
    torch.testing.assert_close(kept.take(0, ROWS), rounded(0, ROWS), rtol=0, atol=0)
    assert target.read_text() == "mine"
    assert len(lines) == 1


@pytest.mark.slow
def test_killed_while_writing(tmp_path: Path) -> None:
    """What a killed process has written is used; the rest is computed, and all of it is right."""
    script = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from test_activations import *
kept, _, _ = opened(NAME)
for row in range(COUNT):
    kept.take(0, np.array([row]))
    print(row, flush=True)
"""
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    while int(process.stdout.readline()) < 5:
        pass
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    kept, compute, _ = opened(NAME)
    everything = np.arange(COUNT)
    for row in everything:
        torch.testing.assert_close(
            kept.take(0, np.array([row])), rounded(0, np.array([row])), rtol=0, atol=0
        )
    assert not {(0, row) for row in range(6)} & set(compute.asked)
