"""The run directory: what training leaves behind, and what every other command opens.

    config.json        the resolved configuration, and the fingerprint of the data
    environment.json   versions, machine, command
    data.json          what was trained on: counts and class names of each side
    metrics.jsonl      a line per epoch
    choice.json        what is kept, and why: the head that folds chose, their scores
    corrected.csv      the corrections that were applied before training, as they were given
    scan.csv           pictures that can't be read (left out) and copies (kept), if there are any
    scores.json        the last evaluation
    proxies.safetensors      the proxies, and what they stand for, see run/proxies.py
    report.html suspects.csv README.md   for people: the report, doubtful items, the model card
    index/             what is searched: the trained items and others, see model/manifest.py
    feedback.jsonl     what people said on the page, see search/feedback.py
    checkpoints/       the state of training, see training/checkpoint.py
    model/             what `nofuss.load` opens, see model/saved.py
    former/            the model as it was trained, once new classes have taught (training/learn.py)
    .lock .lock.owner  one command writes at a time, and which, see files.py

A directory that is not empty is never overwritten; training continues it with --resume. Links in a
run are refused when it is opened; nobody looks for them again.
"""

import dataclasses
import json
import os
import platform
import shlex
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from importlib.metadata import version
from itertools import count
from pathlib import Path
from typing import Any

import torch

from nofuss import __version__
from nofuss.config import Settings, from_json, is_named_data, to_json
from nofuss.distributed.device import describe_device
from nofuss.distributed.processes import first
from nofuss.errors import RunError
from nofuss.files import (
    LOCK,
    OWNER,
    TEMPORARY,
    locked,
    read_bytes,
    read_json,
    read_lines,
    sync,
    write_file,
    write_json,
)

CORRECTIONS = "corrected.csv"
FROM_PYTHON = " (given from Python)"
"""How the name ends that stands for the path of data which have none."""


@dataclass(frozen=True)
class Run:
    """A run directory and the configuration it was made with."""

    path: Path
    config: Settings
    _held: ExitStack = field(default_factory=ExitStack, compare=False, repr=False)

    @classmethod
    def open(cls, path: Path, *, write: bool = False) -> "Run":
        """Open a directory that training made.

        write: lock it until the end of its `with`; all processes of one command call this.
        """
        with ExitStack() as held:
            where = path / "config.json"
            if not where.exists():
                raise RunError(
                    f"{path} is not a run directory: no config.json in it; give one that "
                    "`nofuss train` made"
                )
            _refuse_links(path)
            if write:
                held.enter_context(locked(path))
            stored = _read_config(path)
            stored.pop("fingerprint", None)
            return cls(path, from_json(Settings, stored, where=where), held.pop_all())

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, *_: object) -> None:
        self._held.close()

    @property
    def checkpoints(self) -> Path:
        """The folder of checkpoints."""
        return self.path / "checkpoints"

    @property
    def model(self) -> Path:
        """The folder that `nofuss.load` opens."""
        return self.path / "model"

    @property
    def index(self) -> Path:
        """The folder of what is searched."""
        return self.path / "index"

    @property
    def corrections(self) -> Path | None:
        """The labels that were corrected before training, if any: the run's own copy."""
        return None if self.config.corrections is None else self.path / CORRECTIONS

    @property
    def own_data(self) -> Path | None:
        """The data it was trained on; RunError if they are no longer where they were."""
        data = self.config.data
        if data is None or is_named_data(data):
            return data
        if str(data).endswith(FROM_PYTHON):
            raise RunError(f"the data of {self.path} were given from Python; give data that it has")
        if not data.exists():
            moved = shlex.join(["nofuss", "train", "NEW", "--out", str(self.path), "--resume"])
            raise RunError(
                f"the data of {self.path} were at {data} and are not there now; give other "
                f"data, or if they have moved: {moved}"
            )
        return data

    @property
    def resume_command(self) -> str:
        """The command that resumes the run; in Python where data or network came from there."""
        own = self.config.backbone == "own"
        if own or str(self.config.data).endswith(FROM_PYTHON):
            module = ", backbone=MODULE" if own else ""
            return f"nofuss.train(DATA, out={str(self.path)!r}, resume=True{module})"
        return shlex.join(["nofuss", "train", "--out", str(self.path), "--resume"])

    def write(self, name: str, content: dict[str, Any]) -> None:
        """Replace a JSON file of the run; of several processes only the first writes."""
        if first():
            write_json(self.path / name, content)

    def note_epoch(self, row: Mapping[str, Any]) -> None:
        """Write the row of an epoch into metrics.jsonl, in place of those from it on."""
        file = self.path / "metrics.jsonl"
        rows = [old for old in read_lines(file) if old and old["epoch"] < row["epoch"]]
        lines = (json.dumps(each, ensure_ascii=False) + "\n" for each in [*rows, dict(row)])
        write_file(file, "".join(lines))


