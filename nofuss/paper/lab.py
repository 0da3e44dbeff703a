"""Run trials one after the other, and store the result of each in a file.

    work/KEY.json     the result of a trial; its name is a digest of the trial's settings and data
    work/KEY/         while it runs: the lock of the command that does it, its checkpoints

A result is written as a whole, so that an interrupted command resumes after the last finished
trial, and changed settings start anew. Several commands may work in one folder, on one machine or
on several that share a disk: each trial is done by the first command that locks it, and the others
take the next one. Under torchrun all processes run each trial together; the first one reads and
writes the files.
"""

import json
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import median
from typing import Any

from rich.progress import BarColumn, Progress, TextColumn

from nofuss.distributed import processes
from nofuss.files.atomic import write_file
from nofuss.files.lock import LOCK, RunLock
from nofuss.paper.sources import Source
from nofuss.paper.trial import Result, Trial, run_trial
from nofuss.terminal import console
from nofuss.training.loop import Interrupted

EVERY = 30.0
"""Seconds between lines of progress where the output is not a terminal."""
PAUSE = 0.5
"""Seconds between looks for the trials of other commands."""


class Lab:
    """Runs trials, or reads their stored results."""

    def __init__(self, folder: Path, *, stop: Callable[[], bool] = lambda: False) -> None:
        self.folder, self.stop = folder, stop
        self.ahead: dict[str, tuple[Source, Trial]] = {}
        self._speeds: dict[str, list[float]] = {}  # seconds an item, by loss
        self._line, self._who = _Line(), ""

    def __enter__(self) -> "Lab":
        self.folder.mkdir(parents=True, exist_ok=True)
        self._line.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._line.bar.stop()

    def plan(self, source: Source, trials: Sequence[Trial]) -> None:
        """Announce trials, for an estimate of the time left; finished ones do not count."""
        for trial in trials:
            key = trial.key(source)
            if self.find(key) is None:
                self.ahead[key] = source, trial

    def run(self, source: Source, trials: Sequence[Trial]) -> Mapping[Trial, Result]:
        """Return the result of each trial, from its file if there is one."""
        results: dict[Trial, Result] = {}
        left = list(dict.fromkeys(trials))
        while left:
            for trial in left:
                if (result := self._result(source, trial)) is not None:
                    results[trial] = result
                    self.ahead.pop(trial.key(source), None)
                    self._remember(source, trial, result)
            elsewhere = [trial for trial in left if trial not in results]
            if len(elsewhere) == len(left):
                self._wait(f"{len(left):,} left, which other commands are training; {self._who}")
            left = elsewhere
        return results

    @contextmanager
    def alone_in(self, folder: Path) -> Iterator[None]:
        """Hold the lock of a folder with files that all commands write, when it is free."""
        with RunLock() as lock:
            while who := lock.try_take(folder):
                self._wait(who)
            yield

    def find(self, key: str) -> Result | None:
        """Return a stored result; None if there is none, or a damaged one."""
        result = json.loads(processes.from_first(lambda: json.dumps(self._read(key))))
        return result if isinstance(result, dict) else None

    def keep(self, key: str, asked: Any, result: Result) -> None:
        """Store a result."""
        if not processes.first():
            return
        content = json.dumps({"asked": asked, "result": result}, ensure_ascii=False)
        write_file(self.folder / f"{key}.json", content + "\n")

    def _result(self, source: Source, trial: Trial) -> Result | None:
        """Return the result of a trial; None if another command is working on it."""
        key = trial.key(source)
        if (kept := self.find(key)) is not None:
            return kept
        place = self.folder / key
        with RunLock() as lock:
            if who := lock.try_take(place, make=True):
                self._who = who
                return None
            if (kept := self.find(key)) is None:
                kept = self._do(source, trial, key)
            if processes.first():
                for remains in self.folder.glob(f".{key}.json.*.new"):  # of a kill while it wrote
                    remains.unlink(missing_ok=True)
                shutil.rmtree(place, ignore_errors=True)
        if processes.first():
            with suppress(OSError):  # where a file that is open is not deleted before it is closed
                place.rmdir()
        return kept

    def _do(self, source: Source, trial: Trial, key: str) -> Result:
        checkpoints = self.folder / key / "checkpoints" if source.budget.long else None
        self._line.begin(f"{source.name}: {trial.describe()}", self._left, trial)
        began, alone = time.monotonic(), self._is_alone(key)
        try:
            result = run_trial(
                source, trial, watch=self._line, stop=self.stop, checkpoints=checkpoints
            )
        except Interrupted:
            raise KeyboardInterrupt from None
        result["whole_seconds"] = time.monotonic() - began
        result |= {"alone": alone and self._is_alone(key), "host": socket.gethostname()}
        self.keep(key, trial.describe(), result)
        return result

    def _is_alone(self, key: str) -> bool:
        """Return whether no other command has locked a trial: its seconds count for something."""
        return all(lock.parent.name == key for lock in self.folder.glob(f"*/{LOCK}"))

    def _wait(self, words: str) -> None:
        """Wait a moment for the other commands in this folder."""
        self._line.wait(words)
        if processes.any_true(self.stop())[0]:
            raise KeyboardInterrupt
        time.sleep(PAUSE)

    def _read(self, key: str) -> Any:
        try:
            return json.loads((self.folder / f"{key}.json").read_text())["result"]
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def _remember(self, source: Source, trial: Trial, result: Result) -> None:
        if (cost := trial.cost(source)) and "whole_seconds" in result:
            speed = result["whole_seconds"] / cost
            self._speeds.setdefault(f"{source.name} {trial.config.loss}", []).append(speed)

    def _left(self) -> tuple[int, float | None]:
        """Return how many trials are left, and their seconds, estimated from finished ones."""
        known = [median(values) for values in self._speeds.values()]
        if not known:
            return len(self.ahead), None
        seconds = 0.0
        for source, trial in self.ahead.values():
            same_loss = self._speeds.get(f"{source.name} {trial.config.loss}")
            seconds += trial.cost(source) * median(same_loss or known)
        return len(self.ahead), seconds


