"""The small training as fixtures."""

from collections.abc import Callable

import pytest

from nofuss.training.loop import Training
from tests.training.small_training import Pictures, Recorder, make_training


@pytest.fixture
def feed() -> Pictures:
    return Pictures()


@pytest.fixture
def told() -> Recorder:
    return Recorder()


@pytest.fixture
def training() -> Callable[..., Training]:
    return make_training
