"""The package as it is installed: its data, its version, and what it says where it can't work."""

import subprocess
import sys
import tomllib
from fnmatch import fnmatch
from importlib.metadata import version
from pathlib import Path

import pytest

import nofuss
from nofuss.cli import COMMANDS

ROOT = Path(nofuss.__file__).parent
PROJECT = ROOT.parent / "pyproject.toml"
in_repository = pytest.mark.skipif(not PROJECT.is_file(), reason="an installed package has none")


def run(script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)


@in_repository
def test_every_file_that_is_no_code_is_package_data() -> None:
    with PROJECT.open("rb") as file:
        patterns = tomllib.load(file)["tool"]["setuptools"]["package-data"]["nofuss"]
    files = [path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*") if path.is_file()]
    data = {name for name in files if not name.endswith((".py", ".pyc"))}
    assert data == {name for name in data if any(fnmatch(name, each) for each in patterns)}
    assert all(any(fnmatch(name, each) for name in data) for each in patterns)


def test_pages_and_types_are_there() -> None:
    for name in (
        "py.typed",
        "report/card.md",
        "report/report.html",
        "search/page/static/index.html",
        "paper/page.html",
    ):
        assert (ROOT / name).is_file()


@in_repository
def test_the_version_is_in_one_place() -> None:
    with PROJECT.open("rb") as file:
        project = tomllib.load(file)
    assert "version" not in project["project"]
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "nofuss.__version__"}
    changelog = (PROJECT.parent / "CHANGELOG.md").read_text()
    assert f"\n## {nofuss.__version__} (" in changelog


def test_the_installed_version_is_ours() -> None:
    assert version("nofuss") == nofuss.__version__


@pytest.mark.slow
def test_the_mathematics_needs_nothing_that_windows_lacks() -> None:
    done = run("""
import sys
for name in ("fcntl", "resource", "pwd", "grp", "termios"):
    sys.modules[name] = None  # importing it fails
import torch
from nofuss import ProxyNCA, nmi, recall_at_k
x, y = torch.randn(8, 4), torch.arange(8) // 2
ProxyNCA(4, 4)(x, y).backward()
assert 0 <= recall_at_k(x, y, ks=(1,))[1] <= 1
assert nmi(x, y, seed=0) >= 0
""")
    assert done.returncode == 0, done.stderr


def test_windows_is_refused_in_a_sentence() -> None:
    done = run("""
import sys
from functools import partial
from nofuss.cli import run
from nofuss.errors import UsageError
sys.platform = "win32"
try:
    run("train", partial(print))
except UsageError as error:
    assert "WSL 2" in str(error)
else:
    raise AssertionError
""")
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_the_program_is_installed() -> None:
    program = Path(sys.executable).parent / "nofuss"
    if not program.is_file():
        pytest.skip("not installed as a program")
    done = subprocess.run([program, "--help"], capture_output=True, text=True, check=True)
    assert all(f"│ {name} " in done.stdout for name in COMMANDS)
