"""What all tests share: finished runs, caches, hypothesis profiles, what `make quick` leaves out.

`pytest -m fuzz --hypothesis-profile=torture` tries many more examples.
"""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from filelock import FileLock
from hypothesis import settings

from nofuss.commands import console

settings.register_profile("tests", max_examples=30, deadline=None)
settings.register_profile("torture", max_examples=1000, deadline=None)
settings.load_profile("tests")

SERVERS = "test_engines.py"
"""What needs a database."""
TRAINED = {"picture_run", "vector_run", "own_vector_run", "server", "taught_run", "taught_server"}
"""Fixtures that train: the tests that use them are slow, even if another test came first."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests by the fixtures that they use."""
    for item in items:
        fixtures = set(getattr(item, "fixturenames", ()))
        if fixtures & TRAINED:
            item.add_marker(pytest.mark.slow)
        if "browser" in fixtures:
            item.add_marker(pytest.mark.browser)
        if item.path.name == SERVERS:
            item.add_marker(pytest.mark.servers)


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that all worker processes of pytest-xdist see."""
    own = tmp_path_factory.getbasetemp()
    return own.parent if "PYTEST_XDIST_WORKER" in os.environ else own


@pytest.fixture(scope="session", autouse=True)
def _cache_of_the_session(shared: Path) -> None:
    """No test reads or fills the user's cache."""
    os.environ["NOFUSS_CACHE"] = str(shared / "cache")


def made_once(shared: Path, name: str, make: Callable[[Path], Path]) -> Path:
    """Return the run that `make` leaves in a folder: the first worker that asks makes it."""
    folder, done = shared / name, shared / f"{name}.done"
    with FileLock(shared / f"{name}.lock"):
        if not done.exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            done.write_text(str(make(folder)))
    return Path(done.read_text())


@pytest.fixture(scope="session")
def picture_run(shared: Path) -> Path:
    """A finished run on pictures, which are beside it in data/. For reading: copy it to write."""
    from tests.tiny_run import train_pictures  # here: most tests need no training

    return made_once(shared, "pictures", lambda folder: train_pictures(folder, epochs=2))


@pytest.fixture(scope="session")
def vector_run(shared: Path) -> Path:
    """A finished run on vectors, beside it in data.npz. For reading: copy it to write."""
    from tests.tiny_run import train_vectors  # here: most tests need no training

    return made_once(shared, "vectors", train_vectors)


@pytest.fixture
def own_vector_run(vector_run: Path, tmp_path: Path) -> Path:
    """A copy of the run on vectors that a test may write into."""
    return Path(shutil.copytree(vector_run, tmp_path / "run"))


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
