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
import logging
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from nofuss.distributed import processes
from nofuss.files.atomic import write_file
from nofuss.files.lock import LOCK, RunLock
from nofuss.paper.sources import Source
from nofuss.paper.trial import Result, Trial, run_trial
from nofuss.progress import Progress, silent
from nofuss.training.loop import Interrupted

log = logging.getLogger("nofuss")
PAUSE = 0.5
"""Seconds between looks for the trials of other commands."""


class Lab:
    """Runs trials, or reads their stored results."""

    def __init__(
        self,
        folder: Path,
        *,
        stop: Callable[[], bool] = lambda: False,
        progress: Progress = silent,
    ) -> None:
        self.folder, self.stop, self.progress = folder, stop, progress
        self.ahead = set[str]()
        self._who = self._waiting = ""
        folder.mkdir(parents=True, exist_ok=True)

    def plan(self, source: Source, trials: Sequence[Trial]) -> None:
        """Announce trials, to count those that are left; finished ones do not count."""
        keys = (trial.key(source) for trial in trials)
        self.ahead |= {key for key in keys if self.find(key) is None}

    def run(self, source: Source, trials: Sequence[Trial]) -> Mapping[Trial, Result]:
        """Return the result of each trial, from its file if there is one."""
        results: dict[Trial, Result] = {}
        left = list(dict.fromkeys(trials))
        while left:
            for trial in left:
                if (result := self._result(source, trial)) is not None:
                    results[trial] = result
                    self.ahead.discard(trial.key(source))
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
        what = f"{source.name}: {trial.describe()} ({len(self.ahead):,} left)"
        began, alone = time.monotonic(), self._is_alone(key)
        try:
            result = run_trial(
                source,
                trial,
                what=what,
                progress=self.progress,
                stop=self.stop,
                checkpoints=checkpoints,
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
        if words != self._waiting:
            log.info(words)
        self._waiting = words
        if processes.any_true(self.stop())[0]:
            raise KeyboardInterrupt
        time.sleep(PAUSE)

    def _read(self, key: str) -> Any:
        try:
            return json.loads((self.folder / f"{key}.json").read_text())["result"]
        except (OSError, ValueError, KeyError, TypeError):
            return None
