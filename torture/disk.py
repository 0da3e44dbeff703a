"""Let a disk fill up, fail or turn read-only at every write in turn; or kill the process there."""

import errno
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

from nofuss.files import LOCK
from nofuss.training.checkpoint import load_checkpoint
from torture.faults import KILL, Commands, Fault, Outcome
from torture.training import Place, differing, logged

KINDS = {
    "full (ENOSPC)": (errno.ENOSPC, False),
    "failing (EIO)": (errno.EIO, False),
    "failing once (EIO)": (errno.EIO, True),
    "read-only (EROFS)": (errno.EROFS, False),
    "killed at the call": (KILL, False),
}
PATIENCE = 5.0
"""Seconds that a command may take to end, from its start."""


class Verdict(NamedTuple):
    """The result of one fault."""

    complaints: list[str]
    seconds: float
    finished: bool
    """Whether the command finished all the same: the fault hit something optional."""


def writes_of(run_command: Commands, place: Place) -> int:
    """Return how many calls of an undisturbed run change something below its directory."""
    run = place.home / "counted"
    shutil.rmtree(run, ignore_errors=True)
    outcome = run_command(*place.first(run), fault=Fault(run, at=0))
    assert outcome.code == 0, outcome.said
    shutil.rmtree(run)
    return outcome.writes


def run_with_fault(run_command: Commands, place: Place, kind: str, at: int) -> Verdict:
    """Run with one fault, check the output, resume, and compare with an undisturbed run."""
    error, once = KINDS[kind]
    run = place.home / "faulty"
    shutil.rmtree(run, ignore_errors=True)
    outcome = run_command(*place.first(run), fault=Fault(run, at, error, once))
    if error == KILL:
        complaints = [] if outcome.code == -9 else [f"not killed: {outcome.code}"]
    else:
        complaints = _unclear(outcome, run)
    return Verdict(complaints + _resume(run_command, place, run), outcome.seconds, not outcome.code)


def cache_writes_of(run_command: Commands, place: Place) -> int:
    """Return how many calls of a run change something in an empty cache."""
    run = place.home / "counted"
    for folder in (run, place.cache):
        shutil.rmtree(folder, ignore_errors=True)
    outcome = run_command(*place.first(run), fault=Fault(place.cache, at=0))
    assert outcome.code == 0, outcome.said
    assert list(place.cache.glob("activations-*.records"))
    shutil.rmtree(run)
    return outcome.writes


def run_with_cache_fault(run_command: Commands, place: Place, kind: str, at: int) -> Verdict:
    """Run with an empty cache that fails at one write; the result must have the same bits.

    A cache is optional: only a kill may end the command.
    """
    error, once = KINDS[kind]
    run = place.home / "faulty"
    for folder in (run, place.cache):
        shutil.rmtree(folder, ignore_errors=True)
    outcome = run_command(*place.first(run), fault=Fault(place.cache, at, error, once))
    expected = -9 if error == KILL else 0
    complaints = [] if outcome.code == expected else [f"exit {outcome.code}: {outcome.said!r}"]
    told = {line for line in outcome.said.splitlines() if "activations" in line}
    if len(told) > 1 or "Traceback" in outcome.said:
        complaints.append(f"unclear: {told}")
    if error == KILL:
        return Verdict(complaints + _resume(run_command, place, run), outcome.seconds, False)
    complaints += [f"differs: {name}" for name in differing(run, place.reference)]
    return Verdict(complaints, outcome.seconds, not told)


def fill(run_command: Commands, place: Place, kilobytes: int) -> Verdict:
    """Run on a real disk that is too small, enlarge it and resume; needs root."""
    disk = place.home / "small"
    disk.mkdir(exist_ok=True)
    _mount("-t", "tmpfs", "-o", f"size={kilobytes}k", "none", disk)
    try:
        run = disk / "run"
        outcome = run_command(*place.first(run))
        complaints = _unclear(outcome, run)
        _mount("-o", "remount,size=256m", disk)
        complaints += _resume(run_command, place, run)
    finally:
        subprocess.run(["umount", str(disk)], check=True)
    return Verdict(complaints, outcome.seconds, not outcome.code)


def can_mount(place: Place) -> bool:
    """Return whether small disks can be mounted here."""
    try:
        _mount("-t", "tmpfs", "none", place.home / "data", stderr=subprocess.DEVNULL)
    except (OSError, subprocess.CalledProcessError):
        return False
    return subprocess.run(["umount", str(place.home / "data")]).returncode == 0


def _mount(*words: object, stderr: int | None = None) -> None:
    subprocess.run(["mount", *map(str, words)], check=True, stderr=stderr)


def _unclear(outcome: Outcome, run: Path) -> list[str]:
    """Return complaints about how a command that could not write has ended."""
    complaints = []
    if outcome.code:
        line = outcome.said.splitlines()[-1] if outcome.said else ""
        cure = f"--out {run} --resume" if (run / "config.json").is_file() else "--out"
        if outcome.code not in (1, 2) or not line.startswith("nofuss: ") or cure not in line:
            complaints.append(f"exit {outcome.code}, said {line!r}")
        if "unexpected" in line or "Traceback" in outcome.said:
            complaints.append(f"unexpected: {line!r}")
    if outcome.seconds > PATIENCE:
        complaints.append(f"took {outcome.seconds:.1f} s to end")
    return complaints


def _resume(run_command: Commands, place: Place, run: Path) -> list[str]:
    """Resume the run; return complaints about what was left and about the result."""
    with logged() as complaints:
        load_checkpoint(run / "checkpoints")
    resumed = run_command(*place.again(run))
    if resumed.code:
        complaints.append(f"did not resume: {resumed.said.strip().splitlines()[-1:]}")
    complaints += [f"differs: {name}" for name in differing(run, place.reference)]
    return complaints + [f"left behind: {path}" for path in remains(run)]


def remains(run: Path) -> list[Path]:
    """Return half-written files that were not removed."""
    return sorted(path.relative_to(run) for path in run.rglob(".*") if path.name != LOCK)
