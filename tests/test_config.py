"""Configurations: through JSON and back, limits, and what is no configuration."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nofuss.config import (
    Options,
    Preprocessing,
    Settings,
    check_limits,
    from_json,
    to_json,
    typed,
)
from nofuss.errors import RunError, UsageError

WHERE = Path("run/config.json")
LEAST: dict[str, Any] = {
    "preset": "vectors",
    "backbone": "identity",
    "start": "whitened",
    "head": "auto",
    "loss": "proxy-nca",
    "assignment": "static",
    "proxies_per_class": 1.0,
    "optimizer": "adam",
    "schedule": "cosine",
    "batch_size": 128,
    "lr": 0.0,
    "per_class": 0,
}
"""The settings that no default fills in."""


def read(values: dict[str, Any]) -> Settings:
    return from_json(Settings, values, where=WHERE)


@given(
    data=st.none() | st.text("aé /.", min_size=1).map(Path),
    seed=st.integers(0, 2**31 - 1),
    head_lr=st.none() | st.floats(0, 1),
    scale=st.none() | st.integers(1, 64),
    loss=st.text(),
    free_norms=st.booleans(),
)
def test_round_trip(**values: Any) -> None:
    settings = Settings(**LEAST | values)
    assert read(json.loads(json.dumps(to_json(settings)))) == settings


def test_options_say_what_was_asked() -> None:
    assert Options().asked() == {}
    asked = {"epochs": 0, "lr": 0.0, "mirror": False, "free_norms": True, "data": Path("x")}
    assert Options(**asked).asked() == asked
    assert Options(resume=False, loss=None).asked() == {}


def test_every_setting_can_be_asked_for() -> None:
    """What is stored of a run has the name and the words of the flag."""
    options = get_type_hints(Options)
    for name, hint in get_type_hints(Settings).items():
        assert name in options
        if isinstance(default := getattr(Settings(**LEAST), name), str):
            assert typed(default, options[name]) == default, hint


@pytest.mark.parametrize(
    "options",
    [
        {"epochs": -1},
        {"batch_size": 0},
        {"dim": 0},
        {"size": 3},
        {"lr": math.nan},
        {"head_lr": -1.0},
        {"proxy_lr": math.inf},
        {"test_fraction": 1.0},
        {"val_fraction": 1.5},
        {"seed": -1},
        {"num_workers": -1},
        {"schedule": "foo"},
        {"start": "PCA"},
        {"rerank": "off"},
    ],
    ids=str,
)
def test_what_makes_no_sense_is_refused(options: dict[str, Any]) -> None:
    ((name, value),) = options.items()
    for settings in (Options(**options), Settings(**LEAST | options)):
        with pytest.raises(UsageError, match=f"{name.replace('_', '-')} (is {value}|'{value}')"):
            check_limits(settings)


def test_a_word_that_is_none_names_the_nearest() -> None:
    for options, known in (({"preset": "papr"}, "'paper'"), ({"head": "closed"}, "closed-form")):
        with pytest.raises(UsageError, match=known):
            check_limits(Options(**options))


def test_limits_leave_the_rest_alone() -> None:
    check_limits(Options())
    check_limits(Options(epochs=0, seed=0, test_fraction=0.0, dim=1, preset="auto"))
    check_limits(Settings(**LEAST))


@pytest.mark.parametrize(
    "values",
    [
        {"epochs": "many"},
        {"epochs": 2.5},
        {"loss": 5},
        {"loss": None},
        {"seed": True},
        {"free_norms": 1},
        {"preset": "other"},
        {"preset": "auto"},
        {"optimizer": "sgd"},
        {"data": 5},
        {"weights": ["a", "b"]},
        {"lr": [1]},
    ],
    ids=str,
)
def test_foreign_values_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(RunError, match=f"config.json is damaged: {next(iter(values))} is"):
        read(LEAST | values)


def test_unknown_names_are_of_another_version() -> None:
    with pytest.raises(RunError, match="colour, flavour"):
        read({"flavour": 1, "colour": 2, "seed": 3})


def test_missing_names_are_said() -> None:
    values = {name: value for name, value in LEAST.items() if name not in ("loss", "lr")}
    with pytest.raises(RunError, match=r"config.json lacks loss, lr"):
        read(values)


@given(
    st.booleans(),
    st.dictionaries(
        st.sampled_from([f.name for f in dataclasses.fields(Settings)]) | st.text(),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
            lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
            max_leaves=3,
        ),
    ),
)
def test_any_json_object_is_read_or_refused(is_whole: bool, values: dict[str, Any]) -> None:
    message = ""
    try:
        assert isinstance(read((LEAST if is_whole else {}) | values), Settings)
    except RunError as error:
        message = str(error)
    assert "\n" not in message


def test_everything_is_frozen() -> None:
    for config in (Options(), Settings(**LEAST), Preprocessing(size=8, resize=8)):
        with pytest.raises(dataclasses.FrozenInstanceError):
            config.size = 3  # type: ignore[misc]


def test_none_from_python_asks_for_nothing() -> None:
    """Of a switch, too, whose default is False."""
    assert Options(free_norms=None, allow_shared=None, dim=None).asked() == {}  # type: ignore[arg-type]
