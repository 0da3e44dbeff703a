"""Hypothesis profiles, a cache of its own for tests that ask for one, no words about slow work.

`pytest -m fuzz --hypothesis-profile=torture` tries many more examples.
"""

from pathlib import Path

import pytest
from hypothesis import settings

from nofuss.commands import console

settings.register_profile("torture", max_examples=3000, deadline=None)


@pytest.fixture
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache."""
    place = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("NOFUSS_CACHE", str(place))
    return place


@pytest.fixture(autouse=True)
def _no_words_about_slow_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the commands print must not depend on how busy the machine is."""
    monkeypatch.setattr(console, "LONG", 1e9)
