"""Runs that a stranger made: links, special files, huge files, and values that training never
writes (`forgeries.py`).

Every attack gets a copy of one finished run. A folder beside it stands for the rest of the disk: no
byte in it may change, and no file may be added.
"""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from nofuss.files import LOCK
from torture.forgeries import CHECKPOINT, CONFIG, INDEX, MODEL, NAMED, Forge
from torture.forked import run_forked
from torture.measured import Case, judged
from torture.training import FLAGS, write_pictures


class Attack(NamedTuple):
    """A forgery, and the commands to run on it."""

    name: str
    forge: Forge
    commands: tuple[str, ...]


def campaign(home: Path, seed: int) -> Iterator[Case]:
    """Run every attack."""
    data, whole = write_pictures(home / "data"), home / "whole"
    make: list[tuple[object, ...]] = [("train", data, "--out", whole, *FLAGS, "--epochs", "2")]
    for words in [*make, ("index", whole)]:
        ended = run_forked(home, *words)
        assert ended.code == 0, ended.said
    for attack in ATTACKS:
        for command in attack.commands:
            yield _run_attack(home, whole, data, attack, command)


def _run_attack(home: Path, whole: Path, data: Path, attack: Attack, command: str) -> Case:
    run, disk = home / "run", home / "disk"
    for folder in (run, disk):
        shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(whole, run)
    shutil.copytree(whole, disk / "other run")
    (disk / "precious").write_text("precious")
    if command == "train":
        (run / "report.html").unlink()  # a finished run is not computed again
    attack.forge(run, disk)
    before = contents(disk)
    query = data / "class 0"
    words: dict[str, tuple[object, ...]] = {
        "evaluate": ("evaluate", run),
        "index": ("index", run, query),
        "search": ("search", run, query / "0.png", "--json"),
        "embed": ("embed", run, query, "--out", home / f"{os.urandom(8).hex()}.npz"),
        "train": ("train", "--out", run, "--resume"),
    }
    ended = run_forked(home, *words[command])
    names = {name for name, _ in before.items() ^ contents(disk).items()}
    others = [f"changed outside: {name}" for name in sorted(names)]
    if command == "search" and "NaN" in ended.said.partition("nofuss: ")[0]:
        others.append("answered with NaN")
    return judged(f"{attack.name}, {command}", ended, *others)


def contents(folder: Path) -> dict[str, bytes]:
    """Return the content of all files below a folder."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.stat().st_size < 2**30
    }


# Links and special files: a run that has one is refused when it is opened


def file_link(name: str) -> Forge:
    """Put a link to a file elsewhere in the place of a file."""

    def forge(run: Path, disk: Path) -> None:
        (run / name).unlink(missing_ok=True)
        (run / name).symlink_to(disk / "precious")

    return forge


def folder_link(name: str) -> Forge:
    """Replace a sub-folder by a link to another run's."""

    def forge(run: Path, disk: Path) -> None:
        shutil.rmtree(run / name)
        (run / name).symlink_to(disk / "other run" / name)

    return forge


def pipe(run: Path, disk: Path) -> None:
    """Put a pipe in the place of a file that is read."""
    (run / "metrics.jsonl").unlink()
    os.mkfifo(run / "metrics.jsonl")


def sparse(path: Path) -> None:
    """Make a sparse file of a terabyte."""
    with path.open("wb") as file:
        file.truncate(2**40)


def large(name: str) -> Forge:
    """Put a terabyte of zeros in the place of a file."""

    def forge(run: Path, disk: Path) -> None:
        file = next(iter(run.glob(name)))
        file.unlink()
        sparse(file)

    return forge


READERS, WRITERS = ("search", "embed"), ("evaluate", "index", "train")
LINKS = [
    *(
        Attack(f"{name} is a link", file_link(name), (*READERS, *WRITERS))
        for name in (
            "scores.json",
            LOCK,
            "index/*.json",
            "checkpoints/step-4/state.json",
        )
    ),
    *(
        Attack(f"{name}/ is a link", folder_link(name), (*READERS, *WRITERS))
        for name in ("index", "checkpoints", "model")
    ),
    Attack("metrics.jsonl is a pipe", pipe, (*READERS, *WRITERS)),
]
READ = {
    "config.json": ("search",),
    "model/model.json": ("search",),
    "model/weights-*": ("search",),
    "index/*.json": ("search",),
    "index/items-*": ("search",),
    "index/vectors-*": ("search",),
    "proxies.safetensors": ("evaluate",),
    "scores.json": ("evaluate",),
    "metrics.jsonl": ("evaluate",),
    "checkpoints/step-4.safetensors": ("train",),
}
LARGE = [
    Attack(f"{name} is a terabyte of zeros", large(name), commands)
    for name, commands in READ.items()
]


# Values that training never writes


FORGED = [
    *(Attack(f"model: {name}", forge, ("search", "embed")) for name, forge in MODEL.items()),
    *(Attack(f"index: {name}", forge, ("search", "index")) for name, forge in INDEX.items()),
    *(Attack(f"index: {name}", forge, ("search",)) for name, forge in NAMED.items()),
    *(Attack(f"checkpoint: {name}", forge, ("train",)) for name, forge in CHECKPOINT.items()),
    *(Attack(f"config: {name}", forge, ("evaluate", "train")) for name, forge in CONFIG.items()),
]
ATTACKS = [*LINKS, *LARGE, *FORGED]
