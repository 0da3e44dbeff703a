"""Rates are chosen on training classes only; results are kept."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from nofuss.paper.published import NAMES
from nofuss.paper.runner import Choice, Runner, choose_rate
from nofuss.paper.sources import Source
from nofuss.paper.trials import run_trial, trial_of
from tests.paper.tiny_source import vectors


@pytest.mark.slow
def test_the_choice_of_rates_never_sees_test_classes(source: Source, tmp_path: Path) -> None:
    """Spoilt test items change nothing: neither the rates nor a single score."""
    spoilt = vectors()
    assert spoilt.array is not None
    spoilt.array[source.split(None)[1]] = np.nan
    other = replace(source, pictures=spoilt, collection=spoilt)
    runner, on_spoilt = Runner(source, tmp_path), Runner(other, tmp_path)
    assert source.fingerprint != other.fingerprint, "each trains for itself"
    assert [runner.rate(loss) for loss in NAMES] == [on_spoilt.rate(loss) for loss in NAMES]
    assert runner.choices == on_spoilt.choices


def test_every_method_has_as_many_tries(source: Source, tmp_path: Path) -> None:
    for loss in NAMES:
        trials = [t for lr in source.budget.rates for t in Runner(source, tmp_path).tries(loss, lr)]
        assert len(set(trials)) == 4
        for trial in trials:
            train, held_out = source.split(trial.fold)
            assert set(source.labels(train)).isdisjoint(source.labels(held_out))
            assert not set(held_out) & set(source.split(None)[1])


def test_tries_that_collapse_are_not_chosen() -> None:
    """The higher rate scores more but collapsed in one half; if all do, the best is taken."""
    sound, flat = ({"spread": spread, "spread_before": 0.4} for spread in (0.5, 0.009))
    low, high, half = ([{"recall@1": r, **s}] for r, s in ((0.5, sound), (0.6, sound), (0.6, flat)))
    assert choose_rate({1.0: low, 2.0: high}) == Choice(2.0, {1.0: 0.5, 2.0: 0.6}, [])
    choice = choose_rate({1.0: low, 2.0: high + half})
    assert (choice.chosen, choice.collapsed) == (1.0, [2.0])
    choice = choose_rate({1.0: [{**low[0], **flat}], 2.0: half})
    assert (choice.chosen, choice.collapsed) == (2.0, [1.0, 2.0])


@pytest.mark.slow
def test_a_trial_is_the_same_twice_and_kept(
    source: Source, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trial = trial_of(source, "lifted", 1e-3, seed=1, record="curve")
    first = run_trial(source, trial)
    assert [row["step"] for row in first["curve"]] == [0, 4, 8]
    assert first["curve"][-1]["recall@1"] == first["recall@1"]
    assert sum(first["hits"]) / sum(first["queries"]) == pytest.approx(first["recall@1"])
    (again,) = Runner(source, tmp_path).run({"": [trial]})[""]
    for key in ("recall@1", "recall@8", "nmi", "hits", "spread"):
        assert first[key] == again[key]
    stopped = Runner(source, tmp_path, stop=lambda: True)  # would stop at the first step
    assert stopped.run({"": [trial]}) == {"": [again]}
    file = tmp_path / f"{trial.key(source)}.json"
    assert [*tmp_path.iterdir()] == [file]
    file.write_bytes(file.read_bytes()[:40])  # a damaged file is done again
    (third,) = Runner(source, tmp_path).run({"": [trial]})[""]
    assert "is damaged" in caplog.text
    assert third["hits"] == first["hits"]
