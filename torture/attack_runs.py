"""Runs that a stranger made: links where our commands write, and what no training would leave.

Every attack has a copy of one finished run. A folder beside it stands for the rest of the disk: no
byte of it may change, and nothing may appear in it.
"""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from torture.measured import Case, judged, run_measured
from torture.training import FLAGS, write_pictures

Forge = Callable[[Path, Path], None]
"""Given the run and the rest of the disk."""


def campaign(home: Path, seed: int) -> Iterator[Case]:
    """Every forgery, and every command that may write into the run."""
    data = write_pictures(home / "data")
    whole = home / "whole"
    make: list[tuple[object, ...]] = [("train", data, "--out", whole, *FLAGS, "--epochs", "2")]
    for words in [*make, ("index", whole)]:
        ended = run_measured(home, *words)
        assert ended.code == 0, ended.said
    query = next(data.rglob("*.png"))
    for what, forge in LINKS.items():
        for command in ("evaluate", "index", "train"):
            run, disk = home / "run", home / "disk"
            for folder in (run, disk):
                shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(whole, run)
            shutil.copytree(whole, disk / "other run")
            (disk / "precious").write_text("precious")
            before = contents(disk)
            forge(run, disk)
            words = {
                "evaluate": ("evaluate", run),
                "index": ("index", run, query.parent),
                "train": ("train", "--out", run, "--resume", "--force", "--epochs", "3"),
            }[command]
            ended = run_measured(home, *words)
            changed = sorted(before.items() ^ contents(disk).items())
            others = [f"changed outside: {name}" for name in {name for name, _ in changed}]
            yield judged(f"{what}, {command}", ended, *others)


def contents(folder: Path) -> dict[str, bytes]:
    """All files below a folder."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def file_link(name: str) -> Forge:
    """A link at a name that is written, to a file elsewhere."""

    def forge(run: Path, disk: Path) -> None:
        (run / name).unlink(missing_ok=True)
        (run / name).symlink_to(disk / "precious")

    return forge


def folder_link(name: str) -> Forge:
    """A sub-folder that is another run's."""

    def forge(run: Path, disk: Path) -> None:
        shutil.rmtree(run / name)
        (run / name).symlink_to(disk / "other run" / name)

    return forge


TEMPORARY = (
    "index/..items.new.new",
    "index/.vectors.new",
    "index/.manifest.json.new",
    ".scores.json.new",
    ".report.html.new",
    ".metrics.jsonl.new",
    ".config.json.new",
    ".embeddings.safetensors.new",
    ".nofuss.lock",
    "scores.json",
    "report.html",
    "metrics.jsonl",
    "embeddings.safetensors",
    "index/manifest.json",
)
LINKS: dict[str, Forge] = {
    **{f"{name} is a link": file_link(name) for name in TEMPORARY},
    **{f"{name}/ is a link": folder_link(name) for name in ("index", "checkpoints", "model")},
}
