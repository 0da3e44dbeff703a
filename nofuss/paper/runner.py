"""`nofuss reproduce`: choose rates, run trials, write results.json and report.html.

    work/KEY.json     the result of a trial; its name is a digest of the trial's settings and data
    work/KEY/         while it runs: its checkpoints

A result is written as a whole, so that an interrupted command resumes after the last finished
trial, and changed settings start anew. One command works in a folder at a time. Under torchrun all
processes run each trial together; the first one reads and writes the files.
"""

import dataclasses
import json
import logging
import os
import platform
import shutil
import sys
import time
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any, Protocol

import torch

from nofuss.config import is_named_data
from nofuss.distributed import processes
from nofuss.errors import DataError, RunError, UsageError, unknown_name
from nofuss.files import locked, write_file
from nofuss.paper import batch_size, bounds, convergence, retrieval, tables
from nofuss.paper.page import Entry, list_words, results_page
from nofuss.paper.proxies_per_label import DYNAMIC, FRACTIONAL
from nofuss.paper.published import NAMES
from nofuss.paper.sources import LAYOUTS, TITLES, Source, find_folders, missing, open_source
from nofuss.paper.trials import (
    Rates,
    Result,
    Results,
    Trial,
    has_collapsed,
    run_trial,
    trial_of,
)
from nofuss.progress import Progress, silent
from nofuss.report import read_optional_json
from nofuss.report.sections import Section
from nofuss.run.directory import environment
from nofuss.training.callbacks import stop_on_signals

log = logging.getLogger("nofuss")

DATA_SETS = tuple(TITLES)
"""The figures are made on the first of them that there is."""
TABLES = tuple(name for name in DATA_SETS if name != "han")  # whose table is `products`
FORMAT = 2
"""Of results.json; entries of another format are made again, from the stored trainings."""


class Experiment(Protocol):
    """A table or figure of the paper: a module of this package, or an object in one."""

    def losses(self, source: Source) -> tuple[str, ...]:
        """Return the methods whose rates it uses."""

    def trials(self, source: Source, rates: Rates) -> list[Trial]:
        """Return the trainings it is made from."""

    def entry(self, source: Source, rates: Rates, results: Results) -> Entry:
        """Return what their results show."""


FIGURES: dict[str, Experiment] = {
    "convergence": convergence,
    "fractional": FRACTIONAL,
    "dynamic": DYNAMIC,
    "bounds": bounds,
    "retrieval": retrieval,
    "batch-size": batch_size,
}


def reproduce(
    names: Sequence[str],
    *,
    data: Path | None,
    budget: str,
    out: Path,
    seeds: int | None,
    weights: Path | None,
    device: str = "auto",
    progress: Progress = silent,
) -> None:
    """Run the experiments of these names, or all for which there are data."""
    for name in names:
        if name not in (*TABLES, *FIGURES):
            raise unknown_name("experiment", name, [*TABLES, *FIGURES])
    if seeds is not None and seeds < 1:
        raise UsageError(f"--seeds is {seeds}; expected 1 or more")
    if weights is not None and budget != "paper":
        raise UsageError(
            f"--weights is for --budget paper, but the budget is {budget}; drop one of them"
        )
    if out.is_dir() and any(out.iterdir()) and not (out / "work").is_dir():
        raise RunError(f"{out} holds other files and is not touched; give another --out")
    found = {} if data is None or is_named_data(data) else find_folders(data)
    wanted = choose(names, found, data)
    sources = {
        name: open_source(
            name,
            folder,
            budget,
            seeds=seeds,
            weights=weights,
            device=device,
            progress=progress,
        )
        for name, folder in {source: folder for _, source, folder in wanted}.items()
    }
    processes.check_same("data", lambda: " ".join(s.fingerprint for s in sources.values()))
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(f"can't make {out}: {error.strerror}; give another --out") from None
    try:
        with (
            stop_on_signals() as stop,
            Runner(out / "work", stop=stop, progress=progress) as runner,
        ):
            for name, source in sources.items():
                asked = [experiment for experiment, of, _ in wanted if of == name]
                _run(asked, source, runner, out)
    except KeyboardInterrupt:
        log.info("stopped; the same command resumes from here")
        raise
    log.info(f"report: {out / 'report.html'}")


