"""Choose each method's learning rate by the same few tries on held-out *training* classes.

Then the scale of the methods that have one to choose, at that rate.
"""

from collections.abc import Callable, Mapping, Sequence
from statistics import mean
from typing import Any

from nofuss.paper.further import FACTORS, USUAL_SCALE
from nofuss.paper.sources import Source
from nofuss.paper.trial import Result, Trial

Rates = dict[str, float]
Tried = dict[str, dict[float, float]]
"""Loss → rate (or scale) → mean Recall@1 on held-out training classes."""
RunTrials = Callable[[Source, Sequence[Trial]], Mapping[Trial, Result]]
"""Runs trials, or reads their stored results."""


def tries(source: Source, losses: Sequence[str]) -> list[Trial]:
    """Return the trials that rates are chosen by; equally many for every method."""
    return [
        trial
        for loss in losses
        for rate in source.budget.rates
        for trial in _of(source, loss, rate)
    ]


def choose_rates(source: Source, losses: Sequence[str], run: RunTrials) -> tuple[Rates, Tried]:
    """Return the best rate of each method, and the mean held-out Recall@1 of all tries."""
    results = run(source, tries(source, losses))
    table = {
        loss: {
            rate: mean(results[trial]["recall@1"] for trial in _of(source, loss, rate))
            for rate in source.budget.rates
        }
        for loss in losses
    }
    return {loss: max(row, key=lambda rate: row[rate]) for loss, row in table.items()}, table


def scale_tries(source: Source, methods: Sequence[str], rates: Rates) -> list[Trial]:
    """Return the trials that scales are chosen by."""
    settings = _scales(source).values()
    return [t for m in methods for more in settings for t in _of(source, m, rates[m], **more)]


def choose_scales(
    source: Source, methods: Sequence[str], rates: Rates, run: RunTrials
) -> tuple[dict[str, float], Tried]:
    """Return the scale of each method whose best is not the usual one; and the scores of all."""
    results = run(source, scale_tries(source, methods, rates))
    settings = _scales(source)
    table: Tried = {}
    for method in methods:
        trials_of = {s: _of(source, method, rates[method], **more) for s, more in settings.items()}
        table[method] = {
            scale: mean(results[trial]["recall@1"] for trial in trials)
            for scale, trials in trials_of.items()
        }
    best = {method: max(row, key=lambda scale: row[scale]) for method, row in table.items()}
    return {method: scale for method, scale in best.items() if settings[scale]}, table


def usual_scale(source: Source) -> float:
    """Return the scale of Proxy-NCA without a choice."""
    return source.budget.config("proxy-nca", source.budget.rates[0]).scale or USUAL_SCALE


def _scales(source: Source) -> dict[float, dict[str, float]]:
    """Return the candidates, and what each changes in the settings: nothing for the usual one."""
    usual = usual_scale(source)
    return {f * usual: {} if f == 1 else {"scale": f * usual} for f in FACTORS}


def at_edge(source: Source, rates: Rates) -> list[str]:
    """Return methods whose best rate is the lowest or highest tried: a better one may exist."""
    grid = source.budget.rates
    return [loss for loss, rate in rates.items() if rate in (grid[0], grid[-1])]


def _of(source: Source, loss: str, rate: float, **more: Any) -> list[Trial]:
    b = source.budget
    if b.try_epochs is not None:
        more["epochs"] = b.try_epochs
    return [Trial(b.config(loss, rate, **more), fold=fold) for fold in range(b.folds)]
