"""Choose each method's learning rate by the same few tries on held-out *training* classes."""

from collections.abc import Callable, Mapping, Sequence
from statistics import mean

from nofuss.paper.sources import Source
from nofuss.paper.trial import Result, Trial

Rates = dict[str, float]
Tried = dict[str, dict[float, float]]
"""Loss → rate → mean Recall@1 on held-out training classes."""
Run = Callable[[Source, Sequence[Trial]], Mapping[Trial, Result]]
"""Runs trials, or reads their stored results."""


def tries(source: Source, losses: Sequence[str]) -> list[Trial]:
    """Return the trials that rates are chosen by; equally many for every method."""
    return [
        trial
        for loss in losses
        for rate in source.budget.rates
        for trial in _of(source, loss, rate)
    ]


def choose_rates(
    source: Source, losses: Sequence[str], run: Run
) -> tuple[Rates, dict[str, dict[float, float]]]:
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


def at_edge(source: Source, rates: Rates) -> list[str]:
    """Return methods whose best rate is the lowest or highest tried: a better one may exist."""
    grid = source.budget.rates
    return [loss for loss, rate in rates.items() if rate in (grid[0], grid[-1])]


def _of(source: Source, loss: str, rate: float) -> list[Trial]:
    b = source.budget
    more = {} if b.try_epochs is None else {"epochs": b.try_epochs}
    return [Trial(b.config(loss, rate, **more), fold=fold) for fold in range(b.folds)]
