"""Each test has a cache of its own; most use a small source."""

from pathlib import Path

import pytest

from nofuss.paper.sources import Source, make_source
from tests.paper.tiny_source import tiny_budget, vectors


@pytest.fixture
def source() -> Source:
    return make_source("cub", vectors(), tiny_budget())


@pytest.fixture(autouse=True)
def cache(cache: Path) -> Path:
    return cache
