"""Attacks on a real server, those of `make torture`: an honest client is served all the same."""

import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.torture,
    pytest.mark.skipif(sys.platform != "linux", reason="reads what processes do from /proc"),
]
if sys.platform == "linux":
    from torture.page import Served, carry_out, explode, honest, prepare_run, served, stop


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("attacks")
    prepare_run(home)
    return home


@pytest.fixture(scope="module")
def server(home: Path) -> Iterator["Served"]:
    with served(home, home / "run") as server:
        assert honest(server) == []
        yield server


@pytest.fixture(scope="module", autouse=True)
def idle(server: "Served") -> float:
    """The memory of a decoder before any attack."""
    return server.megabytes(decoders_only=True)


@pytest.mark.parametrize(
    "name",
    [
        "250 silent connections",
        "half bodies",
        "senders who leave",
        "garbage",
        "items that are no files",
        "feedback",
    ],
)
def test_an_attack(server: "Served", name: str) -> None:
    assert carry_out(server, name).complaints == []


@pytest.mark.parametrize(
    "name",
    [
        "PNG, claims 4 gigapixels",
        "PNG, RGB",
        "PNG, tags over tags",
        "JPEG, 2,500 scans",
        "TIFF, two million tiles",
    ],
)
def test_a_bomb(server: "Served", idle: float, name: str) -> None:
    """`make torture` uploads them all."""
    found = explode(server, name, idle).complaints
    assert [complaint for complaint in found if "answered after" not in complaint] == []
    assert honest(server) == []


def test_ctrl_c_while_others_hold_it(home: Path) -> None:
    with served(home, home / "run") as server:
        found = stop(server, busy=True).complaints
        assert [complaint for complaint in found if "took" not in complaint] == []
        assert server.process.returncode in (130, -signal.SIGINT)  # a shell says 130 of both
