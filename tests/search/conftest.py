"""One small run of pictures and one server for all tests of this folder."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.search.serving import Server, serving
from tests.tiny_run import train_pictures


@pytest.fixture(scope="session")
def picture_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_pictures(tmp_path_factory.mktemp("pictures"))


@pytest.fixture(scope="session")
def server(picture_run: Path) -> Iterator[Server]:
    with serving(picture_run) as server:
        yield server
