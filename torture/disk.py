"""Let a disk fill up, fail or turn read-only at every write in turn; or kill the process there.

Below the run the command must stop with one line and the words to resume; what then resumes must
end with the bits of an undisturbed run. Below the cache it must finish with those bits.
"""

import errno
import shutil
from collections.abc import Iterator
from pathlib import Path

from nofuss.files import LOCK
from nofuss.training.checkpoint import load_checkpoint
from torture.commands import KILL, Case, Commands, Ended, Fault
from torture.training import FLAGS, LAST_STAGES, Place, differing, logged, prepare

KINDS = {
    "full": (errno.ENOSPC, False),
    "failing": (errno.EIO, False),
    "failing once": (errno.EIO, True),
    "read-only": (errno.EROFS, False),
    "killed at the call": (KILL, False),
}


def campaign(home: Path, seed: int, *, every: int = 5) -> Iterator[Case]:
    """Fail every n-th write of a run, then of a cache of activations, in every way."""
    for name, flags, epochs in (("run", FLAGS, 2), ("cache", LAST_STAGES, 3)):
        (home / name).mkdir()
        place, commands = prepare(home / name, epochs=epochs, flags=flags), Commands(home / name)
        for at in range(1, 1 + writes_of(commands, place, name), every):
            for kind in KINDS:
                yield run_with_fault(commands, place, name, kind, at)


def writes_of(commands: Commands, place: Place, below: str) -> int:
    """Return how many calls of an undisturbed run change something below it, or the cache."""
    ended = commands(*place.first(_fresh(place)), fault=Fault(_folder(place, below), at=0))
    assert ended.code == 0, ended.said
    return ended.writes


def run_with_fault(commands: Commands, place: Place, below: str, kind: str, at: int) -> Case:
    """Run with one fault, check the output, resume, and compare with an undisturbed run."""
    error, once = KINDS[kind]
    run = _fresh(place)
    ended = commands(*place.first(run), fault=Fault(_folder(place, below), at, error, once))
    if error == KILL:
        complaints = [] if ended.code == -9 else [f"not killed: {ended.code}"]
    elif below == "cache":
        complaints = [] if ended.code == 0 else [f"exit {ended.code}, said {ended.line!r}"]
    else:
        complaints = _unclear(ended, run)
    with logged() as damaged:
        load_checkpoint(run / "checkpoints")
    complaints += damaged
    if ended.code:
        resumed = commands(*place.again(run))
        complaints += [] if resumed.code == 0 else [f"did not resume: {resumed.line!r}"]
    complaints += [f"differs: {name}" for name in differing(run, place.reference)]
    complaints += [f"left behind: {path.name}" for path in remains(run)]
    return Case(f"{below} {kind}, write {at}", ended.code != 0, ended.seconds, complaints)


def _fresh(place: Place) -> Path:
    """Return where a run may be made, beside an empty cache."""
    run = place.home / "disturbed"
    for folder in (run, place.home / "cache"):
        shutil.rmtree(folder, ignore_errors=True)
    return run


def _folder(place: Place, below: str) -> Path:
    return place.home / ("cache" if below == "cache" else "disturbed")


def _unclear(ended: Ended, run: Path) -> list[str]:
    """Return complaints about how a command that could not write has ended."""
    if ended.code == 0:
        return []  # the fault hit something optional
    cure = f"--out {run} --resume" if (run / "config.json").is_file() else "--out"
    return ended.complaints() or [f"no cure in {ended.line!r}"] * (cure not in ended.line)


def remains(run: Path) -> list[Path]:
    """Return half-written files that were not removed."""
    return sorted(path for path in run.rglob(".*") if path.name != LOCK)
