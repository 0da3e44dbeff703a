"""Run the real command in a forked process: measured, and with a fault at its n-th write.

Starting Python and torch takes longer than most of what is tried, so processes are forked from one
that has imported everything, with faults.c loaded before libc. They run `main` as
`python -m nofuss` does. Needs Linux and a C compiler.
"""

import ctypes
import multiprocessing
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from importlib.resources import files
from multiprocessing import forkserver
from pathlib import Path
from typing import Any, NamedTuple

PRELOADED = ("nofuss.training.train", "nofuss.search.update", "torch._dynamo", "torture.commands")
"""The slowest imports; an optimizer needs torch._dynamo."""
PATIENCE = 120.0
"""Seconds after which a command counts as hung, and is killed."""
KILL = 0
"""In place of an error number: kill the process at the call."""


class Case(NamedTuple):
    """One disturbance or attack, and its result."""

    name: str
    refused: bool
    """Whether it was noticed, or refused in one line; otherwise the work was done as without it."""
    seconds: float
    complaints: list[str]


class Fault(NamedTuple):
    """A failure of the n-th call that changes something below a folder."""

    under: Path
    at: int
    error: int = KILL
    once: bool = False


class Ended(NamedTuple):
    """How a command ended."""

    code: int
    """Exit code; negative for a signal."""
    said: str
    seconds: float
    megabytes: float
    """Peak memory; 0 if it was killed."""
    writes: int
    """Calls that changed, or tried to change, something below a fault's folder."""

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
        """Return a complaint if it neither did its work nor refused it."""
        if self.code == 0 or self.refused:
            return []
        return [f"exit {self.code} after {self.seconds:.0f} s, said {self.line!r}"]


class Running:
    """A running command."""

    def __init__(self, child: Any, log: Path, counts: Any) -> None:
        self.child, self._log, self._counts = child, log, counts
        self._log.touch()
        self._began = time.monotonic()
        child.start()

    @property
    def said(self) -> str:
        """The output so far."""
        return self._log.read_text(errors="backslashreplace")

    def wait_for(self, words: str) -> None:
        """Wait until it has printed this, or has ended."""
        while words not in self.said and self.child.is_alive():
            time.sleep(0.01)

    def send(self, number: signal.Signals) -> None:
        """Send a signal."""
        os.kill(self.child.pid, number)

    def wait(self) -> Ended:
        """Wait for its end; kill it after PATIENCE seconds."""
        self.child.join(max(0.0, PATIENCE - (time.monotonic() - self._began)))
        if self.child.is_alive():
            self.child.kill()
            self.child.join()
        seconds, said = time.monotonic() - self._began, self.said
        self._log.unlink()
        megabytes, writes = self._counts
        return Ended(self.child.exitcode, said, seconds, megabytes, int(writes))


class Commands:
    """Starts commands whose cache is in `home`."""

    def __init__(self, home: Path) -> None:
        self.home, self._context = home, multiprocessing.get_context("forkserver")
        before = {name: os.environ.get(name) for name in ("LD_PRELOAD", "OMP_NUM_THREADS")}
        os.environ |= {"LD_PRELOAD": str(compile_shim(home)), "OMP_NUM_THREADS": "1"}
        self._context.set_forkserver_preload([*PRELOADED])
        try:
            forkserver.ensure_running()  # it keeps this environment
        finally:
            for name, value in before.items():
                os.environ.pop(name) if value is None else os.environ.update({name: value})

    def start(
        self, *words: object, fault: Fault | None = None, every_step: bool = False
    ) -> Running:
        """Start a command; every_step: with a checkpoint after each, so that a kill loses one."""
        log = self.home / f"said-{time.monotonic_ns()}.txt"
        counts = self._context.Array("d", 2)
        arguments = ([str(word) for word in words], self.home, log, fault, every_step, counts)
        return Running(self._context.Process(target=_run, args=arguments), log, counts)

    def __call__(self, *words: object, fault: Fault | None = None) -> Ended:
        """Run a command to its end."""
        return self.start(*words, fault=fault).wait()


def compile_shim(home: Path) -> Path:
    """Compile faults.c to a library."""
    shim = home / "faults.so"
    source = files("torture").joinpath("faults.c")
    options = ("-shared", "-fPIC", "-O1", "-Wall", "-o", str(shim), str(source), "-ldl")
    subprocess.run([shutil.which("cc") or "gcc", *options], check=True)
    return shim


def _run(
    words: list[str], home: Path, log: Path, fault: Fault | None, every_step: bool, counts: Any
) -> None:
    """Plan the fault, then run the program, in the new process."""
    from nofuss import cli
    from torture import every_step as stepwise

    target = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
    os.dup2(target, 1)
    os.dup2(target, 2)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    os.environ["NOFUSS_CACHE"] = str(home / "cache")
    signal.signal(signal.SIGINT, signal.default_int_handler)  # the server ignores it
    sys.argv[1:] = words
    shim = ctypes.CDLL(None)
    if fault is not None:
        under = os.fsencode(fault.under.absolute())
        shim.faults_plan(under, ctypes.c_long(fault.at), fault.error, int(fault.once))
    code = (stepwise if every_step else cli).main(words)
    sys.stdout.flush()
    counts[:] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, shim.faults_seen()
    sys.exit(code)
