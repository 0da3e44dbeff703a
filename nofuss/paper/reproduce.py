"""`nofuss reproduce`: run the experiments that are asked for, write results.json and report.html.

Finished trainings are kept in work/ (runner.py); one command works in a folder at a time.
"""

import dataclasses
import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from nofuss.config import is_named_data
from nofuss.distributed import processes
from nofuss.errors import DataError, RunError, UsageError, unknown_name
from nofuss.files import locked, write_file
from nofuss.paper import batch_size, bounds, convergence, proxies_per_label, retrieval, tables
from nofuss.paper.page import Entry, list_words, results_page
from nofuss.paper.published import NAMES
from nofuss.paper.runner import Choice, Runner
from nofuss.paper.sources import LAYOUTS, TITLES, find_folders, missing, open_source
from nofuss.paper.trials import has_collapsed, trial_of
from nofuss.progress import Progress, silent
from nofuss.report import read_optional_json
from nofuss.report.sections import Section
from nofuss.run.directory import environment
from nofuss.training.callbacks import stop_on_signals

log = logging.getLogger("nofuss")

DATA_SETS = tuple(TITLES)
"""The figures are made on the first of them that there is."""
TABLES = tuple(name for name in DATA_SETS if name != "han")  # whose table is `products`
FORMAT = 3
"""Of results.json; entries of another format are made again, from the stored trainings."""
FIGURES: dict[str, Callable[[Runner], Entry]] = {
    "convergence": convergence.entry,
    "fractional": proxies_per_label.fractional,
    "dynamic": proxies_per_label.dynamic,
    "bounds": bounds.entry,
    "retrieval": retrieval.entry,
    "batch-size": batch_size.entry,
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
    chosen = choose(names, found, data)
    sources = {
        of: open_source(
            of,
            found.get(of),
            budget,
            seeds=seeds,
            weights=weights,
            device=device,
            progress=progress,
        )
        for of in dict.fromkeys(of for _, of in chosen)
    }
    processes.check_same("data", lambda: " ".join(s.fingerprint for s in sources.values()))
    work, choices = out / "work", {of: dict[str, Choice]() for of in sources}
    try:
        work.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(f"can't make {out}: {error.strerror}; give another --out") from None
    try:
        with stop_on_signals() as stop, locked(work):
            for name, of in chosen:
                log.info(f"{name} on {sources[of].title}")
                runner = Runner(
                    sources[of], work, choices=choices[of], stop=stop, progress=progress
                )
                entry = with_collapses(FIGURES.get(name, tables.entry)(runner), runner)
                if processes.first():
                    _write(out, dataclasses.asdict(entry) | _about(name, runner))
                log.info(f"  {entry.verdict}: {entry.sentence}")
    except KeyboardInterrupt:
        log.info("stopped; the same command resumes from here")
        raise
    log.info(f"report: {out / 'report.html'}")


def choose(
    names: Sequence[str], found: Mapping[str, Path], data: Path | None
) -> list[tuple[str, str]]:
    """Return (experiment, data set); DataError says which data sets are missing.

    Stanford Online Products is the one data set with a substitute of its size, `han`; its table
    comes with its convergence, for which the trainings are the same.
    """
    here = set(found)
    if data is None:
        here = {"characters", "han"} if "products" in names else {"characters"}
    elif is_named_data(data):
        here = {"han"}
    of = {name: name for name in TABLES} | ({"products": "han"} if "han" in here else {})
    absent = [n for n in names if n in TABLES and of[n] not in here | {"characters"}]
    if absent or not here:
        *others, last = [missing(name, data) for name in absent or LAYOUTS]
        for line in others:
            log.error(line)
        raise DataError(last)
    main = next(name for name in DATA_SETS if name in here)
    chosen: list[tuple[str, str]] = []
    for name in names or (*(name for name in TABLES if of[name] in here), *FIGURES):
        chosen.append((name, of.get(name, main)))
        if name == "products":
            chosen.append(("convergence", of[name]))
    return list(dict.fromkeys(chosen))


def with_collapses(entry: Entry, runner: Runner) -> Entry:
    """Return the entry, whose sentence also names the methods that collapsed."""
    collapsed = {
        NAMES[trial.settings.loss]
        for trial, result in runner.results.items()
        if trial.fold is None and has_collapsed(result)
    }
    if not collapsed:
        return entry
    note = f"Collapsed, all embeddings point the same way: {list_words(sorted(collapsed))}."
    return dataclasses.replace(entry, sentence=f"{entry.sentence} {note}")


def _about(name: str, runner: Runner) -> dict[str, Any]:
    """Return how an entry was made: command, machine, rates, time."""
    budget = runner.source.budget
    results = {trial: r for trial, r in runner.results.items() if trial.fold is None}
    used = {trial.settings.loss for trial in results}
    choices = {loss: choice for loss, choice in runner.choices.items() if loss in used}
    seconds = sum(result.get("whole_seconds", 0.0) for result in results.values())
    machine = environment(budget.settings.get("device", "auto"))
    return {
        "name": name,
        "data": runner.source.name,
        "budget": budget.name,
        "command": machine.pop("command"),
        "seeds": list(range(budget.seeds)),
        "machine": machine | {"cores": os.cpu_count()},
        "how": _how(runner, choices),
        "rates": {loss: vars(choice) for loss, choice in choices.items()},
        "trained": f"{len(results):,} trainings, {seconds / 60:.1f} min",
    }


def _how(runner: Runner, choices: Mapping[str, Choice]) -> list[str]:
    """Return the settings in sentences, and what to know about the rates."""
    b = runner.source.budget
    c = trial_of(runner.source, "proxy-nca", b.rates[0]).settings
    batch = f"batch {c.batch_size}"
    batch += f" ({b.instance_batch} for losses over instances)" if b.instance_batch else ""
    chosen = ", ".join(f"{NAMES[loss]} {choice.chosen:g}" for loss, choice in choices.items())
    lines = [
        f"{b.words}; {batch}, {c.epochs} epochs, {c.optimizer}, {c.schedule} schedule, the same "
        "for every method; margins and scales are the defaults of each loss. All are scored on the "
        "unit sphere.",
        f"Rates: {len(b.rates)} tries per method ({', '.join(f'{lr:g}' for lr in b.rates)}; "
        f"proxies {b.proxy_factor:g} times that), scored by Recall@1 on held-out training classes; "
        f"chosen: {chosen}.",
    ]
    if flat := [NAMES[loss] for loss, choice in choices.items() if choice.collapsed]:
        lines.append(f"Tries that collapsed were not chosen: {list_words(flat)}.")
    return lines


def _write(out: Path, entry: dict[str, Any]) -> None:
    """Put the entry into results.json, and write the report again."""
    before = read_optional_json(out / "results.json")
    kept = before["entries"] if before.get("format") == FORMAT else []
    order = [*TABLES, *FIGURES]

    def place(e: dict[str, Any]) -> tuple[Any, ...]:
        return e["budget"], DATA_SETS.index(e["data"]), order.index(e["name"])

    entries = sorted([e for e in kept if place(e) != place(entry)] + [entry], key=place)
    text = json.dumps({"format": FORMAT, "entries": entries}, indent=1, ensure_ascii=False)
    write_file(out / "results.json", text + "\n")

    def grid(key: str) -> list[Section]:
        stored = read_optional_json(out / "work" / f"{key}.json").get("result", {})
        rows: list[Section] = stored.get("grid", [])
        return rows

    write_file(out / "report.html", results_page(entries, grid))
