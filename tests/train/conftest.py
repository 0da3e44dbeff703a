"""The small training as fixtures."""

from collections.abc import Callable

import pytest
from small_training import Pictures, Recorder, make_training

from nofuss.train.loop import Training


@pytest.fixture
def feed() -> Pictures:
    return Pictures()


@pytest.fixture
def watch() -> Recorder:
    return Recorder()


@pytest.fixture
def training() -> Callable[..., Training]:
    return make_training
