"""Each test has a cache of its own; most use a small source."""

from pathlib import Path

import pytest

from nofuss.paper.sources import Source, make_source
from tests.paper.tiny_source import tiny_budget, vectors


@pytest.fixture
def source() -> Source:
    return make_source("cub", vectors(), tiny_budget())


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    place = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("NOFUSS_CACHE", str(place))
    return place
