"""One server on the run of pictures for all tests of this folder, and one that is taught."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from nofuss.search.update import update_index
from tests.search.serving import Server, serving
from tests.tiny_run import draw

if TYPE_CHECKING:
    from selenium import webdriver


@pytest.fixture(scope="session")
def picture_run(picture_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the run, since servers write into it."""
    return Path(shutil.copytree(picture_run, tmp_path_factory.mktemp("served") / "run"))


@pytest.fixture(scope="session")
def server(picture_run: Path) -> Iterator[Server]:
    with serving(picture_run) as server:
        yield server


@pytest.fixture(scope="session")
def taught_run(picture_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the run, since it is taught, with an index that has a wrong label in it."""
    home = tmp_path_factory.mktemp("taught")
    shutil.copytree(picture_run, home / "run")
    for label, name in ((0, "red"), (1, "fruit/blue"), (2, "fruit/green")):
        (home / "data" / name).mkdir(parents=True)
        for number in range(8):
            draw(label, number).save(home / "data" / name / f"{number}.png")
    draw(1, 3, side=80).save(home / "data" / "red" / "wrong.png")  # a blue one
    update_index(home / "run", home / "data")
    update_index(home / "run", None, remove=True)  # drawn like these
    return home / "run"


@pytest.fixture(scope="session")
def taught_server(taught_run: Path) -> Iterator[Server]:
    with serving(taught_run) as server:
        yield server


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> "Iterator[webdriver.Chrome]":
    from tests.browser import open_browser  # here: most tests need no browser

    with open_browser(tmp_path_factory.mktemp("profile")) as browser:
        yield browser
