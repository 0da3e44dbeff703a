"""Damage every file of a run directory in turn: it must be noticed or harmless, and be repaired.

`search` must refuse the run in one line or answer as before. Without its report, which is written
last, `train --resume` must end with the bits of an undisturbed run; only config.json, which a run
is made from, can't be made again, and is refused.
"""

import random
import shutil
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from torture.commands import Case, Commands, Ended
from torture.training import Place, differing, prepare


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


DAMAGES: dict[str, Callable[[Path, random.Random], object]] = {
    "a bit flipped": flip,
    "cut": cut,
    "emptied": lambda file, draw: file.write_bytes(b""),
    "gone": lambda file, draw: file.unlink(),
}


def campaign(
    home: Path, seed: int, *, flips: int = 3, only: Collection[str] = ()
) -> Iterator[Case]:
    """Damage every file (or `only` some) in every way; flip bits several times."""
    place, commands, draw = prepare(home, epochs=2), Commands(home), random.Random(seed)
    whole = home / "undisturbed"
    assert commands("index", whole).code == 0
    query = next(place.data.rglob("*.png"))
    answer = _answer(commands, whole, query)
    assert answer.code == 0, answer.said
    files = sorted(str(p.relative_to(whole)) for p in whole.rglob("*") if p.is_file())
    for file in only or files:
        for name, damage in DAMAGES.items():
            for _ in range(flips if damage is flip else 1):
                run = home / "hurt"  # a word that is in no message
                shutil.rmtree(run, ignore_errors=True)
                shutil.copytree(whole, run)
                damage(run / file, draw)
                yield _judge(commands, place, run, file, name, query, answer)


def _judge(
    commands: Commands, place: Place, run: Path, file: str, damage: str, query: Path, answer: Ended
) -> Case:
    complaints: list[str] = []
    found = _answer(commands, run, query)
    if not found.refused and (found.code or found.said != answer.said):
        complaints.append(f"search answered otherwise: {found.said[-300:]!r}")
    (run / "report.html").unlink(missing_ok=True)  # a finished run is not computed again
    resumed = commands("train", "--out", run, "--resume")
    # An index may hold other items than those of the training, so that it is not made anew.
    if not (resumed.refused and file.startswith(("config.json", "index/"))):
        complaints += [] if resumed.code == 0 else [f"did not resume: {resumed.said[-300:]!r}"]
        if file != "metrics.jsonl":  # which is told, and not learned from
            complaints += [f"differs: {name}" for name in differing(run, place.reference)]
    noticed = found.refused or resumed.refused or "damaged" in resumed.said
    seconds = found.seconds + resumed.seconds
    return Case(
        f"{file}, {damage}", noticed or "can't be read" in resumed.said, seconds, complaints
    )


def _answer(commands: Commands, run: Path, query: Path) -> Ended:
    ended = commands("search", run, query, "--json")
    return ended._replace(said=ended.said.replace(str(run), "RUN"))