def choose(
    names: Sequence[str], found: dict[str, Path], data: Path | None
) -> list[tuple[str, str, Path | None]]:
    """Return (experiment, data set, its folder); warn about, or refuse, what can't be run.

    Stanford Online Products is the one data set with a substitute of its size, `han`; its table
    comes with its convergence, for which the trainings are the same.
    """
    folders: dict[str, Path | None] = dict(found)
    if data is None:
        folders["characters"] = None
        if "products" in names:
            folders["han"] = None
    elif is_named_data(data):
        folders["han"] = None
    if not names:
        for name in LAYOUTS if found else ():
            if name not in found:
                log.warning(missing(name, data))
    absent = [n for n in names if n in TABLES and _source_of(n, folders) is None]
    if absent or not folders:
        *others, last = [missing(name, data) for name in absent or LAYOUTS]
        for line in others:
            log.error(line)
        raise DataError(last)
    main = next(name for name in DATA_SETS if name in folders)
    asked = names or (*(n for n in TABLES if _source_of(n, folders) in folders), *FIGURES)
    chosen: list[tuple[str, str]] = []
    for name in asked:
        source = _source_of(name, folders) or main
        chosen += [(name, source)] + [("convergence", source)] * (name == "products")
    return [(name, source, folders.get(source)) for name, source in dict.fromkeys(chosen)]


def _source_of(table: str, folders: Container[str]) -> str | None:
    """Return the data set of a table; None if there is none, and for a figure."""
    if table == "products" and table not in folders:
        table = "han"
    return table if table in folders or table == "characters" else None


class Runner:
    """Runs trials one after the other, or reads their stored results."""

    def __init__(
        self,
        folder: Path,
        *,
        stop: Callable[[], bool] = lambda: False,
        progress: Progress = silent,
    ) -> None:
        self.folder, self.stop, self.progress = folder, stop, progress
        self._held = ExitStack()

    def __enter__(self) -> "Runner":
        self.folder.mkdir(parents=True, exist_ok=True)
        self._held.enter_context(locked(self.folder))
        return self

    def __exit__(self, *_: object) -> None:
        self._held.close()

    def run(self, source: Source, trials: Sequence[Trial]) -> dict[Trial, Result]:
        """Return the result of each trial, from its file if there is one."""
        results: dict[Trial, Result] = {}
        distinct = list(dict.fromkeys(trials))
        for number, trial in enumerate(distinct, 1):
            what = f"{source.name}: {trial.describe()} ({number} of {len(distinct)})"
            results[trial] = self._find(trial.key(source)) or self._train(source, trial, what)
        return results

    def _find(self, key: str) -> Result | None:
        """Return a stored result; None if there is none, or a damaged one."""

        def read() -> Any:
            try:
                return json.loads((self.folder / f"{key}.json").read_text())["result"]
            except (OSError, ValueError, KeyError, TypeError):
                return None

        result = json.loads(processes.from_first(lambda: json.dumps(read())))
        return result if isinstance(result, dict) else None

    def _train(self, source: Source, trial: Trial, what: str) -> Result:
        """Run a trial and store its result; where it takes minutes, with checkpoints."""
        key, began = trial.key(source), time.monotonic()
        checkpoints = self.folder / key / "checkpoints" if source.budget.long else None
        if checkpoints is not None and processes.first():
            checkpoints.parent.mkdir(exist_ok=True)
        result = run_trial(
            source,
            trial,
            what=what,
            progress=self.progress,
            stop=self.stop,
            checkpoints=checkpoints,
        )
        result["whole_seconds"] = time.monotonic() - began
        shared: Result = json.loads(processes.from_first(lambda: json.dumps(result)))
        if processes.first():
            content = {"asked": trial.describe(), "result": result}
            text = json.dumps(content, ensure_ascii=False)
            write_file(self.folder / f"{key}.json", text + "\n")
            shutil.rmtree(self.folder / key, ignore_errors=True)
        return shared


@dataclass(frozen=True)
class Choice:
    """The rate of a method, and the tries that it was chosen by."""

    chosen: float
    tried: dict[float, float]
    """Rate → mean Recall@1 on held-out training classes."""
    collapsed: list[float]
    """Rates whose tries collapsed: not chosen unless all did."""


def tries(source: Source, loss: str, lr: float) -> list[Trial]:
    """Return the trials that score a rate; equally many for every method."""
    budget = source.budget
    more: dict[str, Any] = {} if budget.try_epochs is None else {"epochs": budget.try_epochs}
    return [trial_of(source, loss, lr, fold=fold, **more) for fold in range(budget.folds)]


def choose_rates(
    source: Source,
    losses: Sequence[str],
    run: Callable[[Source, Sequence[Trial]], Mapping[Trial, Result]],
) -> dict[str, Choice]:
    """Choose each method's rate by the same few tries on held-out *training* classes."""
    trials = {loss: {lr: tries(source, loss, lr) for lr in source.budget.rates} for loss in losses}
    results = run(source, [t for row in trials.values() for some in row.values() for t in some])
    choices = {}
    for loss, row in trials.items():
        tried = {lr: mean(results[t]["recall@1"] for t in some) for lr, some in row.items()}
        collapsed = [lr for lr, some in row.items() if any(has_collapsed(results[t]) for t in some)]
        sound = [lr for lr in row if lr not in collapsed] or list(row)
        choices[loss] = Choice(max(sound, key=lambda lr: tried[lr]), tried, collapsed)
    return choices


