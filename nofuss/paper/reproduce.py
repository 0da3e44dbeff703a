"""`nofuss reproduce`: choose rates, run trials, write results.json and report.html."""

import dataclasses
import json
import logging
import sys
from collections.abc import Callable, Container, Sequence
from pathlib import Path
from typing import Any, Protocol

from nofuss.config import is_named_data
from nofuss.distributed import processes
from nofuss.errors import DataError, RunError, UsageError, unknown_name
from nofuss.files import write_file
from nofuss.paper import batch_size, convergence, epsilon, retrieval, tables
from nofuss.paper.entry import Entry, Results, how, machine
from nofuss.paper.further import FURTHER
from nofuss.paper.lab import Lab
from nofuss.paper.proxies_per_label import DYNAMIC, FRACTIONAL
from nofuss.paper.rates import Rates, Tried, choose_rates, choose_scales, scale_tries, tries
from nofuss.paper.results_page import results_page
from nofuss.paper.sources import LAYOUTS, TITLES, Source, find_folders, missing, open_source
from nofuss.paper.trial import Trial
from nofuss.progress import Progress, silent
from nofuss.report import read_optional_json
from nofuss.report.grids import GridGroup
from nofuss.training.callbacks import stop_on_signals

log = logging.getLogger("nofuss")

DATA_SETS = tuple(TITLES)
"""The figures are made on the first of them that there is."""
TABLES = tuple(name for name in DATA_SETS if name != "han")  # whose table is `products`


class Experiment(Protocol):
    """A table or figure of the paper: a module of this package, or an object in one."""

    @property
    def losses(self) -> Callable[[Source], tuple[str, ...]]:
        """Return the methods whose rates it uses."""

    @property
    def trials(self) -> Callable[[Source, Rates], list[Trial]]:
        """Return the trainings it is made from."""

    @property
    def entry(self) -> Callable[[Source, Rates, Results], Entry]:
        """Return what their results show."""


FIGURES: dict[str, Experiment] = {
    "convergence": convergence,
    "fractional": FRACTIONAL,
    "dynamic": DYNAMIC,
    "bounds": epsilon,
    "retrieval": retrieval,
    "batch-size": batch_size,
}
Task = tuple[str, Experiment, Source]
FORMAT = 1
"""Of results.json; entries of another format are made again, from the stored trainings."""


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
    found: dict[str, Path] = {}
    if data is not None and not is_named_data(data):
        found = find_folders(data)
    wanted = choose(names, found, data)
    opened = {
        source: open_source(
            source,
            folder,
            budget,
            seeds=seeds,
            weights=weights,
            device=device,
            progress=progress,
        )
        for source, folder in {s: f for _, s, f in wanted}.items()
    }
    processes.check_same("data", lambda: " ".join(s.fingerprint for s in opened.values()))
    tasks = [(name, FIGURES.get(name, tables), opened[source]) for name, source, _ in wanted]
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(f"can't make {out}: {error.strerror}; give another --out") from None
    try:
        with (
            stop_on_signals() as stop,
            Lab(out / "work", stop=stop, progress=progress) as lab,
        ):
            _run(tasks, lab, out)
    except KeyboardInterrupt:
        log.info("stopped; the same command resumes from here")
        raise


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


def _run(tasks: list[Task], lab: Lab, out: Path) -> None:
    """Choose rates, then run one experiment after the other, and add each to the report."""
    losses: dict[Source, list[str]] = {}
    for _, experiment, source in tasks:
        needed = losses.setdefault(source, [])
        needed += [loss for loss in experiment.losses(source) if loss not in needed]
    for source, needed in losses.items():
        lab.plan(source, tries(source, needed))
        guess = dict.fromkeys(needed, source.budget.rates[0])
        lab.plan(source, scale_tries(source, _further(needed), guess))
        for _, experiment, of in tasks:
            if of is source:
                lab.plan(source, experiment.trials(source, guess))
    guessed = set(lab.ahead)
    chosen = {}
    for source, needed in losses.items():
        log.info(f"{source.name}: choosing rates on held-out training classes")
        rates, tried = choose_rates(source, needed, lab.run)
        scales, tried_scales = choose_scales(source, _further(needed), rates, lab.run)
        _say_tried("rate", tried)
        _say_tried("scale", tried_scales)
        chosen[source] = source.with_scales(scales), rates, tried
    lab.ahead -= guessed  # the chosen rates now give the real trials
    for _, experiment, untuned in tasks:
        source, rates, _ = chosen[untuned]
        lab.plan(source, experiment.trials(source, rates))
    for name, experiment, untuned in tasks:
        source, rates, tried = chosen[untuned]
        log.info(f"{name} on {source.title}")
        results = lab.run(source, experiment.trials(source, rates))
        entry: Entry = experiment.entry(source, rates, results)
        used = {loss: rates[loss] for loss in experiment.losses(source)}
        about = _about(name, source, used, tried, results)
        _write(out, dataclasses.asdict(entry) | about)
        for line in entry.verdict:
            log.info(f"  {line}")
    log.info(f"report: {out / 'report.html'}")


def _further(methods: Sequence[str]) -> list[str]:
    """Return those whose scale is chosen, too."""
    return [method for method in methods if method in FURTHER]


def _say_tried(what: str, table: Tried) -> None:
    for method, row in table.items():
        scores = ", ".join(f"{value:g}: {100 * score:.2f}" for value, score in row.items())
        log.info(f"  {method}: held-out Recall@1 by {what} {scores}")


def _about(name: str, source: Source, rates: Any, tried: Any, results: Any) -> dict[str, Any]:
    """Return how an entry was made: command, machine, rates, time."""
    seconds = sum(result.get("whole_seconds", 0.0) for result in results.values())
    return {
        "name": name,
        "data": source.name,
        "budget": source.budget.name,
        "command": sys.argv[1:],
        "seeds": list(range(source.budget.seeds)),
        "machine": machine(source.budget.settings.get("device", "auto")),
        "how": how(source, rates),
        "rates": {loss: {"chosen": rates[loss], "tried": tried[loss]} for loss in rates},
        "trained": f"{len(results):,} trainings, {seconds / 60:.1f} min",
    }


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

    def grid(key: str) -> list[GridGroup]:
        stored = read_optional_json(out / "work" / f"{key}.json").get("result", {}).get("grid")
        return stored if isinstance(stored, list) else []  # earlier versions stored HTML

    write_file(out / "report.html", results_page(entries, grid))
