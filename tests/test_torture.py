"""A quick selection of `make torture`: faults at some writes of the real command, some damages."""

import os
import shutil
import signal
import sys
from pathlib import Path

import pytest

from tests.running import started
from torture import damage, disk
from torture.commands import Commands
from torture.training import FLAGS, LAST_STAGES, Place, command, differing, environment, prepare

pytestmark = [
    pytest.mark.torture,
    pytest.mark.skipif(
        sys.platform != "linux" or shutil.which("cc") is None, reason="needs Linux and cc"
    ),
]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return prepare(tmp_path_factory.mktemp("torture"), epochs=2)


@pytest.mark.parametrize(
    ("below", "flags", "epochs"), [("run", FLAGS, 2), ("cache", LAST_STAGES, 3)]
)
def test_faults_at_writes(below: str, flags: tuple[str, ...], epochs: int, tmp_path: Path) -> None:
    """Of a run, and of the cache of its activations; the model has the same bits in the end."""
    place = prepare(tmp_path, epochs=epochs, flags=flags)
    commands = Commands(tmp_path)
    writes = disk.writes_of(commands, place, below)
    assert writes > 40
    for share, kind in zip((0.1, 0.6, 0.35, 0.8, 0.45), disk.KINDS, strict=True):
        case = disk.run_with_fault(commands, place, below, kind, 1 + int(share * writes))
        assert case.complaints == [], case.name
        assert case.refused == (below == "run" or kind == "killed at the call"), case.name


def test_faults_do_happen(place: Place) -> None:
    """What the test above rests on: the comparison can fail."""
    run = place.home / "nothing"
    assert Commands(place.home)(*place.first(run)[:-1], "1").code == 0
    assert differing(run, place.reference)


def test_damage(tmp_path: Path) -> None:
    """Of the newest checkpoint, of the model, and of what the run was made with."""
    files = ("checkpoints/step-4.safetensors", "model/model.json", "config.json")
    cases = list(damage.campaign(tmp_path, 0, flips=1, only=files))
    assert len(cases) == 12
    assert [case.complaints for case in cases] == [[]] * 12
    assert sum(case.refused for case in cases) > 6


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
    assert "class 3/1.png: missing; fix it, then resume with: nofuss train --out" in line
