"""Trials: what they may see, what they leave, and that they are the same twice."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from nofuss.data.collection import Collection
from nofuss.data.open import open_data
from nofuss.paper.published import NAMES
from nofuss.paper.runner import Runner
from nofuss.paper.sources import Source, budget_of, make_source
from nofuss.paper.trials import has_collapsed, run_trial, trial_of
from tests.paper.tiny_source import tiny_budget, vectors

pytestmark = pytest.mark.slow


def test_methods_share_all_but_loss_rate_and_sampling(source: Source) -> None:
    configs = [trial_of(source, loss, 1e-3).settings for loss in NAMES]
    same = {replace(c, loss="", per_class=0, scale=None) for c in configs}
    assert len(same) == 1


def test_keys_follow_settings_and_data(source: Source) -> None:
    trial = trial_of(source, "lifted", 1e-3)
    others = [
        replace(trial, fold=0),
        replace(trial, record="curve"),
        trial_of(source, "lifted", 1e-3, seed=1),
        trial_of(source, "lifted", 2e-3),
    ]
    keys = {t.key(source) for t in [trial, *others]}
    keys.add(trial.key(make_source("cub", vectors(seed=1), tiny_budget())))
    assert len(keys) == 6


def test_batches_keep_items_and_move_rates(source: Source) -> None:
    small, large = (trial_of(source, "lifted", 1e-3, batch_size=b).settings for b in (16, 64))
    assert small.epochs == large.epochs
    assert large.head_lr == pytest.approx(2 * (small.head_lr or 0))
    assert large.proxy_lr == pytest.approx(10 * (large.head_lr or 0))


def test_a_try_that_diverges_scores_nothing(source: Source) -> None:
    found = run_trial(source, trial_of(source, "n-pairs", 1e30, fold=0))
    assert found["recall@1"] == 0
    assert "diverged" in found


def test_a_collapse_is_a_spread_that_training_made_small(source: Source) -> None:
    sound = run_trial(source, trial_of(source, "lifted", 1e-3, fold=0))
    assert min(sound["spread"], sound["spread_before"]) > 0.1
    assert not has_collapsed(sound)
    assert has_collapsed({"spread": 0.009, "spread_before": 0.5})
    assert not has_collapsed({"spread": 0.004, "spread_before": 0.002}), (
        "a fresh network's is small"
    )
    assert not has_collapsed({"diverged": "", "recall@1": 0.0})


def test_the_spread_of_a_collapsed_model_is_seen(source: Source) -> None:
    data = vectors()
    assert data.array is not None
    data.array[:] += 1000  # all vectors, and so their projections, point the same way
    flat = make_source("cub", data, tiny_budget())
    assert run_trial(flat, trial_of(flat, "lifted", 1e-3, fold=0))["spread"] < 1e-3


def test_corrected_bounds_hold_while_learning(source: Source) -> None:
    found = run_trial(source, trial_of(source, "proxy-nca", 1e-2, record="bounds"))
    for row in found["curve"]:
        for name in ("ranking", "expected_ranking", "nca", "triplet", "total"):
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
    return replace(pictures, split=np.where(pictures.labels < 4, "train", "test"))


@pytest.mark.parametrize(
    ("name", "backbone", "optimizer", "schedule"),
    [
        ("hours", "efficientnet-lite0", "adam", "ramp"),
        ("paper", "inception-bn", "rmsprop", "constant"),
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
    """The larger budgets, one small epoch of each; that of hours on cached activations."""
    monkeypatch.setenv("NOFUSS_CACHE", str(tmp_path / "cache"))
    small = {"epochs": 1, "size": 64, "batch_size": 4}
    budget = budget_of("cub", name)
    budget = replace(budget, settings={**budget.settings, **small})
    source = make_source("cub", photos, budget)
    trial = trial_of(source, "proxy-nca", 1e-4, record="neighbours")
    c = trial.settings
    assert (c.backbone, c.optimizer, c.schedule) == (backbone, optimizer, schedule)
    assert c.free_norms == (name == "paper")
    (tmp_path / "work").mkdir()
    (found,) = Runner(source, tmp_path / "work").run({"": [trial]})[""]
    assert found["steps"] == 3
    pictures = [row["query"]["src"] for group in found["grid"] for row in group["rows"]]
    assert pictures
    assert all(src.startswith("data:image/") for src in pictures)
    assert [path.suffix for path in (tmp_path / "work").iterdir()] == [".json"]
    cached = list((tmp_path / "cache").glob("activations-*.records"))
    assert len(cached) == (2 if name == "hours" else 0), "of training views, and of test pictures"
