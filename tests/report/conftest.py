"""Small runs whose reports are read."""

from pathlib import Path

import pytest

from tests.tiny_run import train_pictures, train_vectors


@pytest.fixture(scope="session")
def picture_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_pictures(tmp_path_factory.mktemp("report"), epochs=2)


@pytest.fixture(scope="session")
def vector_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_vectors(tmp_path_factory.mktemp("vectors"))
