"""The result of an experiment: numbers, tables, figures, and sentences about them.

An entry is plain data, stored in results.json; the report is made from nothing else.
"""

import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import mean
from typing import Any

import torch

from nofuss.evaluate.intervals import t_interval
from nofuss.paper.further import FACTORS, FURTHER, NAMES
from nofuss.paper.rates import Rates, at_edge, usual_scale
from nofuss.paper.sources import Source
from nofuss.paper.statistics import list_words
from nofuss.paper.trial import Result, Trial
from nofuss.run.directory import environment

Results = Mapping[Trial, Result]


@dataclass(frozen=True)
class Table:
    """Text in cells; the first column names the row."""

    title: str
    head: list[str]
    rows: list[list[str]]


@dataclass(frozen=True)
class Series:
    """A line of a figure: points (x, y), and the interval of y if there are several seeds."""

    name: str
    points: list[tuple[float, float, float | None, float | None]]


@dataclass(frozen=True)
class Figure:
    """Lines over x, with named levels to compare with."""

    title: str
    x: str
    series: list[Series]
    percent: bool = True
    log: bool = False
    levels: list[tuple[str, float]] = field(default_factory=list)


@dataclass(frozen=True)
class Entry:
    """A table or figure of the paper, reproduced."""

    title: str
    claim: str
    """What the paper says."""
    verdict: list[str]
    """What was found, and where and why it differs."""
    tables: list[Table] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)
    """The numbers, as shares."""
    grid: str | None = None
    """The key of the trial whose result holds rows of pictures."""


def per_seed(results: Results, trials: Sequence[Trial], score: str = "recall@1") -> list[float]:
    """Return one score of trials that differ in their seed."""
    return [float(results[trial][score]) for trial in trials]


def point(x: float, values: Sequence[float]) -> tuple[float, float, float | None, float | None]:
    """Return a point of a series: the mean over seeds and its t-interval."""
    low, high = t_interval(values) or (None, None)
    return x, mean(values), low, high


def plus_minus(values: Sequence[float]) -> str:
    """Return mean ± half the t-interval, in percent."""
    ends = t_interval(values)
    half = "" if ends is None else f" ± {100 * (ends[1] - mean(values)):.2f}"
    return f"{100 * mean(values):.2f}{half}"


def how(source: Source, rates: Rates) -> list[str]:
    """Return the settings in sentences: those of all methods, and each one's rate."""
    b = source.budget
    grid = ", ".join(f"{rate:g}" for rate in b.rates)
    chosen = ", ".join(f"{NAMES[loss]} {rate:g}" for loss, rate in rates.items())
    config = b.config("proxy-nca", b.rates[0])
    batch = f"batch {config.batch_size}"
    if b.instance_batch:
        batch += f" ({b.instance_batch} for losses over instances)"
    lines = [
        f"{b.words}; {batch}, {config.epochs} epochs, {config.optimizer}, {config.schedule} "
        f"schedule: the same start, {'items' if b.instance_batch else 'steps'} and schedule for "
        "every method. Losses over instances draw four items a class (N-pairs two), Proxy-NCA and "
        "Proxy-Triplet shuffle. Margins and scales are the defaults of each loss"
        + (f", of Proxy-NCA {config.scale:g}" if config.scale else "")
        + ". All are scored on the unit sphere; NMI uses k-means refined by exchanges, which "
        "finds better clusters than plain k-means.",
        f"Rates: each method had {len(b.rates)} tries ({grid}; proxies {b.proxy_factor:g} times "
        "that), scored by Recall@1 on held-out training classes"
        + (", both halves in turn" if b.folds == 2 else ", the other half")
        + (f" ({b.try_classes:,} classes each)" if b.try_classes else "")
        + (f", after {b.try_epochs} epoch{'s' * (b.try_epochs > 1)}" if b.try_epochs else "")
        + f"; chosen: {chosen}.",
    ]
    if further := [m for m in FURTHER if m in rates]:
        lines.append(_scales(source, further))
    if edge := at_edge(source, rates):
        lines.append(
            f"{list_words([NAMES[loss] for loss in edge])} took a rate at the edge of that "
            "grid; a wider grid might hold a better one."
        )
    return lines


def _scales(source: Source, methods: Sequence[str]) -> str:
    """Say which scales were chosen, and whether a wider grid might hold better ones."""
    usual = usual_scale(source)
    grid = [factor * usual for factor in FACTORS]
    chosen = {m: source.budget.scales.get(m, usual) for m in methods}
    return (
        "Scales were chosen at those rates, on the same classes, from "
        f"{', '.join(f'{scale:g}' for scale in grid)}: "
        f"{', '.join(f'{NAMES[m]} {scale:g}' for m, scale in chosen.items())}"
        + (", at the edge of that grid." if {*chosen.values()} & {grid[0], grid[-1]} else ".")
    )


def machine(device: str = "auto") -> dict[str, Any]:
    """Return what the numbers were computed on."""
    about = environment(device)
    return {
        "platform": platform.platform(),
        "cores": os.cpu_count(),
        "device": about["device"],
        "threads": torch.get_num_threads(),
        "python": about["python"],
        "versions": about["versions"],
    }
