"""Hypothesis profiles, and a cache of its own for tests that ask for one.

`pytest -m fuzz --hypothesis-profile=torture` tries many more examples.
"""

from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("torture", max_examples=3000, deadline=None)


@pytest.fixture
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache."""
    place = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("NOFUSS_CACHE", str(place))
    return place
