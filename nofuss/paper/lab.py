"""Run trials one after the other, and store the result of each in a file.

    work/KEY.json     the result of a trial; its name is a digest of the trial's settings and data
    work/KEY/         while it runs: its checkpoints

A result is written as a whole, so that an interrupted command resumes after the last finished
trial, and changed settings start anew. One command works in a folder at a time. Under torchrun all
processes run each trial together; the first one reads and writes the files.
"""

import json
import shutil
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from nofuss.distributed import processes
from nofuss.files import locked, write_file
from nofuss.paper.sources import Source
from nofuss.paper.trial import Result, Trial, run_trial
from nofuss.progress import Progress, silent


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
        self.ahead, self._held = set[str](), ExitStack()

    def __enter__(self) -> "Lab":
        self.folder.mkdir(parents=True, exist_ok=True)
        self._held.enter_context(locked(self.folder))
        return self

    def __exit__(self, *_: object) -> None:
        self._held.close()

    def plan(self, source: Source, trials: Sequence[Trial]) -> None:
        """Announce trials, to count those that are left; finished ones do not count."""
        keys = (trial.key(source) for trial in trials)
        self.ahead |= {key for key in keys if self.find(key) is None}

    def run(self, source: Source, trials: Sequence[Trial]) -> Mapping[Trial, Result]:
        """Return the result of each trial, from its file if there is one."""
        results: dict[Trial, Result] = {}
        for trial in dict.fromkeys(trials):
            results[trial] = self._result(source, trial)
            self.ahead.discard(trial.key(source))
        return results

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

    def _result(self, source: Source, trial: Trial) -> Result:
        """Return the result of a trial, stored or new."""
        key = trial.key(source)
        if (kept := self.find(key)) is None:
            kept = self._do(source, trial, key)
        if processes.first():
            shutil.rmtree(self.folder / key, ignore_errors=True)
        return kept

    def _do(self, source: Source, trial: Trial, key: str) -> Result:
        checkpoints = self.folder / key / "checkpoints" if source.budget.long else None
        if checkpoints is not None and processes.first():
            checkpoints.parent.mkdir(exist_ok=True)
        what = f"{source.name}: {trial.describe()} ({len(self.ahead):,} left)"
        began = time.monotonic()
        result = run_trial(
            source,
            trial,
            what=what,
            progress=self.progress,
            stop=self.stop,
            checkpoints=checkpoints,
        )
        result["whole_seconds"] = time.monotonic() - began
        result["host"] = socket.gethostname()
        self.keep(key, trial.describe(), result)
        return result

    def _read(self, key: str) -> Any:
        try:
            return json.loads((self.folder / f"{key}.json").read_text())["result"]
        except (OSError, ValueError, KeyError, TypeError):
            return None
