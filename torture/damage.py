"""Damage every file of a run directory in turn: it must be noticed or harmless, and be repaired.

`search` must refuse the run in one line or answer as before. Without its report, which is written
last, `train --resume` must end with the bits of an undisturbed run; only config.json, which a run
is made from, can't be made again, and is refused.
"""

import random
import shutil
from collections.abc import Callable, Collection, Container, Iterator
from pathlib import Path
from typing import NamedTuple

from torture.faults import Commands, Outcome
from torture.training import Place, differing

Damage = Callable[[Path, random.Random], None]


def flip(file: Path, draw: random.Random) -> None:
    """Flip one bit anywhere."""
    content = bytearray(file.read_bytes())
    if content:
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    file.write_bytes(content)


def cut(file: Path, draw: random.Random) -> None:
    """Cut off the end."""
    content = file.read_bytes()
    file.write_bytes(content[: draw.randrange(len(content) or 1)])


def empty(file: Path, draw: random.Random) -> None:
    """Empty the file."""
    file.write_bytes(b"")


def remove(file: Path, draw: random.Random) -> None:
    """Delete the file."""
    file.unlink()


DAMAGES: dict[str, Damage] = {"a bit flipped": flip, "cut": cut, "emptied": empty, "gone": remove}


class Case(NamedTuple):
    """One file, damaged in one way."""

    file: str
    damage: str
    noticed: bool
    """Whether `search` or the resumption said something about it."""
    complaints: list[str]


def finished_run(run_command: Commands, place: Place) -> Path:
    """Make a run with an index."""
    run = place.home / "whole"
    for words in (place.first(run), ("index", run)):
        outcome = run_command(*words)
        assert outcome.code == 0, outcome.said
    return run


def campaign(
    run_command: Commands,
    place: Place,
    *,
    flips: int,
    seed: int,
    only: Container[str] | None = None,
    how: Collection[str] = tuple(DAMAGES),
) -> Iterator[Case]:
    """Damage every file (or `only` some) in every way (or `how`); flip bits several times."""
    draw = random.Random(seed)
    whole = finished_run(run_command, place)
    query = next(place.data.rglob("*.png"))
    answer = _answer(run_command, whole, query)
    assert answer.code == 0, answer.said
    files = sorted(str(p.relative_to(whole)) for p in whole.rglob("*") if p.is_file())
    for file in files if only is None else filter(only.__contains__, files):
        for name, damage in ((name, DAMAGES[name]) for name in how):
            for _ in range(flips if damage is flip else 1):
                run = place.home / "hurt"  # a word that is in no message
                shutil.rmtree(run, ignore_errors=True)
                shutil.copytree(whole, run)
                damage(run / file, draw)
                yield _judge(run_command, place, run, file, name, query, answer)


def _judge(
    run_command: Commands,
    place: Place,
    run: Path,
    file: str,
    damage: str,
    query: Path,
    answer: Outcome,
) -> Case:
    complaints: list[str] = []
    found = _answer(run_command, run, query)
    refused = _refused(found)
    if not refused and (found.code or found.said != answer.said):
        complaints.append(f"search answered otherwise: {found.said[-300:]!r}")
    (run / "report.html").unlink(missing_ok=True)  # a finished run is not computed again
    resumed = run_command("train", "--out", str(run), "--resume")
    if file == "config.json":
        if not _refused(resumed) and (resumed.code or differing(run, place.reference)):
            complaints.append(f"resumed: {resumed.said[-300:]!r}")
    else:
        if resumed.code:
            complaints.append(f"did not resume: {resumed.said[-300:]!r}")
        complaints += [f"differs: {name}" for name in differing(run, place.reference)]
    reported = "damaged" in resumed.said or "can't be read" in resumed.said
    return Case(file, damage, refused or _refused(resumed) or reported, complaints)


def _answer(run_command: Commands, run: Path, query: Path) -> Outcome:
    outcome = run_command("search", run, query, "--json")
    return outcome._replace(said=outcome.said.replace(str(run), "RUN"))


def _refused(outcome: Outcome) -> bool:
    """Return whether it ended with one line that is meant for the user."""
    lines = outcome.said.strip().splitlines()
    return outcome.code == 2 and lines[-1].startswith("nofuss: ") and "unexp" not in lines[-1]
