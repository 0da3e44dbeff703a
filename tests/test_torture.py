"""A quick selection of `make torture`: faults at some writes of the real command, some damages."""

import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.running import started
from torture import damage, disk, memory
from torture.faults import Commands, faulty_commands
from torture.training import LAST_STAGES, Place, command, differing, environment, prepare

pytestmark = [
    pytest.mark.torture,
    pytest.mark.skipif(
        sys.platform != "linux" or shutil.which("cc") is None, reason="needs Linux and cc"
    ),
]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return prepare(tmp_path_factory.mktemp("torture"), epochs=2)


@pytest.fixture(scope="module")
def run_command(place: Place) -> Iterator[Commands]:
    with faulty_commands(place.home) as run:
        yield run


@pytest.fixture(scope="module")
def writes(run_command: Commands, place: Place) -> int:
    return disk.writes_of(run_command, place)


@pytest.mark.parametrize(
    ("kind", "share"),
    [
        ("full (ENOSPC)", 0.0),
        ("full (ENOSPC)", 0.6),
        ("failing once (EIO)", 0.35),
        ("read-only (EROFS)", 0.8),
        ("killed at the call", 0.45),
    ],
)
def test_a_fault_at_a_write(
    kind: str, share: float, run_command: Commands, place: Place, writes: int
) -> None:
    assert writes > 50
    verdict = disk.run_with_fault(run_command, place, kind, 1 + int(share * writes))
    assert verdict.complaints == []
    assert not verdict.finished


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """A training of the last stages on kept activations."""
    return prepare(tmp_path_factory.mktemp("kept"), epochs=3, flags=LAST_STAGES)


@pytest.fixture(scope="module")
def run_kept(kept: Place) -> Iterator[Commands]:
    with faulty_commands(kept.home) as run:
        yield run


@pytest.fixture(scope="module")
def cache_writes(run_kept: Commands, kept: Place) -> int:
    return disk.cache_writes_of(run_kept, kept)


@pytest.mark.parametrize(
    ("kind", "share"),
    [
        ("full (ENOSPC)", 0.3),
        ("full (ENOSPC)", 0.7),
        ("failing once (EIO)", 0.6),
        ("read-only (EROFS)", 0.0),
        ("killed at the call", 0.6),
        ("killed at the call", 0.9),
    ],
)
def test_a_fault_in_the_cache(
    kind: str, share: float, run_kept: Commands, kept: Place, cache_writes: int
) -> None:
    """Activations that can't be cached are computed again; the model has the same bits."""
    assert cache_writes > 40
    at = 1 + int(share * cache_writes)
    assert disk.run_with_cache_fault(run_kept, kept, kind, at).complaints == []


def test_faults_do_happen(run_command: Commands, place: Place) -> None:
    """What the tests above rest on: the fault is real, and the comparison can fail."""
    run = place.home / "nothing"
    words = place.first(run)
    shorter = [*words[:-1], "1"]
    assert run_command(*shorter).code == 0
    assert differing(run, place.reference)
    shutil.rmtree(run)


def test_damage(run_command: Commands, place: Place) -> None:
    """A bit of the newest checkpoint, of the model, and of what the run was made with."""
    cases = damage.campaign(
        run_command,
        place,
        flips=1,
        seed=time.time_ns(),
        only=("checkpoints/step-4.safetensors", "model/model.json", "config.json"),
        how=("a bit flipped", "gone"),
    )
    found = {(case.file, case.damage): case for case in cases}
    assert len(found) == 6
    assert [case.complaints for case in found.values()] == [[]] * 6
    assert found["checkpoints/step-4.safetensors", "a bit flipped"].noticed
    assert found["model/model.json", "a bit flipped"].noticed


def test_memory_is_flat_over_epochs(tmp_path: Path) -> None:
    short, long = memory.over_epochs(tmp_path, 4, 40)
    assert long.megabytes - short.megabytes < 6


def test_a_second_signal_ends_it_at_once(place: Place, tmp_path: Path) -> None:
    """Both wait while the process is stopped, so that no save lies between them."""
    words = (*place.first(tmp_path / "run")[:-1], "2000")
    running = started(command(*words), after="epoch   2", env=environment(place.home))
    for number in (signal.SIGSTOP, signal.SIGINT, signal.SIGTERM, signal.SIGCONT):
        running.send_signal(number)
    said, _ = running.communicate(timeout=60)
    assert running.returncode == 130, said
    # Whether the first signal is answered depends on which thread takes the second one, and when.
    assert "resume with" not in said  # it did not wait for the step's end
    assert os.listdir(tmp_path / "run" / "checkpoints")


def test_a_picture_that_vanishes_from_under_a_worker(place: Place, tmp_path: Path) -> None:
    """Workers are threads: what one of them meets ends the training, with the file's name."""
    data = tmp_path / "data"
    shutil.copytree(place.data, data)
    words = ["train", str(data), "--out", str(tmp_path / "run"), "--num-workers", "2"]
    words += ["--preset", "small", "--epochs", "2000", "--test-fraction", "0"]
    # A cache that can't be made: pictures are decoded as they are needed.
    running = started(
        command(*words),
        after="epoch   1",
        env=environment(place.home) | {"NOFUSS_CACHE": "/dev/null/cache"},
    )
    (data / "class 3" / "1.png").unlink()
    said, _ = running.communicate(timeout=60)
    line = said.splitlines()[-1]
    assert running.returncode == 1, said
    assert "class 3/1.png: missing; restore it, then resume with: nofuss train --out" in line
