"""Every experiment of the paper ends in an entry of the page, at every budget."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from nofuss.paper import tables
from nofuss.paper.page import Entry
from nofuss.paper.published import NAMES
from nofuss.paper.reproduce import FIGURES, with_collapses
from nofuss.paper.runner import Choice, K, Runner
from nofuss.paper.sources import Source, budget_of
from nofuss.paper.trials import Result, Trial, trial_of

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", ["tables", *(n for n in FIGURES if n != "retrieval")])
def test_every_experiment_ends_in_an_entry(name: str, source: Source, tmp_path: Path) -> None:
    choices = {loss: Choice(1e-3, {}, []) for loss in NAMES}
    entry = FIGURES.get(name, tables.entry)(Runner(source, tmp_path, choices=choices))
    assert entry.verdict
    assert entry.sentence
    for table in entry.tables:
        assert all(len(row) == len(table.head) for row in table.rows)
    assert all(s.points for figure in entry.figures for s in figure.series)
    if name == "tables":
        scores, pairs = entry.tables
        assert {row[0] for row in scores.rows} >= set(NAMES.values())
        assert len(pairs.rows) == len(entry.values["pairs"]) + 1, "and Proxy-NCA++, last"
        assert pairs.rows[-1][0] == "beyond the paper: Proxy-NCA++ − Proxy-NCA"


def test_the_sentence_names_methods_that_collapsed(source: Source, tmp_path: Path) -> None:
    runner, entry = Runner(source, tmp_path), Entry("", "", "undecided", "Found.")
    for loss, spread in (("lifted", 0.001), ("n-pairs", 0.4)):
        result = {"spread": spread, "spread_before": 0.5}
        runner.results[trial_of(source, loss, 1e-3)] = result
    assert with_collapses(entry, runner).sentence.endswith(": Lifted structure.")
    assert with_collapses(entry, Runner(source, tmp_path)) is entry


class MadeUp(Runner):
    """All trainings, which would take hours, end alike."""

    def run(self, trials: Mapping[K, Sequence[Trial]]) -> dict[K, list[Result]]:
        result = {"recall@1": 0.5, "hits": [1, 2], "queries": [2, 4], "proxies_in_use": 1.0}
        return {key: [result] * len(some) for key, some in trials.items()}


@pytest.mark.parametrize("name", ["batch-size", "fractional", "dynamic"])
@pytest.mark.parametrize("budget", ["hours", "paper"])
def test_long_budgets_compare_with_what_they_train(name: str, budget: str, source: Source) -> None:
    """Sweeps with fewer points have those that the others are compared with."""
    blank = np.zeros((len(source.collection), 32, 32, 3), dtype=np.uint8)
    pictures = replace(source.collection, array=blank)
    long = replace(source, budget=budget_of("cub", budget), collection=pictures)
    runner = MadeUp(long, Path(), choices={loss: Choice(1e-4, {}, []) for loss in NAMES})
    entry = FIGURES[name](runner)
    assert len(entry.tables[0].rows[0]) == len(entry.tables[0].head)
