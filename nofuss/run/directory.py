"""The run directory: what training leaves behind, and what every other command opens.

    config.json        the resolved configuration
    environment.json   versions, machine, command
    data.json          what was trained on: counts, classes of each side, fingerprint
    metrics.jsonl      a line an epoch
    choice.json        what folds of the training classes decided, where features are fixed
    scan.csv           pictures that were left out, and why
    scores.json        the last evaluation
    embeddings.safetensors   of test items and some training items, with the proxies
    report.html suspects.csv README.md   for people: the report, doubtful items, the model card
    index/             what `nofuss search` looks in, see search/index.py
    checkpoints/       where training stood, see training/checkpoint.py
    model/             what `nofuss.load` opens, see model/weights.py
    .nofuss.lock       while somebody writes, see lock.py

A directory that has something in it is never overwritten.
"""

import dataclasses
import json
import os
import platform
import shlex
import sys
from collections.abc import Callable, Container
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from itertools import count
from pathlib import Path
from typing import Any

import torch

from nofuss.config import TrainConfig, check_limits, read_config, to_json
from nofuss.distributed.device import describe_device
from nofuss.distributed.processes import first
from nofuss.errors import RunError, UsageError
from nofuss.files.atomic import read_json, write_file, write_json
from nofuss.files.folders import is_temporary
from nofuss.files.lock import LOCK, RunLock, check_in_place

# What may differ between a run and its resumption: where and how fast, never what.
_FREE = {"out", "resume", "force", "data", "freeze"}
_FREE |= {"device", "workers", "checkpoint_seconds", "keep_memory"}


@dataclass(frozen=True)
class Run:
    """A run directory and the configuration it was made with."""

    path: Path
    config: TrainConfig

    @property
    def checkpoints(self) -> Path:
        """Where training stood."""
        return self.path / "checkpoints"

    @property
    def model(self) -> Path:
        """What `nofuss.load` opens."""
        return self.path / "model"

    @property
    def resume_command(self) -> str:
        """What to type to go on."""
        return shlex.join(["nofuss", "train", "--out", str(self.path), "--resume"])

    def write(self, name: str, content: dict[str, Any]) -> None:
        """Replace a JSON file of the run; of several processes the first one does."""
        if first():
            check_in_place(self.path)
            write_json(self.path / name, content)

    def write_metrics(self, history: list[dict[str, Any]]) -> None:
        """A line an epoch."""
        if not first():
            return
        check_in_place(self.path)
        lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in history)
        write_file(self.path / "metrics.jsonl", lines)


def create_run(
    config: TrainConfig, *, name: str, fingerprint: str, lock: RunLock | None = None
) -> Run:
    """A new directory, config.out or the first free runs/NAME, with its description in it.

    The lock, where one is given, is taken before anything is looked at.
    """
    path = config.out
    try:
        if path is None:
            path = _new_directory(Path("runs"), name.strip(".") or "run")
        path.mkdir(parents=True, exist_ok=True)
        is_run = (path / "config.json").is_file()
        if lock and (is_run or _is_empty(path)):  # in no other folder, not even for a moment
            lock.take(path)
        if not _is_empty(path):
            raise RunError(
                f"{path} is not empty and is never overwritten; give another --out"
                + (", or go on with it: --resume" if is_run else "")
            )
    except FileExistsError:
        raise RunError(f"{path} is a file, not a folder; give another --out") from None
    except OSError as error:
        raise RunError(f"can't make {path}: {error.strerror}; give another --out") from None
    data = None if config.data is None else Path(os.path.abspath(config.data))
    run = Run(path, dataclasses.replace(config, out=path, data=data))
    _describe(run, fingerprint)
    return run


def open_run(path: Path) -> Run:
    """A directory that training made."""
    where = path / "config.json"
    config = read_config(_read_config(path), where=where)
    try:
        check_limits(config)
    except UsageError as error:
        raise RunError(
            f"{where} has settings that training refuses ({error}); restore it"
        ) from None
    return Run(path, config)


