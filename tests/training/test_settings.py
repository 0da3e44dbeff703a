"""From what was asked to the settings of a run: presets, data, backbone, loss, refusals."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nofuss.config import Options, Settings, check_limits, from_json, to_json
from nofuss.data.open import TEST_FRACTION, TrainingData
from nofuss.data.triplets import Comparisons
from nofuss.errors import RunError, UsageError
from nofuss.model.backbones import build_backbone
from nofuss.training.settings import (
    BASE,
    DIM,
    FINETUNE_SIZE,
    FREE,
    NEEDS,
    OF_TRAINING,
    PRESETS,
    agree,
    head_dim,
    resolve,
)
from tests.asked import settings_of, some_data

WHERE = Path("run/config.json")


def of_preset(preset: Any, **options: Any) -> Settings:
    kind: Any = "vectors" if preset == "vectors" else "pictures"
    return settings_of(kind, preset=preset, **options)


def resolved(data: TrainingData, **options: Any) -> Settings:
    """Settings of vectors of eight dimensions."""
    return resolve(Options(**options), data, build_backbone("identity", channels=8))


def without_labels() -> TrainingData:
    data = some_data()
    triplets = Comparisons("triplets", np.array([[0, 4, 1], [1, 5, 2], [2, 6, 3]]))
    bare = dataclasses.replace(
        data.collection, labels=np.full(16, -1), class_names=(), comparisons=triplets
    )
    return dataclasses.replace(data, collection=bare)


# Layers


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_is_whole_and_survives_json(preset: Any) -> None:
    settings = of_preset(preset, data=Path("x"))
    check_limits(settings)
    assert settings.preset == preset
    again = from_json(Settings, json.loads(json.dumps(to_json(settings))), where=WHERE)
    assert again == settings


@pytest.mark.parametrize("preset", PRESETS)
def test_only_a_head_on_fixed_features_is_left_open(preset: Any) -> None:
    """Folds, and the number of steps, decide the rest of it."""
    settings = of_preset(preset)
    left = {name for name in ("epochs", "head_lr", "proxy_lr") if getattr(settings, name) is None}
    assert left == ({"epochs", "head_lr", "proxy_lr"} if settings.is_fixed else set())
    assert settings.is_fixed == (preset in ("frozen", "vectors"))
    assert (settings.dim is None) == (settings.start == "whitened")


def test_presets_name_fields_only() -> None:
    fields = {f.name for f in dataclasses.fields(Settings)}
    assert all(layer.keys() <= fields for layer in (BASE, *PRESETS.values()))
    options = {f.name for f in dataclasses.fields(Options)}
    assert set(FREE) | set(OF_TRAINING) <= options
    assert {name for _, names in NEEDS for name in names.split()} <= options


@pytest.mark.parametrize(
    ("kind", "side", "preset"),
    [
        ("vectors", 128, "vectors"),
        ("pictures", 95, "small"),
        ("pictures", 96, "frozen"),
    ],
)
def test_auto_chooses_by_the_data(kind: Any, side: int, preset: str) -> None:
    assert settings_of(kind, side).preset == preset
    assert settings_of(kind, side, preset="auto") == settings_of(kind, side)


def test_what_the_user_says_stays() -> None:
    asked = {"epochs": 0, "lr": 0.0, "freeze_batch_norm": False, "mirror": False, "views": 7}
    settings = of_preset("finetune", **asked)
    assert {name: getattr(settings, name) for name in asked} == asked


@pytest.mark.parametrize(
    ("options", "size"),
    [({}, FINETUNE_SIZE), ({"size": 224}, 224), ({"unfreeze": "all"}, None)],
)
def test_fine_tuning_the_last_stages_takes_larger_pictures(options: Any, size: int | None) -> None:
    settings = of_preset("finetune", **options)
    assert settings.size == size
    assert settings.views == (1 if options.get("unfreeze") else 4)
    assert of_preset("frozen").size is None


def test_every_stage_is_the_whole_network() -> None:
    options = {"backbone": "convnet", "size": 32}
    settings = of_preset("finetune", unfreeze="4", **options)
    assert settings == of_preset("finetune", unfreeze="all", **options)
    assert (settings.unfreeze, settings.views) == ("all", 1)
    assert of_preset("finetune", unfreeze="2", **options).unfreeze == "2"


@pytest.mark.parametrize(
    ("options", "proxies", "per_class", "scale"),
    [
        ({}, 1, 0, 16),
        ({"loss": "proxy-nca++"}, 1, 0, 16),
        ({"loss": "proxy-anchor"}, 1, 0, None),
        ({"loss": "proxy-anchor", "scale": 9.0}, 1, 0, 9),
        ({"loss": "soft-triple"}, 10, 0, None),
        ({"loss": "soft-triple", "proxies_per_class": 2.0}, 2, 0, None),
        ({"loss": "lifted"}, 1, 4, None),
        ({"loss": "n-pairs"}, 1, 2, None),
        ({"loss": "n-pairs", "per_class": 6}, 1, 6, None),
        ({"assignment": "dynamic"}, 1, 4, 16),
        ({"assignment": "dynamic", "per_class": 0}, 1, 0, 16),
        ({"free_norms": True}, 1, 0, None),
    ],
    ids=str,
)
def test_what_follows_from_the_loss(
    options: Any, proxies: float, per_class: int, scale: float | None
) -> None:
    found = settings_of(**options)
    assert (found.proxies_per_class, found.per_class, found.scale) == (proxies, per_class, scale)


# The head on fixed features


@pytest.mark.parametrize(
    "option",
    [
        {"epochs": 3},
        {"loss": "proxy-nca"},
        {"scale": 8.0},
        {"batch_size": 32},
        {"head_lr": 0.01},
        {"proxy_lr": 0.0},
        {"optimizer": "adam"},
        {"assignment": "static"},
        {"free_norms": True},
    ],
    ids=str,
)
def test_an_option_of_training_asks_for_training(option: Any) -> None:
    assert settings_of().head == "auto"
    assert settings_of(seed=3, dim=4, rerank="none").head == "auto"
    assert settings_of(**option).head == "trained"
    assert settings_of(head="trained", **option).head == "trained"


def test_no_epochs_are_the_closed_form() -> None:
    assert settings_of(epochs=0).head == "closed-form"
    assert settings_of(epochs=0, loss="proxy-anchor").head == "closed-form"


def test_from_another_start_the_head_is_trained() -> None:
    settings = settings_of(start="pca")
    assert (settings.head, settings.epochs, settings.head_lr) == ("trained", 20, 1e-4)
    assert settings_of(start="pca", epochs=2).epochs == 2


def test_the_dimension_of_a_head() -> None:
    assert head_dim(settings_of(), 64) == 64
    assert head_dim(settings_of(), 2048) == DIM
    assert head_dim(dataclasses.replace(settings_of(), dim=100), 64) == 64
    assert head_dim(dataclasses.replace(settings_of(), dim=100), 2048) == 100
    assert head_dim(of_preset("paper", dim=3000), 2048) == 3000


def test_more_dimensions_than_the_features_have(caplog: pytest.LogCaptureFixture) -> None:
    assert settings_of(dim=8).dim == 8
    assert caplog.messages == []
    saved = settings_of(dim=9)
    assert saved.dim == 8
    assert caplog.messages == ["dim is 8 instead of 9: the features have no more"]
    with pytest.raises(RunError, match="dim 8 → 9"):
        agree(saved, Options(dim=9))
    assert settings_of("pictures", 32, preset="small", dim=3000).dim == 3000, "it learns its own"


def test_gray_pictures_are_not_mirrored() -> None:
    """By the small convnet: they show characters. A network for photographs mirrors them."""
    assert not settings_of("gray", 32).mirror
    assert settings_of("gray", 128, backbone="efficientnet-lite0").mirror


def test_two_networks_are_instead_of_mirror_images() -> None:
    """By default; whoever names networks, or a size, gets both."""
    usual = settings_of("pictures")
    assert usual.backbone == "efficientnet-lite0+efficientnet-lite1"
    assert not usual.mirror
    assert settings_of("pictures", backbone=usual.backbone).mirror
    larger = settings_of("pictures", size=288)
    assert (larger.backbone, larger.mirror) == ("efficientnet-lite0", True)
    assert settings_of("pictures", 32, mirror=True).mirror


# Data without classes


def test_without_labels_items_choose_their_proxies() -> None:
    settings = resolved(without_labels())
    assert (settings.start, settings.assignment, settings.head) == ("pca", "dynamic", "trained")
    assert settings.test_fraction == TEST_FRACTION
    assert settings.epochs is not None
    assert settings.per_class == 0, "no item has a class"
    assert resolved(without_labels(), test_fraction=0.0).test_fraction == 0
    for options, name in (
        ({"start": "whitened"}, "start='whitened'"),
        ({"loss": "triplet"}, "--loss triplet"),
        ({"head": "closed-form"}, "--head"),
        ({"per_class": 2}, "--per-class"),
        ({"assignment": "static"}, "--assignment static"),
    ):
        with pytest.raises(UsageError, match=f"{name} needs labels"):
            resolved(without_labels(), **options)


def test_groups_of_linked_items_are_labels() -> None:
    data = some_data()
    linked = dataclasses.replace(data.collection, by_links=True)
    data = dataclasses.replace(data, collection=linked)
    assert not linked.has_classes
    settings = resolved(data)
    assert (settings.assignment, settings.start, settings.head) == ("static", "whitened", "auto")
    assert resolved(data, proxies_per_class=0.5).assignment == "balanced"


# Refusals


@pytest.mark.parametrize(
    ("kind", "name", "options"),
    [
        ("vectors", "vectors", {"preset": "frozen"}),
        ("pictures", "pictures", {"preset": "vectors"}),
        ("vectors", "--backbone convnet", {"backbone": "convnet"}),
        ("vectors", "--free-norms", {"free_norms": True, "scale": 3.0}),
        ("vectors", "--lr", {"lr": 0.1}),
        ("vectors", "--val-fraction", {"val_fraction": 0.1}),
        ("vectors", "--size", {"size": 64}),
        ("vectors", "--precision", {"precision": "bf16"}),
        ("gray", "--mirror", {"mirror": True}),
        ("vectors", "--unfreeze", {"unfreeze": "2"}),
        ("pictures", "--lora", {"lora": 4, "preset": "paper"}),
        ("pictures", "--head", {"head": "closed-form", "preset": "small"}),
        ("vectors", "--head", {"head": "closed-form", "start": "pca"}),
        ("vectors", "--loss", {"head": "closed-form", "loss": "nca"}),
        ("vectors", "--epochs", {"head": "untrained", "epochs": 3}),
        ("vectors", "--assignment", {"loss": "triplet", "assignment": "dynamic"}),
        ("vectors", "--proxies-per-class", {"loss": "nca", "proxies_per_class": 2.0}),
        ("vectors", "--free-norms", {"loss": "lifted", "free_norms": True}),
        ("vectors", "--scale", {"loss": "lifted", "scale": 3.0}),
        ("pictures", "--views", {"preset": "finetune", "unfreeze": "all", "views": 4}),
        ("pictures", "stages", {"preset": "finetune", "unfreeze": "99"}),
        ("vectors", "--epochs", {"epochs": -1}),
    ],
    ids=str,
)
def test_refused(kind: Any, name: str, options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=name):
        settings_of(kind, 32, **options)


# Resuming


def test_a_resumed_run_keeps_its_settings() -> None:
    saved = settings_of(seed=5, loss="proxy-anchor", out=Path("run"))
    assert agree(saved, Options(out=Path("run"), resume=True)) == saved
    same = Options(seed=5, loss="proxy-anchor", preset="auto", resume=True)
    assert agree(saved, same) == saved


def test_other_settings_are_named() -> None:
    saved = settings_of(seed=5, dim=4, out=Path("run"))
    with pytest.raises(RunError, match=r"dim 4 → 3, seed 5 → 6") as e:
        agree(saved, Options(out=Path("run"), seed=6, dim=3, rerank="auto"))
    assert "rerank" not in str(e.value)
    with pytest.raises(RunError, match="seed 5 → 0"):  # it is asked for, though it is the default
        agree(saved, Options(seed=0))
    with pytest.raises(RunError, match="preset vectors → frozen"):
        agree(saved, Options(preset="frozen"))
    with pytest.raises(UsageError, match="--seed is -1"):
        agree(saved, Options(seed=-1))


def test_where_and_how_fast_may_change() -> None:
    saved = settings_of(data=Path("x"), device="cpu")
    moved = {"data": Path("y"), "out": Path("z"), "device": "meta", "num_workers": 3}
    assert agree(saved, Options(**moved)) == dataclasses.replace(saved, **moved)


def test_a_stranger_s_folder_of_curves_is_not_written(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "nofuss")
    saved = settings_of(tensorboard=Path("curves"))
    assert agree(saved, Options()).tensorboard is None
    assert "add --tensorboard curves" in caplog.text
    assert agree(saved, Options(tensorboard=Path("mine"))).tensorboard == Path("mine")


@pytest.mark.parametrize("loss", ["proxy-nca", "proxy-triplet", "proxy-nca++", "clustering"])
def test_the_paper_trains_with_free_norms_and_constant_rates(loss: str) -> None:
    paper = settings_of("pictures", preset="paper", loss=loss)
    assert paper.free_norms == (loss in ("proxy-nca", "proxy-triplet"))
    assert (paper.optimizer, paper.schedule) == ("rmsprop", "constant")
    assert not settings_of("pictures", preset="paper", scale=9.0).free_norms


def test_auto_leaves_it_open() -> None:
    assert settings_of(head="auto", loss="proxy-anchor").head == "trained"
    assert settings_of(head="auto", preset="auto").head == "auto"
