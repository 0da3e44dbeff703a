"""Configurations: through JSON and back, presets, refusals."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nofuss.config import Preprocessing, TrainConfig, read_config, to_json
from nofuss.errors import RunError, UsageError
from nofuss.training.presets import PRESETS, check_limits, resolve

WHERE = Path("run/config.json")
# What folds, the features or the number of items decide where the head has a closed form.
CHOSEN = {"dim", "root", "center", "shrinkage", "epochs", "head_lr", "proxy_lr", "val_fraction"}
# What a loss, a data set or nobody in particular decides, not the preset.
OPEN = {
    "class_level",
    "label_pattern",
    "shrinkage",
    "data",
    "corrections",
    "out",
    "weights",
    "scale",
    "size",
    "per_class",
    "test_fraction",
    "tensorboard",
    "lora",
    "unfreeze",
    "views",
    "train_size",
}


def through_json(config: TrainConfig) -> TrainConfig:
    return read_config(json.loads(json.dumps(to_json(config))), where=WHERE)


@given(
    data=st.none() | st.text("aé /.", min_size=1).map(Path),
    seed=st.integers(0, 2**31 - 1),
    lr=st.none() | st.floats(0, 1),
    scale=st.none() | st.integers(1, 64),
    loss=st.text(),
    free_norms=st.booleans(),
)
def test_round_trip(**values: Any) -> None:
    config = TrainConfig(**values)
    assert through_json(config) == config


@pytest.mark.parametrize("preset", PRESETS)
def test_round_trip_of_every_preset(preset: Any) -> None:
    kind = "vectors" if preset == "vectors" else "pictures"
    config = resolve(TrainConfig(preset=preset, data=Path("x")), kind=kind, small=False)
    assert through_json(config) == config


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_fill_every_none_that_is_needed(preset: Any) -> None:
    kind = "vectors" if preset == "vectors" else "pictures"
    config = resolve(TrainConfig(preset=preset), kind=kind, small=False)
    empty = {f.name for f in dataclasses.fields(config) if getattr(config, f.name) is None}
    assert empty <= OPEN | (CHOSEN if config.start == "whitened" else {"folds"})
    check_limits(config)
    assert resolve(config, kind=kind, small=False) == config  # nothing left to resolve


def test_presets_name_fields_only() -> None:
    fields = {f.name for f in dataclasses.fields(TrainConfig)}
    assert all(preset.keys() <= fields for preset in PRESETS.values())


def test_what_the_user_says_stays() -> None:
    config = resolve(
        TrainConfig(epochs=0, lr=0.0, freeze_batch_norm=False, preset="finetune"),
        kind="pictures",
        small=False,
    )
    assert (config.epochs, config.lr, config.freeze_batch_norm) == (0, 0.0, False)


@pytest.mark.parametrize(
    ("settings", "size"),
    [
        ({}, 288),
        ({"size": 224}, 224),
        ({"unfreeze": "all"}, None),
        ({"backbone": "timm:resnet18"}, None),
    ],
)
def test_fine_tuning_the_last_stages_takes_larger_pictures(settings: Any, size: int | None) -> None:
    asked = TrainConfig(preset="finetune", **settings)
    assert resolve(asked, kind="pictures", small=False).size == size


@pytest.mark.parametrize(
    ("kind", "small", "preset"),
    [
        ("vectors", False, "vectors"),
        ("pictures", True, "small"),
        ("pictures", False, "frozen"),
    ],
)
def test_auto_chooses_by_the_data(kind: str, small: bool, preset: str) -> None:
    assert resolve(TrainConfig(), kind=kind, small=small).preset == preset


@pytest.mark.parametrize("loss", ["proxy-nca", "proxy-triplet", "proxy-nca++", "clustering"])
def test_the_paper_trains_with_free_norms_and_constant_rates(loss: str) -> None:
    paper = resolve(TrainConfig(preset="paper", loss=loss), kind="pictures", small=False)
    assert paper.free_norms == (loss in ("proxy-nca", "proxy-triplet"))
    assert (paper.optimizer, paper.schedule) == ("rmsprop", "constant")
    assert resolve(paper, kind="pictures", small=False) == paper
    equal = resolve(TrainConfig(preset="paper", scale=9.0), kind="pictures", small=False)
    assert not equal.free_norms


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"preset": "small"}, "vectors", "does not fit vectors"),
        ({"preset": "frozen"}, "vectors", "does not fit vectors"),
        ({"preset": "vectors"}, "pictures", "does not fit pictures"),
        ({"free_norms": True, "scale": 3.0}, "pictures", "--free-norms has no scale"),
        ({"preset": "papr"}, "pictures", "did you mean 'paper'"),
        ({"epochs": -1}, "pictures", "--epochs is -1; expected a number from 0 up"),
        ({"batch_size": 0}, "pictures", "--batch-size is 0"),
        ({"dim": 0}, "pictures", "--dim is 0"),
        ({"size": 3}, "pictures", "--size is 3"),
        ({"lr": math.nan}, "pictures", "--lr is nan"),
        ({"head_lr": -1.0}, "pictures", "--head-lr is -1.0"),
        ({"proxy_lr": math.inf}, "pictures", "--proxy-lr is inf"),
        ({"test_fraction": 1.0}, "pictures", "--test-fraction is 1.0; .* below 1"),
        ({"val_fraction": 1.5}, "pictures", "--val-fraction is 1.5"),
        ({"seed": -1}, "pictures", "--seed is -1"),
        ({"num_workers": -1}, "pictures", "--num-workers is -1"),
        ({"schedule": "foo"}, "pictures", "unknown schedule 'foo'"),
        ({"start": "PCA"}, "pictures", "unknown start 'PCA'"),
        ({"rerank": "off"}, "vectors", "unknown rerank 'off'"),
        ({"preset": "small", "shrinkage": 0.5}, "pictures", "--shrinkage needs --start whitened"),
        ({"preset": "paper", "folds": 3}, "pictures", "--folds needs --start whitened"),
        ({"untrained": True, "root": True}, "vectors", "trains nothing; drop --root"),
        ({"untrained": True, "loss": "nca"}, "vectors", "trains nothing; drop --loss"),
        (
            {"preset": "finetune", "unfreeze": "all", "views": 4},
            "pictures",
            "--views needs stages that stay fixed",
        ),
    ],
)
def test_refused(options: dict[str, Any], kind: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        resolve(TrainConfig(**options), kind=kind, small=True)


@pytest.mark.parametrize(
    "values",
    [
        {"epochs": "many"},
        {"epochs": 2.5},
        {"loss": 5},
        {"loss": None},
        {"seed": True},
        {"resume": 1},
        {"preset": "other"},
        {"optimizer": "sgd"},
        {"data": 5},
        {"weights": ["a", "b"]},
        {"lr": [1]},
    ],
    ids=str,
)
def test_foreign_values_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(RunError, match=f"config.json: {next(iter(values))} is"):
        read_config(values, where=WHERE)


def test_unknown_names_are_of_another_version() -> None:
    with pytest.raises(RunError, match="another version: colour, flavour"):
        read_config({"flavour": 1, "colour": 2, "seed": 3}, where=WHERE)


@given(
    st.dictionaries(
        st.sampled_from([f.name for f in dataclasses.fields(TrainConfig)]) | st.text(),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
            lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
            max_leaves=3,
        ),
    )
)
def test_any_json_object_is_read_or_refused(values: dict[str, Any]) -> None:
    message = ""
    try:
        assert isinstance(read_config(values, where=WHERE), TrainConfig)
    except RunError as error:
        message = str(error)
    assert "\n" not in message


def test_everything_is_frozen() -> None:
    for config in (TrainConfig(), Preprocessing(size=8, resize=8)):
        with pytest.raises(dataclasses.FrozenInstanceError):
            config.size = 3  # type: ignore[misc]


def test_untrained_can_be_resumed() -> None:
    config = resolve(TrainConfig(untrained=True), kind="pictures", small=False)
    resumed = dataclasses.replace(config, resume=True)
    assert resolve(resumed, kind="pictures", small=False) == resumed


def test_whitening_within_classes_needs_classes() -> None:
    with pytest.raises(UsageError, match="--start whitened needs labels"):
        resolve(TrainConfig(start="whitened"), kind="vectors", small=False, labelled=False)
