"""The properties of tests/ that feed foreign bytes to a parser, with 1,000 examples each.

Filters, requests and files of a run, pictures and tables: `pytest -m fuzz` with another profile.
"""

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from torture.commands import Case

PROFILE = ("--hypothesis-profile", "torture")


def campaign(home: Path, seed: int) -> Iterator[Case]:
    """Run them all in a process of its own; an example that fails is printed by hypothesis."""
    began = time.monotonic()
    words = ("-m", "pytest", "-m", "fuzz", *PROFILE, f"--hypothesis-seed={seed}", "-p", "no:xdist")
    ended = subprocess.run(
        [sys.executable, *words, "--basetemp", str(home / "tests")], capture_output=True, text=True
    )
    if ended.returncode:
        print(ended.stdout, ended.stderr, sep="\n")
    failed = [line for line in ended.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    complaints = failed or ([f"exit {ended.returncode}"] if ended.returncode else [])
    yield Case("properties", False, time.monotonic() - began, complaints)