class _Line:
    """The progress line, which watches the current training."""

    def __init__(self) -> None:
        self.bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[left]}", markup=False),
            console=console.out,
            transient=True,
            disable=not console.out.is_terminal or console.out.quiet,
        )
        self.task = self.bar.add_task("", total=1, left="")
        self.printed, self.words, self.said = -EVERY, "", set[str]()

    def begin(self, words: str, left: Callable[[], tuple[int, float | None]], trial: Trial) -> None:
        """Show a new training: what it is, how many are left, when all will be done."""
        self.words, self.said = words, set()
        self.epochs = max(1, trial.config.epochs or 1) if not trial.bare else 1
        count, seconds = left()
        when = "" if seconds is None else f", done at about {_clock(seconds)} ({_length(seconds)})"
        note = f"{count:,} trainings left{when}"
        self.bar.update(self.task, description=words, completed=0, left=note)
        if not console.out.is_terminal and time.monotonic() - self.printed > EVERY:
            self.printed = time.monotonic()
            console.say(f"{words}; {note}")

    def wait(self, words: str) -> None:
        """Show that others do what is left."""
        self.bar.update(self.task, description=words, completed=0, left="")
        if not console.out.is_terminal and self.words != words:
            console.say(words)
        self.words = words

    def step(self, epoch: int, step: int, steps: int, loss: float, items: int) -> None:
        """Move the bar."""
        self.bar.update(self.task, completed=(epoch + step / steps) / self.epochs)

    def epoch(self, history: list[dict[str, Any]]) -> None:
        """Do nothing: the line shows steps only."""

    def say(self, message: str) -> None:
        """Print a warning of the training, of each kind the first."""
        kind = message.partition(":")[0]
        if kind not in self.said:
            self.said.add(kind)
            console.warn(f"{self.words}: {message}")


def _clock(seconds: float) -> str:
    return time.strftime("%H:%M", time.localtime(time.time() + seconds))


def _length(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
