"""Trainings of a data set: chooses each method's rate, runs trials and stores their results.

    KEY.json     the result of a trial; its name is a digest of the trial's settings and data
    KEY/         while it runs: its checkpoints

A result is written as a whole, so that an interrupted command resumes after the last finished
trial, and changed settings start anew. Under torchrun all processes run each trial together; the
first one reads and writes the files.
"""

import json
import logging
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any, TypeVar

from nofuss.distributed import processes
from nofuss.files import write_file
from nofuss.paper.sources import Source
from nofuss.paper.trials import Record, Result, Trial, has_collapsed, run_trial, trial_of
from nofuss.progress import Progress, silent
from nofuss.report import read_optional_json
from nofuss.training.callbacks import Control, Event

log = logging.getLogger("nofuss")
K = TypeVar("K")


@dataclass(frozen=True)
class Choice:
    """The rate of a method, and the tries that it was chosen by."""

    chosen: float
    tried: dict[float, float]
    """Rate → mean Recall@1 on held-out training classes."""
    collapsed: list[float]
    """Rates whose tries collapsed: not chosen unless all did."""


def choose_rate(tries: Mapping[float, Sequence[Result]]) -> Choice:
    """Choose the best rate by its tries on held-out *training* classes."""
    tried = {lr: mean(r["recall@1"] for r in results) for lr, results in tries.items()}
    collapsed = [lr for lr, results in tries.items() if any(map(has_collapsed, results))]
    sound = [lr for lr in tried if lr not in collapsed] or list(tried)
    return Choice(max(sound, key=lambda lr: tried[lr]), tried, collapsed)


class Runner:
    """Runs what an experiment asks for on a data set, one trial after the other."""

    def __init__(
        self,
        source: Source,
        folder: Path,
        *,
        choices: dict[str, Choice] | None = None,
        stop: Callable[[], bool] = lambda: False,
        progress: Progress = silent,
    ) -> None:
        self.source, self.folder, self.stop, self.progress = source, folder, stop, progress
        self.choices = {} if choices is None else choices
        self.results: dict[Trial, Result] = {}
        """All that was asked for."""

    def rate(self, loss: str) -> float:
        """Return the rate of a method, chosen by equally many tries for each."""
        if loss not in self.choices:
            tries = {lr: self.tries(loss, lr) for lr in self.source.budget.rates}
            choice = self.choices[loss] = choose_rate(self.run(tries))
            scores = ", ".join(
                f"{lr:g}: {100 * score:.2f}{' (collapsed)' * (lr in choice.collapsed)}"
                for lr, score in choice.tried.items()
            )
            log.info(f"{self.source.name}: {loss}: held-out Recall@1 by rate {scores}")
        return self.choices[loss].chosen

    def tries(self, loss: str, lr: float) -> list[Trial]:
        """Return the trials that score a rate."""
        budget = self.source.budget
        more: dict[str, Any] = {} if budget.try_epochs is None else {"epochs": budget.try_epochs}
        return [trial_of(self.source, loss, lr, fold=fold, **more) for fold in range(budget.folds)]

    def seeds(self, loss: str, *, record: Record = "curve", **options: Any) -> list[Trial]:
        """Return trainings of a method, one per seed; without options those of the tables."""
        return [
            trial_of(self.source, loss, self.rate(loss), seed=seed, record=record, **options)
            for seed in range(self.source.budget.seeds)
        ]

    def run(self, trials: Mapping[K, Sequence[Trial]]) -> dict[K, list[Result]]:
        """Return the results of the trials, from their files where there are any."""
        distinct = list(dict.fromkeys(trial for some in trials.values() for trial in some))
        for number, trial in enumerate(distinct, 1):
            if trial not in self.results:
                what = f"{self.source.name}: {trial.describe()} ({number} of {len(distinct)})"
                self.results[trial] = self._result_of(trial, what)
        return {key: [self.results[trial] for trial in some] for key, some in trials.items()}

    def _result_of(self, trial: Trial, what: str) -> Result:
        """Return a stored result, or run the trial and store it; a damaged file is replaced."""
        key = trial.key(self.source)
        own, file = self.folder / key, self.folder / f"{key}.json"
        text = processes.from_first(lambda: json.dumps(read_optional_json(file).get("result", {})))
        if text == "{}":
            began = time.monotonic()
            result = run_trial(self.source, trial, self._control(own, what))
            result["whole_seconds"] = time.monotonic() - began
            text = processes.from_first(lambda: json.dumps(result))
            if processes.first():
                asked = json.dumps(trial.describe())
                write_file(file, f'{{"asked": {asked}, "result": {text}}}\n')
                shutil.rmtree(own, ignore_errors=True)
        shared: Result = json.loads(text)
        return shared

    def _control(self, own: Path, what: str) -> Control:
        """Return how a trial shows its progress and is stopped; long ones have checkpoints."""

        def show(event: Event) -> None:
            if event.kind == "progress":
                name, done, total = (event.values[key] for key in ("what", "done", "total"))
                self.progress(what if name.startswith("training") else name, done, total)

        checkpoints = own / "checkpoints" if self.source.budget.long else None
        if checkpoints is not None and processes.first():
            own.mkdir(exist_ok=True)
        return Control(show, stop=self.stop, checkpoints=checkpoints)
