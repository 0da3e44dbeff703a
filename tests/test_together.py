"""Two commands at once on one run: real processes, real signals."""

import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from nofuss.cli import main
from tests.running import started
from tests.training.together import end, environment, start, torchrun, wait_for, workers
from torture import together
from torture.training import FLAGS, command, write_pictures

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")


@pytest.mark.torture
@pytest.mark.skipif(shutil.which("cc") is None, reason="needs cc")
def test_nothing_is_lost_or_mixed(tmp_path: Path) -> None:
    """A round of `make torture`: two trainings, a kill and a resumption, two updates."""
    cases = list(together.campaign(tmp_path, 0, rounds=1))
    assert [case.complaints for case in cases] == [[]] * 3


@pytest.mark.torchrun
def test_processes_of_one_torchrun_share_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One run, two processes; others are kept out, and a second torchrun ends in one line."""
    data, run, log = write_pictures(tmp_path / "data"), tmp_path / "run", tmp_path / "log"
    monkeypatch.setenv("NOFUSS_CACHE", str(tmp_path / "cache"))
    resume = ["train", "--out", str(run), "--resume"]
    words = ["train", str(data), "--out", str(run), *FLAGS, "--epochs", "100000"]
    agent = start(torchrun(2, "-m", "nofuss", *words), log)
    try:
        wait_for(lambda: "epoch   2" in log.read_text(), seconds=120, what="the second epoch")
        assert main(resume) == 2
        assert "run is being written by process" in "".join(capsys.readouterr())
        second = subprocess.run(
            torchrun(2, "-m", "nofuss", *resume),
            env=environment(),
            capture_output=True,
            text=True,
            timeout=180,
            check=False,
        )
        lines = [line for line in second.stderr.splitlines() if line.startswith("nofuss: ")]
        assert second.returncode != 0
        assert len(lines) == 1, second.stderr
        assert "run is being written by process" in lines[0]
    finally:
        ours = workers(agent.pid)
        end(agent)
    for process in ours.values():
        gone = Path(f"/proc/{process}")
        wait_for(lambda gone=gone: not gone.exists(), seconds=30, what="their end")
    resumed = started(command(*resume), after="resuming at epoch")
    resumed.send_signal(signal.SIGINT)
    said, _ = resumed.communicate(timeout=120)
    assert resumed.returncode == 130, said
