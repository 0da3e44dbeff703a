"""Verdicts follow the numbers, each can come out either way; and every experiment has an entry."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

from nofuss.evaluate.intervals import SeededDifference
from nofuss.paper import batch_size, bounds, convergence, proxies_per_label, tables
from nofuss.paper.page import Entry, Verdict, difference
from nofuss.paper.published import NAMES, order_of
from nofuss.paper.reproduce import FIGURES, with_collapses
from nofuss.paper.runner import Choice, K, Runner
from nofuss.paper.sources import Source, budget_of
from nofuss.paper.trials import Result, Trial, trial_of
from tests.paper.made_up import gap, result

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
    assert with_collapses(entry, runner).sentence.endswith("same way: Lifted structure.")
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


def ordered(fractions: dict[str, float]) -> tuple[Verdict, str]:
    order = order_of("cars")
    found = {m: [result(fractions[m]), result(fractions[m] + 0.001)] for m in order}
    pairs = {(a, b): difference(found[a], found[b]) for a, b in combinations(order, 2)}
    place = sorted(order, key=lambda m: -fractions[m]).index(order[0]) + 1
    return tables.verdict(pairs, place)


def test_tables_say_whether_the_papers_order_holds() -> None:
    order = order_of("cars")
    assert order[:2] == ["proxy-nca", "clustering"]
    falling = {m: 0.9 - 0.1 * i for i, m in enumerate(order)}
    word, sentence = ordered(falling)
    assert word == "confirmed"
    assert "number 1;" in sentence
    word, sentence = ordered({m: 0.9 - v for m, v in falling.items()})
    assert word == "contradicted"
    assert "number 6;" in sentence
    assert "0 are confirmed, 15 reversed" in sentence
    word, sentence = ordered(dict.fromkeys(order, 0.5))
    assert word == "undecided"
    assert "15 indistinguishable" in sentence


def test_first_reached_interpolates() -> None:
    heights = [(0.0, 0.1), (10.0, 0.3), (20.0, 0.2), (30.0, 0.5)]
    curve = [(x, y, None, None) for x, y in heights]
    assert convergence.first_reached(curve, 0.2) == pytest.approx(5)
    assert convergence.first_reached(curve, 0.4) == pytest.approx(20 + 10 * 2 / 3)
    assert convergence.first_reached(curve, 0.05) == 0
    assert convergence.first_reached(curve, 0.6) is None


@pytest.mark.parametrize(
    ("reached", "ratio", "final", "word"),
    [
        (100.0, 3.0, gap(0.1), "confirmed"),
        (200.0, 1.5, gap(0.1), "partly confirmed"),
        (400.0, 0.75, gap(0.1), "contradicted"),
        (None, None, gap(-0.1), "contradicted"),
        (None, None, gap(0.1), "undecided"),
        (None, None, gap(-0.1, sure=False), "undecided"),
        (0.0, None, gap(0.1), "undecided"),
    ],
)
def test_convergence_beside_the_papers_three(
    reached: float | None, ratio: float | None, final: SeededDifference, word: str
) -> None:
    found, sentence = convergence.verdict(reached, ratio, final, best="N-pairs")
    assert found == word
    assert "N-pairs" in sentence
    assert ratio is None or f"{ratio:.1f} times as fast in steps" in sentence


def test_enough_proxies_or_not() -> None:
    rival = [result(0.5), result(0.51)]

    def found(*values: float) -> tuple[Verdict, str]:
        pairs = zip((0.1, 0.5, 1.0), values, strict=True)
        by_ratio = {r: [result(v), result(v + 0.01)] for r, v in pairs}
        return proxies_per_label.verdict({"": by_ratio}, "N-pairs", rival)

    word, sentence = found(0.4, 0.6, 0.7)
    assert word == "confirmed"
    assert "below at 0.1, above at 0.5 and 1" in sentence
    assert found(0.4, 0.45, 0.7)[0] == "contradicted"
    assert found(0.4, 0.5, 0.5)[0] == "undecided"
    # Matched assignment is shown, but the paper claims nothing about it.
    high, low = ({0.5: [result(v), result(v + 0.01)]} for v in (0.7, 0.3))
    ways = {"from labels": high, proxies_per_label.MATCHED: low}
    word, sentence = proxies_per_label.verdict(ways, "N-pairs", rival)
    assert word == "confirmed"
    assert "from labels, matched below at 0.5" in sentence


def test_batches_that_matter_or_not() -> None:
    same = SeededDifference(0.01, (-0.01, 0.015), (0.001, 0.019))
    word, sentence = batch_size.verdict({16: same, 128: same}, 64)
    assert word == "confirmed"
    assert "at a batch of 64: +1.00 at 16 and +1.00 at 128" in sentence
    assert batch_size.verdict({16: gap(-0.03), 128: same}, 64)[0] == "contradicted"
    unknown = SeededDifference(-0.08, (-0.17, 0.01), (-0.12, -0.04))
    assert batch_size.verdict({16: unknown}, 64)[0] == "undecided"


def test_bounds_that_tighten_or_not_or_say_nothing() -> None:
    def found(epsilon: list[float], **slacks: tuple[float, float]) -> tuple[Verdict, str]:
        def end(slack: float) -> dict[str, float]:
            return {"left": 0.5, "right": 0.5 + slack, "largest": 3.0}

        return bounds.verdict({n: (end(a), end(b)) for n, (a, b) in slacks.items()}, epsilon)

    assert found([2.0, 1.0], a=(2.0, 1.0))[0] == "confirmed"
    assert found([1.0, 2.0], a=(1.0, 2.0))[0] == "contradicted"
    word, sentence = found([1.0, 2.0], a=(1.0, 2.0), b=(2.0, 1.0))
    assert word == "partly confirmed"
    assert "rises" in sentence
    assert "tighter at the end: b;" in sentence
    word, sentence = found([2.0, 1.0], a=(2.0, 1.0), b=(4.0, 2.5))
    assert word == "partly confirmed"
    assert "at the largest possible value, which says nothing: b" in sentence
    assert found([2.0, 1.0], b=(4.0, 2.5))[0] == "contradicted"
