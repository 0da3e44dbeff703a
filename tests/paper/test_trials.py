"""Trials: what they may see, what they leave, and that they are the same twice."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from nofuss.data.collection import Collection
from nofuss.data.detect import open_data
from nofuss.errors import RunError
from nofuss.files import LOCK, TEMPORARY
from nofuss.paper import tables
from nofuss.paper.budgets import PHOTOGRAPHS
from nofuss.paper.convergence import NOT_TIMED
from nofuss.paper.further import FURTHER, NAMES, loss_of
from nofuss.paper.lab import Lab
from nofuss.paper.rates import choose_rates, choose_scales, scale_tries, tries
from nofuss.paper.reproduce import FIGURES
from nofuss.paper.sources import Source, bare_triplets, make_source
from nofuss.paper.statistics import summary
from nofuss.paper.tables import LOSSES, seeds_of
from nofuss.paper.trial import Trial, run_trial
from tests.paper.tiny_source import tiny_budget, vectors


def test_the_choice_of_rates_never_sees_test_classes(source: Source, tmp_path: Path) -> None:
    """Spoilt test items change nothing: neither the rates nor a single score."""
    with Lab(tmp_path / "a") as lab:
        rates, tried = choose_rates(source, LOSSES, lab.run)
        spoilt = vectors()
        assert spoilt.array is not None
        spoilt.array[source.test_rows] = np.nan
        other = replace(
            source, collection=spoilt, features=torch.from_numpy(spoilt.array), fingerprint="spoilt"
        )
    with Lab(tmp_path / "b") as lab:
        assert choose_rates(other, LOSSES, lab.run) == (rates, tried)


def test_one_command_works_in_a_folder_at_a_time(source: Source, tmp_path: Path) -> None:
    trial = Trial(source.budget.config("proxy-nca", 1e-3))
    with Lab(tmp_path), pytest.raises(RunError, match="is being written by process"), Lab(tmp_path):
        pass
    with Lab(tmp_path) as lab:
        assert "steps" in lab.run(source, [trial])[trial]


def test_every_method_has_as_many_tries(source: Source) -> None:
    counts = {loss_of(method): 0 for method in LOSSES}
    for trial in dict.fromkeys(tries(source, LOSSES)):  # equal ones run once
        counts[trial.config.loss] += 1
        train, held_out = source.sides(trial.fold)
        assert set(source.labels(train)).isdisjoint(source.labels(held_out))
        assert not set(held_out) & set(source.test_rows)
    assert set(counts.values()) == {4}


def test_scales_are_chosen_on_training_classes_and_change_one_method(
    source: Source, tmp_path: Path
) -> None:
    rates = dict.fromkeys(LOSSES, 1e-3)
    with Lab(tmp_path) as lab:
        scales, tried = choose_scales(source, list(FURTHER), rates, lab.run)
        assert all(t.fold is not None for t in scale_tries(source, list(FURTHER), rates))
        for method, row in tried.items():
            assert list(row) == [8.0, 16.0, 32.0, 64.0]  # the preset's scale is 16
            assert row[scales.get(method, 16.0)] == max(row.values())
        tuned = source.with_scales({"proxy-nca-scaled": 64.0})
        configs = {m: seeds_of(tuned, rates, m)[0].config for m in ("proxy-nca", *FURTHER)}
        assert [c.loss for c in configs.values()] == ["proxy-nca", "proxy-nca", "proxy-nca++"]
        assert [c.scale for c in configs.values()] == [16.0, 64.0, 16.0]
        untuned = [seeds_of(source, rates, m) for m in ("proxy-nca", "proxy-nca-scaled")]
        assert untuned[0] == untuned[1], "the same training is run once"


def test_tables_have_the_papers_methods_and_two_more(source: Source, tmp_path: Path) -> None:
    rates = dict.fromkeys(LOSSES, 1e-3)
    with Lab(tmp_path) as lab:
        entry = tables.entry(source, rates, lab.run(source, tables.trials(source, rates)))
        scores, pairs, stages = entry.tables
        assert {row[0] for row in scores.rows} >= set(NAMES.values())
        assert not any("best scale" in row[0] for row in pairs.rows), "the paper's order is its own"
        assert [row[0] for row in stages.rows] == list(NAMES.values())
        assert all(float(cell) >= 0 for row in stages.rows for cell in row[1:])
        assert "Proxy-NCA++ at its best scale" in entry.verdict[1]
        assert entry.values["further"]["proxy-nca-scaled"]["mean"] == 0, "no scale was chosen"


def test_tries_on_some_classes_stay_on_their_half(source: Source) -> None:
    few = replace(source, budget=replace(source.budget, try_classes=2))
    for fold in (0, 1):
        whole, some = source.sides(fold), few.sides(fold)
        assert all(set(s) < set(w) for s, w in zip(some, whole, strict=True))
        assert [len(np.unique(source.labels(rows))) for rows in some] == [2, 2]
    trial = Trial(source.budget.config("lifted", 1e-3), fold=0)
    assert trial.key(source) != trial.key(few)
    assert replace(trial, fold=None).key(source) == replace(trial, fold=None).key(few)


def test_methods_share_all_but_loss_rate_and_sampling(source: Source) -> None:
    rates = dict.fromkeys(LOSSES, 1e-3)
    configs = [seeds_of(source, rates, loss)[0].config for loss in LOSSES]
    same = {replace(c, loss="", per_class=0, scale=None) for c in configs}
    assert len(same) == 1


def test_a_trial_is_the_same_twice_and_kept(source: Source, tmp_path: Path) -> None:
    trial = Trial(source.budget.config("lifted", 1e-3, seed=1), record="curve")
    first = run_trial(source, trial)
    assert [row["step"] for row in first["curve"]] == [0, 4, 8]
    assert first["curve"][-1]["recall@1"] == first["recall@1"]
    assert sum(first["hits"]) / sum(first["queries"]) == pytest.approx(first["recall@1"])
    with Lab(tmp_path) as lab:
        again = lab.run(source, [trial])[trial]
        for key in ("recall@1", "recall@8", "nmi", "hits"):
            assert first[key] == again[key]
    with Lab(tmp_path, stop=lambda: True) as lab:  # would stop at the first step
        assert lab.run(source, [trial])[trial] == again


def test_keys_follow_settings_and_data(source: Source) -> None:
    trial = Trial(source.budget.config("lifted", 1e-3))
    others = [
        replace(trial, fold=0),
        replace(trial, record="curve"),
        replace(trial, config=replace(trial.config, seed=1)),
        replace(trial, config=replace(trial.config, head_lr=2e-3)),
    ]
    keys = {t.key(source) for t in [trial, *others]}
    keys.add(trial.key(make_source("cub", vectors(seed=1), tiny_budget())))
    assert len(keys) == 6


def test_a_damaged_file_is_done_again(source: Source, tmp_path: Path) -> None:
    trial = Trial(source.budget.config("proxy-nca", 1e-3))
    with Lab(tmp_path) as lab:
        before = lab.run(source, [trial])[trial]
        file = tmp_path / f"{trial.key(source)}.json"
        file.write_bytes(file.read_bytes()[:40])
        assert lab.run(source, [trial])[trial]["hits"] == before["hits"]


def test_a_try_that_diverges_scores_nothing(source: Source) -> None:
    trial = Trial(source.budget.config("n-pairs", 1e30), fold=0)
    found = run_trial(source, trial)
    assert found["recall@1"] == 0
    assert "diverged" in found


def test_bare_triplets_say_what_the_labels_say(source: Source) -> None:
    data = bare_triplets(source, source.train_rows, 500, seed=0)
    assert data.labels is None
    assert data.triplets is not None
    x, y, z = (source.labels(data.triplets[:, i]) for i in range(3))
    assert (x == y).all()
    assert (x != z).all()
    assert (data.triplets[:, 0] != data.triplets[:, 1]).all()
    assert np.isin(data.triplets, source.train_rows).all()
    assert len(np.unique(data.triplets[:, 0])) == len(source.train_rows)


def test_batches_keep_items_and_move_rates(source: Source) -> None:
    small, large = (source.budget.config("lifted", 1e-3, batch_size=b) for b in (16, 64))
    assert small.epochs == large.epochs
    assert large.head_lr == pytest.approx(2 * (small.head_lr or 0))
    assert large.proxy_lr == pytest.approx(10 * (large.head_lr or 0))


@pytest.mark.parametrize("name", [n for n in FIGURES if n != "retrieval"])
def test_every_experiment_ends_in_an_entry(name: str, source: Source, tmp_path: Path) -> None:
    experiment: Any = FIGURES[name]
    rates = dict.fromkeys(experiment.losses(source), 1e-3)
    with Lab(tmp_path) as lab:
        entry = experiment.entry(source, rates, lab.run(source, experiment.trials(source, rates)))
        assert entry.verdict
        assert entry.tables
        assert all(len(row) == len(entry.tables[0].head) for row in entry.tables[0].rows)
        assert all(s.points for figure in entry.figures for s in figure.series)


@pytest.mark.parametrize("name", ["batch-size", "fractional", "dynamic"])
@pytest.mark.parametrize("budget", ["hours", "paper"])
def test_long_budgets_compare_with_what_they_train(name: str, budget: str, source: Source) -> None:
    """Sweeps with fewer points have those that the others are compared with."""
    experiment: Any = FIGURES[name]
    long = replace(source, budget=PHOTOGRAPHS[budget])
    rates = dict.fromkeys(experiment.losses(long), 1e-4)
    trials = experiment.trials(long, rates)
    assert {loss_of(m) for m in experiment.losses(long)} == {t.config.loss for t in trials}
    made_up = {"recall@1": 0.5, "hits": [1, 2], "queries": [2, 4], "proxies_in_use": 1.0}
    entry = experiment.entry(long, rates, dict.fromkeys(trials, made_up))
    assert len(entry.tables[0].rows[0]) == len(entry.tables[0].head)


def test_seconds_are_compared_only_of_one_machine(source: Source, tmp_path: Path) -> None:
    experiment, rates = FIGURES["convergence"], dict.fromkeys(LOSSES, 1e-3)
    trials = experiment.trials(source, rates)
    with Lab(tmp_path) as lab:
        found = dict(lab.run(source, trials))
    assert NOT_TIMED not in experiment.entry(source, rates, found).verdict
    found[trials[0]] = found[trials[0]] | {"host": "elsewhere"}
    assert NOT_TIMED in experiment.entry(source, rates, found).verdict


def test_what_a_kill_left_of_a_result_is_cleared(source: Source, tmp_path: Path) -> None:
    trial = Trial(source.budget.config("proxy-nca", 1e-3))
    (tmp_path / f"{TEMPORARY}0123456789abcdef").write_text("{")
    with Lab(tmp_path) as lab:
        lab.run(source, [trial])
    assert {path.name for path in tmp_path.iterdir()} == {f"{trial.key(source)}.json", LOCK}


def test_corrected_bounds_hold_while_learning(source: Source) -> None:
    config = source.budget.config("proxy-nca", 1e-2)
    found = run_trial(source, Trial(config, record="bounds"))
    for row in found["curve"]:
        for name in ("ranking", "expected_ranking", "nca", "triplet"):
            assert row["corrected"][name]["violations"] == 0


@pytest.fixture
def photos(tmp_path: Path) -> Collection:
    """Eight classes of three pictures, half of the classes for testing."""
    random = np.random.default_rng(0)
    for label in range(8):
        for i in range(3):
            file = tmp_path / "data" / f"{label}" / f"{i}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(random.integers(0, 256, (70, 70, 3), dtype=np.uint8)).save(file)
    pictures = open_data(tmp_path / "data")
    assert pictures.labels is not None
    return replace(pictures, split=np.where(pictures.labels < 4, "train", "test"))


@pytest.mark.parametrize(
    ("name", "backbone", "optimizer", "schedule"),
    [
        ("hours", "efficientnet-lite0", "adam", "ramp"),
        ("paper", "inception-bn", "rmsprop", "exponential"),
    ],
)
def test_networks_are_trained(
    name: str,
    backbone: str,
    optimizer: str,
    schedule: str,
    photos: Collection,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The larger budgets, one small epoch of each; that of hours on kept activations."""
    monkeypatch.setenv("NOFUSS_CACHE", str(tmp_path / "cache"))
    small = {"epochs": 1, "size": 64, "batch_size": 4}
    budget = PHOTOGRAPHS[name]
    budget = replace(budget, settings={**budget.settings, **small})
    source = make_source("cub", photos, budget)
    trial = Trial(source.budget.config("proxy-nca", 1e-4), record="neighbours")
    c = trial.config
    assert (c.backbone, c.optimizer, c.schedule) == (backbone, optimizer, schedule)
    with Lab(tmp_path / "work") as lab:
        found = lab.run(source, [trial])[trial]
        assert found["steps"] == 3
        pictures = [row["query"]["src"] for group in found["grid"] for row in group["rows"]]
        assert pictures
        assert all(src.startswith("data:image/") for src in pictures)
        assert {path.suffix for path in (tmp_path / "work").iterdir()} == {".json", ""}  # the lock
        kept = list((tmp_path / "cache").glob("activations-*.records"))
        assert len(kept) == (2 if name == "hours" else 0), "of training views, and of test pictures"


def test_only_the_papers_setting_has_two_batches() -> None:
    batches = {n: [b.batch_of(m) for m in ("proxy-nca", "lifted")] for n, b in PHOTOGRAPHS.items()}
    assert batches == {"minutes": [64, 64], "hours": [64, 64], "paper": [32, 128]}


def test_summary_of_one_seed_has_no_interval() -> None:
    assert summary([0.5]) == {"mean": 0.5, "interval": None, "seeds": [0.5]}