def resume_run(
    given: TrainConfig, *, told: Container[str] = (), restarted: bool = False
) -> TrainConfig:
    """The configuration to resume with: the run's own, and over it what the user says.

    told: names of settings that count even where they are the defaults.
    restarted: the flags are those that the run was begun with, and not said again.
    """
    if given.out is None:
        raise RunError("--resume needs to know which run: add --out RUN")
    saved, default = open_run(given.out).config, TrainConfig()
    said = {
        name: getattr(given, name)
        for name in _settings()
        if not restarted and (name in told or getattr(given, name) != getattr(default, name))
    }
    kept = {name: getattr(given, name) for name in _FREE - {"data"}}
    return dataclasses.replace(saved, **said, **kept, data=given.data or saved.data)


def continue_run(
    config: TrainConfig, *, fingerprint: str, show: Callable[[list[list[str]]], None]
) -> Run:
    """The run of config.out, to go on with; what --force changed becomes its configuration.

    `config` is resolved; `show` gets a row (name, before, now) for each setting that differs.
    """
    assert config.out is not None
    saved = open_run(config.out).config
    rows = [
        [name, str(getattr(saved, name)), str(getattr(config, name))]
        for name in _settings()
        if getattr(saved, name) != getattr(config, name)
    ]
    if rows:
        show(rows)
    if rows and not config.force:
        lines = ", ".join(f"{name} {before} → {now}" for name, before, now in rows)
        raise RunError(
            f"{config.out} was made with other settings ({lines}); drop those flags, "
            "or add --force to go on with them"
        )
    if not config.force:
        cure = "give the same data, or --force to go on all the same"
        check_same_data(config.out, fingerprint, cure=cure)
    run = Run(config.out, config)
    if config.force or not (run.path / "environment.json").exists():  # killed before it was written
        _describe(run, fingerprint)
    return run


def check_same_data(run: Path, fingerprint: str, *, cure: str) -> None:
    """Refuse data other than the run's."""
    saved = _read_config(run).get("fingerprint")
    if saved != fingerprint:
        raise RunError(
            f"the data differ from what {run} was started on (fingerprint {fingerprint[:8]}, "
            f"was {str(saved)[:8]}); {cure}"
        )


def environment(device: str = "auto") -> dict[str, Any]:
    """What a reader of the numbers would ask: versions, machine, threads, command."""
    versions = {}
    for package in ("nofuss", "torch", "numpy", "pillow", "scikit-learn"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "unknown"
    return {
        "command": shlex.join(["nofuss", *sys.argv[1:]]),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "device": describe_device(device),
        "threads": torch.get_num_threads(),
        "versions": versions,
    }


def _read_config(run: Path) -> dict[str, Any]:
    file = run / "config.json"
    try:
        return read_json(file)
    except FileNotFoundError:
        raise RunError(
            f"{run} is no run directory: no config.json in it; give one that `nofuss train` made"
        ) from None
    except (OSError, ValueError) as error:
        raise RunError(f"can't read {file}: {error}; restore it or train again") from None


def _settings() -> list[str]:
    """Names of what decides what is learned."""
    return [field.name for field in dataclasses.fields(TrainConfig) if field.name not in _FREE]


def _describe(run: Run, fingerprint: str) -> None:
    try:
        run.write("config.json", to_json(run.config) | {"fingerprint": fingerprint})
        run.write("environment.json", environment(run.config.device))
    except OSError as error:
        begun = (run.path / "config.json").is_file()
        cure = f"then go on with: {run.resume_command}" if begun else "or give another --out"
        raise RunError(f"can't write into {run.path}: {error.strerror}; mend it, {cure}") from None


def _is_empty(folder: Path) -> bool:
    """Whether there is at most what a kill in the first moment of a run leaves."""
    return all(entry.name == LOCK or is_temporary(entry.name) for entry in folder.iterdir())


def _new_directory(parent: Path, name: str) -> Path:
    """Make the first of NAME, NAME-2, … that nobody else has made."""
    parent.mkdir(parents=True, exist_ok=True)
    for number in count(1):
        path = parent / (name if number == 1 else f"{name}-{number}")
        try:
            path.mkdir()
        except FileExistsError:
            continue
        return path
    raise AssertionError
