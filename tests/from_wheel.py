"""Run the tests from a wheel, in a clean environment outside the repository: `make test-wheel`.

    python -m tests.from_wheel dist/nofuss-1.2.3-py3-none-any.whl --versions lowest

versions: pinned (constraints.txt), lowest (what pyproject.toml allows), newest. Further arguments
go to pytest. With --python an environment that has the wheel is used instead of a new one.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]
NOT_NEEDED = {"nofuss", "dist", "build", "site", "runs"}
"""Of the repository; the package is the wheel's."""


def main() -> int:
    """Install, copy the tests, run them; return pytest's exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--versions", choices=("pinned", "lowest", "newest"), default="pinned")
    parser.add_argument("--python", type=Path)
    chosen, for_pytest = parser.parse_known_args()
    with tempfile.TemporaryDirectory(prefix="nofuss-wheel-") as name:
        folder = Path(name)
        python = chosen.python or _installed(folder, chosen.wheel.resolve(), chosen.versions)
        for path in ROOT.iterdir():
            if path.name in NOT_NEEDED or path.name.startswith("."):
                continue
            if path.is_dir():
                shutil.copytree(path, folder / path.name)
            else:
                shutil.copy(path, folder / path.name)
        outside = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        check = "import nofuss; print(nofuss.__version__, nofuss.__file__)"
        subprocess.run([python, "-c", check], cwd=folder, env=outside, check=True)
        command = [python, "-m", "pytest", *for_pytest]
        return subprocess.run(command, cwd=folder, env=outside).returncode


def _installed(folder: Path, wheel: Path, versions: str) -> Path:
    """Return the Python of a new environment with the wheel and what the tests need."""
    venv.create(folder / ".venv", with_pip=True)
    python = folder / ".venv" / "bin" / "python"
    with (ROOT / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)["project"]
    wanted, extras = [str(wheel)], project["optional-dependencies"]
    tools = [need for need in extras["dev"] if "nofuss[" not in need]
    if versions == "lowest":
        needs = [*project["dependencies"], *extras["lite"]]
        wanted += [need.replace(">=", "==") for need in needs]
    else:
        wanted[0] += "[lite,onnx,parquet,heif]"
    pins = ["-c", str(ROOT / "constraints.txt")] if versions == "pinned" else []
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *pins]
    subprocess.run([*pip, *wanted, *tools], check=True)
    return python


if __name__ == "__main__":
    sys.exit(main())