def create_run(config: Settings, *, name: str, held: ExitStack | None = None) -> Run:
    """Make a run directory, config.out or the first free runs/NAME, and describe it there.

    held: gets the lock of the run, before anything is written, but only of a run or an empty
    folder.
    """
    path = config.out or _free(Path("runs"), name.strip(".") or "run")
    data = None if config.data is None else _absolute(config.data)
    run = Run(path, dataclasses.replace(config, out=path, data=data))
    try:
        path.mkdir(parents=True, exist_ok=True)
        sync(path.parent)
        is_run = (path / "config.json").is_file()
        if held is not None and (is_run or _is_empty(path)):  # leave other folders alone
            held.enter_context(locked(path))
        if not _is_empty(path):
            raise RunError(
                f"{path} is not empty and is never overwritten; give another --out"
                + (f", or resume it: {run.resume_command}" if is_run else "")
            )
        if run.corrections is not None and config.corrections is not None and first():
            write_file(run.corrections, read_bytes(config.corrections))
        run.write("config.json", to_json(run.config) | {"fingerprint": None})
        run.write("environment.json", environment(run.config.device))
    except FileExistsError:
        raise RunError(f"{path} is a file, not a folder; give another --out") from None
    except OSError as error:
        is_run = (path / "config.json").is_file()  # it may have been written before
        cure = f"then resume with: {run.resume_command}" if is_run else "or give another --out"
        raise RunError(f"can't write into {path}: {error.strerror}; fix it, {cure}") from None
    return run


def _refuse_links(run: Path) -> None:
    """Raise RunError for a link in a run: its files are read and written inside its folder."""
    for folder, folders, files in os.walk(run):
        for name in (*folders, *files):
            if (path := Path(folder, name)).is_symlink():
                raise RunError(
                    f"{path} is a link, but a run is read and written only inside its folder; "
                    "replace it by what it links to"
                )


def continue_run(config: Settings, *, fingerprint: Callable[[], str]) -> Run:
    """Return the run of config.out to resume; its data must be the same.

    fingerprint: is asked for where the run has one: it is noted when all pictures were decoded.
    """
    assert config.out is not None
    saved, noted = Run.open(config.out).config, _read_config(config.out).get("fingerprint")
    if noted is not None:
        cure = "nothing was changed: give the same data, or train into another --out"
        check_same_data(config.out, fingerprint(), cure=cure)
    data = None if config.data is None else _absolute(config.data)
    run = Run(config.out, dataclasses.replace(config, data=data))
    if data != saved.data:  # the same, elsewhere
        moved = dataclasses.replace(saved, data=data)
        run.write("config.json", to_json(moved) | {"fingerprint": noted})
    return run


def note_fingerprint(run: Run, fingerprint: str) -> None:
    """Note which data the run is of, once all of them have been looked at."""
    stored = _read_config(run.path)
    if stored.get("fingerprint") is None:
        run.write("config.json", stored | {"fingerprint": fingerprint})


def check_same_data(run: Path, fingerprint: str, *, cure: str) -> None:
    """Refuse data other than those the run was started on."""
    saved = _read_config(run).get("fingerprint")
    if saved != fingerprint:
        raise RunError(
            f"the data differ from what {run} was started on (fingerprint {fingerprint[:8]}, "
            f"was {str(saved)[:8]}); {cure}"
        )


def _absolute(data: Path) -> Path:
    """Return the path of data from the root; a name that is no path stays as it is."""
    if is_named_data(data) or str(data).endswith(FROM_PYTHON):
        return data
    return Path(os.path.abspath(os.path.expanduser(data)))


def environment(device: str = "auto") -> dict[str, Any]:
    """Return what explains the numbers: versions, machine, threads, command."""
    packages = ("torch", "numpy", "pillow", "scikit-learn")
    return {
        "command": shlex.join(["nofuss", *sys.argv[1:]]),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "device": describe_device(device),
        "threads": torch.get_num_threads(),
        "versions": {"nofuss": __version__} | {name: version(name) for name in packages},
    }


def _read_config(run: Path) -> dict[str, Any]:
    file = run / "config.json"
    try:
        return read_json(file)
    except (OSError, ValueError) as error:
        raise RunError(f"can't read {file}: {error}; restore it or train again") from None


def _is_empty(folder: Path) -> bool:
    """Return whether the folder holds at most what a run killed at its very start leaves."""
    return all(
        entry.name in (LOCK, OWNER) or entry.name.startswith(TEMPORARY)
        for entry in folder.iterdir()
    )


def _free(parent: Path, name: str) -> Path:
    """Return the first of NAME, NAME-2, … that does not exist."""
    names = (name if number == 1 else f"{name}-{number}" for number in count(1))
    return next(parent / each for each in names if not (parent / each).exists())