def _run(names: Sequence[str], source: Source, runner: Runner, out: Path) -> None:
    """Choose rates, then run one experiment after the other, and add each to the report."""
    experiments = {name: FIGURES.get(name, tables) for name in names}
    losses = dict.fromkeys(m for e in experiments.values() for m in e.losses(source))
    log.info(f"{source.name}: choosing rates on held-out training classes")
    choices = choose_rates(source, list(losses), runner.run)
    for loss, choice in choices.items():
        scores = ", ".join(
            f"{lr:g}: {100 * score:.2f}{' (collapsed)' * (lr in choice.collapsed)}"
            for lr, score in choice.tried.items()
        )
        log.info(f"  {loss}: held-out Recall@1 by rate {scores}")
    rates = {loss: choice.chosen for loss, choice in choices.items()}
    for name, experiment in experiments.items():
        log.info(f"{name} on {source.title}")
        results = runner.run(source, experiment.trials(source, rates))
        entry = experiment.entry(source, rates, results)
        used = {loss: choices[loss] for loss in experiment.losses(source)}
        _write(out, dataclasses.asdict(entry) | _about(name, source, used, results))
        log.info(f"  {entry.verdict}: {entry.sentence}")


def _about(
    name: str, source: Source, choices: Mapping[str, Choice], results: Results
) -> dict[str, Any]:
    """Return how an entry was made: command, machine, rates, time."""
    seconds = sum(result.get("whole_seconds", 0.0) for result in results.values())
    about = environment(source.budget.settings.get("device", "auto"))
    return {
        "name": name,
        "data": source.name,
        "budget": source.budget.name,
        "command": sys.argv[1:],
        "seeds": list(range(source.budget.seeds)),
        "machine": {
            "platform": platform.platform(),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            **{key: about[key] for key in ("device", "python", "versions")},
        },
        "how": _how(source, choices),
        "rates": {loss: vars(choice) for loss, choice in choices.items()},
        "trained": f"{len(results):,} trainings, {seconds / 60:.1f} min",
    }


def _how(source: Source, choices: Mapping[str, Choice]) -> list[str]:
    """Return the settings in sentences: those of all methods, and each one's rate."""
    b = source.budget
    c = trial_of(source, "proxy-nca", b.rates[0]).settings
    batch = f"batch {c.batch_size}"
    batch += f" ({b.instance_batch} for losses over instances)" if b.instance_batch else ""
    halves = "both halves in turn" if b.folds == 2 else "the other half"
    halves += f" ({b.try_classes:,} classes each)" if b.try_classes else ""
    chosen = ", ".join(f"{NAMES[loss]} {choice.chosen:g}" for loss, choice in choices.items())
    lines = [
        f"{b.words}; {batch}, {c.epochs} epochs, {c.optimizer}, {c.schedule} schedule, the same "
        "for every method. Losses over instances draw four items per class (N-pairs two). Margins "
        "and scales are the defaults of each loss; γ of structured clustering falls by 6% per "
        "epoch, as in the paper. All are scored on the unit sphere.",
        f"Rates: {len(b.rates)} tries per method ({', '.join(f'{lr:g}' for lr in b.rates)}; "
        f"proxies {b.proxy_factor:g} times that), scored by Recall@1 on held-out training classes, "
        f"{halves}{f', after {b.try_epochs} epochs' if b.try_epochs else ''}; chosen: {chosen}.",
    ]
    ends = (b.rates[0], b.rates[-1])
    if edge := [NAMES[loss] for loss, choice in choices.items() if choice.chosen in ends]:
        lines.append(f"A wider grid might hold a better rate of {list_words(edge)}.")
    if collapsed := [NAMES[loss] for loss, choice in choices.items() if choice.collapsed]:
        lines.append(f"Tries that collapsed were not chosen: some of {list_words(collapsed)}.")
    return lines


def _write(out: Path, entry: dict[str, Any]) -> None:
    """Put the entry into results.json, and write the report again."""
    if not processes.first():
        return
    before = read_optional_json(out / "results.json")
    kept = before["entries"] if before.get("format") == FORMAT else []
    order = [*TABLES, *FIGURES]

    def place(e: dict[str, Any]) -> tuple[Any, ...]:
        return e["budget"], DATA_SETS.index(e["data"]), order.index(e["name"])

    entries = sorted([e for e in kept if place(e) != place(entry)] + [entry], key=place)
    text = json.dumps({"format": FORMAT, "entries": entries}, indent=1, ensure_ascii=False)
    write_file(out / "results.json", text + "\n")

    def grid(key: str) -> list[Section]:
        stored = read_optional_json(out / "work" / f"{key}.json").get("result", {}).get("grid")
        return stored if isinstance(stored, list) else []

    write_file(out / "report.html", results_page(entries, grid))
