"""The examples about losses run, and what the documentation quotes from them is what they print."""

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_plain_loop_raises_recall_on_unseen_digits() -> None:
    command = [sys.executable, "-W", "error", ROOT / "examples" / "plain_loop.py"]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    before, after = map(float, re.findall(r"\d\.\d+", run.stdout))
    assert after > before + 0.2


def test_documented_comparison_is_the_one_printed(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(ROOT / "examples" / "compare_with_pml.py"))
    assert capsys.readouterr().out in (ROOT / "docs" / "losses.md").read_text()
