"""Runs that a stranger made: links where commands write, special files where they read, and values
that training never writes (`forgeries.py`).

Every attack gets a copy of one finished run. A folder beside it stands for the rest of the disk: no
byte in it may change, and no file may be added.
"""

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from nofuss.files.lock import LOCK
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
    attack.forge(run, disk)
    before = contents(disk)
    query = data / "class 0"
    words: dict[str, tuple[object, ...]] = {
        "evaluate": ("evaluate", run),
        "index": ("index", run, query),
        "search": ("search", run, query / "0.png", "--json"),
        "show": ("search", run, query / "0.png", "--show", home / f"{os.urandom(8).hex()}.png"),
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


# Links where something is written


def file_link(name: str) -> Forge:
    """Put a link to a file elsewhere in the place of a file that is written."""

    def forge(run: Path, disk: Path) -> None:
        (run / name).unlink(missing_ok=True)
        (run / name).symlink_to(disk / "precious")

    return forge


def hard_link(name: str) -> Forge:
    """Put a hard link to a file elsewhere in the place of a file that is written."""

    def forge(run: Path, disk: Path) -> None:
        (run / name).unlink(missing_ok=True)
        (run / name).hardlink_to(disk / "precious")

    return forge


def folder_link(name: str) -> Forge:
    """Replace a sub-folder by a link to another run's."""

    def forge(run: Path, disk: Path) -> None:
        shutil.rmtree(run / name)
        (run / name).symlink_to(disk / "other run" / name)

    return forge


def checkpoint_link(run: Path, disk: Path) -> None:
    """Replace checkpoints, which are removed when there are newer ones, by another run's."""
    for step in (run / "checkpoints").iterdir():
        step.unlink()
        step.symlink_to(disk / "other run" / "checkpoints" / step.name)


WRITERS = ("evaluate", "index", "train")
LINKS = [
    *(
        Attack(f"{name} is a link", file_link(name), ("index",))
        for name in ("index/..items.new.new", "index/.vectors.new", "index/.manifest.json.new")
    ),
    *(
        Attack(f"{name} is a link", file_link(name), ("evaluate", "train"))
        for name in (
            *(".scores.json.new", ".report.html.new", ".README.md.new"),
            ".embeddings.safetensors.new",
        )
    ),
    *(
        Attack(f"{name} is a link", file_link(name), ("train",))
        for name in (".metrics.jsonl.new", ".config.json.new", "metrics.jsonl")
    ),
    *(
        Attack(f"{name} is a link", file_link(name), ("evaluate",))
        for name in ("scores.json", "report.html", "suspects.csv", "embeddings.safetensors")
    ),
    *(
        Attack(f"{name} is a link", file_link(name), ("evaluate", "train"))
        for name in ("README.md",)
    ),
    *(
        Attack(f"{LOCK} is a {kind}", make(LOCK), WRITERS)
        for kind, make in (("link", file_link), ("hard link", hard_link))
    ),
    *(
        Attack(f"{name} is a hard link", hard_link(name), ("evaluate",))
        for name in ("scores.json", "report.html")
    ),
    *(
        Attack(f"{name}/ is a link", folder_link(name), WRITERS)
        for name in ("index", "checkpoints", "model")
    ),
    Attack("checkpoints/step-N is a link", checkpoint_link, ("train",)),
]


# Special files where something is read


def no_file(name: str, make: Callable[[Path], object]) -> Forge:
    """Put something else in the place of a file."""

    def forge(run: Path, disk: Path) -> None:
        file = next(iter(run.glob(name)))
        file.unlink()
        make(file)

    return forge


def sparse(path: Path) -> None:
    """Make a sparse file of a terabyte."""
    with path.open("wb") as file:
        file.truncate(2**40)


SPECIAL: dict[str, Callable[[Path], object]] = {
    "a pipe": os.mkfifo,
    "/dev/zero": lambda path: path.symlink_to("/dev/zero"),
    "a terabyte of zeros": sparse,
    "/proc/self/pagemap": lambda path: path.symlink_to("/proc/self/pagemap"),
}
READ = {
    "config.json": ("search",),
    "model/model.json": ("search",),
    "model/manifest.json": ("search",),
    "model/weights.safetensors": ("search",),
    "index/manifest.json": ("search",),
    "index/items-*": ("search",),
    "index/vectors-*": ("search",),
    "embeddings.safetensors": ("evaluate",),
    "scores.json": ("evaluate",),
    "metrics.jsonl": ("evaluate",),
    "checkpoints/step-4.safetensors": ("train",),
}
NO_FILES = [
    Attack(f"{name} is {what}", no_file(name, make), commands)
    for name, commands in READ.items()
    for what, make in SPECIAL.items()
]


# Values that training never writes


FORGED = [
    *(Attack(f"model: {name}", forge, ("search", "embed")) for name, forge in MODEL.items()),
    *(Attack(f"index: {name}", forge, ("search", "index")) for name, forge in INDEX.items()),
    *(Attack(f"index: {name}", forge, ("show",)) for name, forge in NAMED.items()),
    *(Attack(f"checkpoint: {name}", forge, ("train",)) for name, forge in CHECKPOINT.items()),
    *(Attack(f"config: {name}", forge, ("evaluate", "train")) for name, forge in CONFIG.items()),
]
ATTACKS = [*LINKS, *NO_FILES, *FORGED]
