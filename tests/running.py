"""Real processes that are met while they run."""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "nofuss", *map(str, arguments)]


def every_step(*arguments: object) -> list[str]:
    """The program with a checkpoint after every step."""
    program = Path(__file__).parents[1] / "torture" / "every_step.py"
    return [sys.executable, "-P", str(program), *map(str, arguments)]


def started(
    command: Sequence[str], *, after: str, env: Mapping[str, str] = os.environ
) -> "subprocess.Popen[str]":
    """A process that has just said `after`."""
    running = subprocess.Popen(
        command,
        env={**env, "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert running.stdout is not None
    said = []
    for line in running.stdout:
        said.append(line)
        if after in line:
            return running
    raise AssertionError("".join(said))
