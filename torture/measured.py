"""Run a command and measure it: exit code, output, time and peak memory."""

import os
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from torture.training import command, environment

PATIENCE = 120.0
"""Seconds after which a command counts as hung, and is killed."""


class Ended(NamedTuple):
    """How a process ended."""

    code: int
    """Exit code; negative for a signal."""
    said: str
    seconds: float
    megabytes: float
    """The largest resident set."""

    @property
    def line(self) -> str:
        """The last line of the output."""
        return self.said.strip().splitlines()[-1] if self.said.strip() else ""

    @property
    def refused(self) -> bool:
        """Whether it ended with one line that is meant for the user."""
        clear = self.line.startswith("nofuss: ") and "(unexpected" not in self.line
        return self.code in (1, 2) and clear and "Traceback" not in self.said

    def complaints(self) -> list[str]:
        """Return a complaint if it crashed or hung, whatever was attacked."""
        if self.code == 0 or self.refused:
            return []
        return [f"exit {self.code} after {self.seconds:.0f} s, said {self.line!r}"]


class Case(NamedTuple):
    """One attack and its result."""

    name: str
    refused: bool
    """Whether it was refused in one line; otherwise the work was done as without the attack."""
    seconds: float
    megabytes: float
    complaints: list[str]


def judged(name: str, ended: Ended, *others: str) -> Case:
    """Return the case of one command, with other complaints added."""
    complaints = [*ended.complaints(), *others]
    return Case(name, ended.refused, ended.seconds, ended.megabytes, complaints)


def run_measured(
    home: Path, *words: object, env: Mapping[str, str] | None = None, cwd: Path | None = None
) -> Ended:
    """Run the real command to its end, or kill it after PATIENCE seconds."""
    return Started(home, *words, env=env, cwd=cwd).wait()


class Started:
    """A running command."""

    def __init__(
        self,
        home: Path,
        *words: object,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
    ) -> None:
        self._log = home / f"said-{time.monotonic_ns()}.txt"
        self._began = time.monotonic()
        with self._log.open("w") as said:
            self.process = subprocess.Popen(
                command(*words),
                cwd=cwd or home,
                env={**environment(home), **(env or {}), "PYTHONUNBUFFERED": "1"},
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
            )

    @property
    def said(self) -> str:
        """The output so far."""
        return self._log.read_text(errors="backslashreplace")

    def wait_for(self, words: str) -> None:
        """Wait until it has printed this, or has ended."""
        left = os.WEXITED | os.WNOHANG | os.WNOWAIT  # leave the status for `wait`, which measures
        while words not in self.said and not os.waitid(os.P_PID, self.process.pid, left):
            time.sleep(0.01)

    def wait(self) -> Ended:
        """Wait for its end; kill it after PATIENCE seconds."""
        while True:
            ended, status, usage = os.wait4(self.process.pid, os.WNOHANG)
            if ended:
                break
            if time.monotonic() - self._began > PATIENCE:
                self.process.kill()
            time.sleep(0.005)
        self.process.returncode = os.waitstatus_to_exitcode(status)
        seconds = time.monotonic() - self._began
        said = self.said
        self._log.unlink()
        return Ended(self.process.returncode, said, seconds, usage.ru_maxrss / 1024)
