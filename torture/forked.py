"""Run the real command in a process forked from one that has imported everything.

Starting Python and torch takes seconds, most attacks take a fraction of one.
"""

import multiprocessing
import os
import resource
import signal
import sys
import time
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

from torture.measured import PATIENCE, Ended

PRELOADED = (
    "nofuss.training.train",
    "nofuss.report.sections",
    "nofuss.search.search",
    "torch._dynamo",
)


class Forked:
    """A running command, with the interface of `measured.Started`."""

    def __init__(self, home: Path, *words: object) -> None:
        context = _context()
        self._log = home / f"said-{time.monotonic_ns()}.txt"
        self._log.touch()
        self._peak: Any = context.Value("d", 0.0)
        self._began = time.monotonic()
        arguments = ([str(word) for word in words], home, self._log, self._peak)
        self.process = context.Process(target=_run, args=arguments)
        self.process.start()

    @property
    def said(self) -> str:
        """The output so far."""
        return self._log.read_text(errors="backslashreplace")

    def wait_for(self, words: str) -> None:
        """Wait until it has printed this, or has ended."""
        while words not in self.said and self.process.is_alive():
            time.sleep(0.01)

    def wait(self) -> Ended:
        """Wait for its end; kill it after PATIENCE seconds."""
        self.process.join(max(0.0, PATIENCE - (time.monotonic() - self._began)))
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        seconds, said = time.monotonic() - self._began, self.said
        self._log.unlink()
        assert self.process.exitcode is not None
        return Ended(self.process.exitcode, said, seconds, self._peak.value)


def run_forked(home: Path, *words: object) -> Ended:
    """Run a command to its end."""
    return Forked(home, *words).wait()


def _context() -> ForkServerContext:
    os.environ["OMP_NUM_THREADS"] = "1"  # before the server starts: it keeps its environment
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*PRELOADED, "torture.forked"])
    return context


def _run(words: list[str], home: Path, log: Path, peak: Any) -> None:
    """Run the program, in the new process."""
    from nofuss.cli import main

    target = os.open(log, os.O_WRONLY | os.O_TRUNC | os.O_APPEND)
    os.dup2(target, 1)
    os.dup2(target, 2)
    os.environ["NOFUSS_CACHE"] = str(home / "cache")
    os.chdir(home)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # the server ignores it
    sys.argv[1:] = words
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    code = main(words)
    sys.stdout.flush()
    peak.value = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    sys.exit(code)
