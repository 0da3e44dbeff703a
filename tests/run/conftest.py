"""A small run whose kept embeddings are read."""

from pathlib import Path

import pytest

from tests.tiny_run import train_pictures


@pytest.fixture(scope="session")
def picture_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_pictures(tmp_path_factory.mktemp("run"), epochs=2)
