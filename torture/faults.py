"""Run the real command with a fault at its n-th write; see faults.c.

Starting Python and torch takes longer than the training, so processes are forked from one that has
only imported everything. They run `main` as `python -m nofuss` does.
"""

import ctypes
import multiprocessing
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.resources import files
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, NamedTuple

PRELOADED = ("nofuss.training.train", "nofuss.search.update", "torch._dynamo")
"""The slowest imports; an optimizer needs the last."""
KILL = 0
"""In place of an error number: kill the process at the call."""


class Fault(NamedTuple):
    """A failure of the n-th call that changes something below a folder."""

    under: Path
    at: int
    error: int = KILL
    once: bool = False


class Outcome(NamedTuple):
    """How a command ended."""

    code: int
    """Exit code; negative for a signal."""
    said: str
    seconds: float
    writes: int
    """Calls that changed, or tried to change, something below the folder; 0 if killed."""


class Running:
    """A running command, with the interface of `subprocess.Popen`."""

    def __init__(self, child: ForkServerProcess) -> None:
        self.child = child
        child.start()

    def poll(self) -> int | None:
        """Return its exit code, None while it runs."""
        return self.child.exitcode

    def kill(self) -> None:
        """Send SIGKILL."""
        self.child.kill()

    def wait(self) -> int:
        """Wait for its end; return the exit code, negative for a signal."""
        self.child.join()
        assert self.child.exitcode is not None
        return self.child.exitcode


class Commands:
    """Starts commands in forked processes; see the top of this file."""

    def __init__(self, home: Path) -> None:
        self.home, self._context = home, multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([*PRELOADED, "torture.faults"])

    def start(
        self, words: Sequence[object], log: Path, fault: Fault | None = None, count: Any = None
    ) -> Running:
        """Start a command; its output goes to the log."""
        arguments = ([str(word) for word in words], self.home, log, fault, count)
        return Running(self._context.Process(target=_child, args=arguments))

    def __call__(self, *words: object, fault: Fault | None = None) -> Outcome:
        """Run a command to its end."""
        log, count = self.home / "said.txt", self._context.Value("l", 0)
        began = time.monotonic()
        code = self.start(words, log, fault, count).wait()
        return Outcome(code, log.read_text(), time.monotonic() - began, int(count.value))


@contextmanager
def faulty_commands(home: Path) -> Iterator[Commands]:
    """Provide commands with the shim loaded before libc; needs a C compiler and Linux."""
    before = {name: os.environ.get(name) for name in ("LD_PRELOAD", "OMP_NUM_THREADS")}
    os.environ |= {"LD_PRELOAD": str(compile_shim(home)), "OMP_NUM_THREADS": "1"}
    commands = Commands(home)
    try:
        commands("--help")  # the server starts here, with the shim
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
    yield commands


def compile_shim(home: Path) -> Path:
    """Compile faults.c to a library."""
    shim = home / "faults.so"
    source = files("torture").joinpath("faults.c")
    options = ("-shared", "-fPIC", "-O1", "-Wall", "-o", str(shim), str(source), "-ldl")
    subprocess.run([shutil.which("cc") or "gcc", *options], check=True)
    return shim


def _child(words: list[str], home: Path, log: Path, fault: Fault | None, count: Any) -> None:
    """Plan the fault, then run the program, in the new process.

    count: where the calls that could fail are counted; None saves every step, to be killed.
    """
    from nofuss import cli
    from torture import every_step

    target = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(target, 1)
    os.dup2(target, 2)
    os.environ["NOFUSS_CACHE"] = str(home / "cache")
    shim = ctypes.CDLL(None)
    if fault is not None:
        under = os.fsencode(fault.under.absolute())
        shim.faults_plan(under, ctypes.c_long(fault.at), fault.error, int(fault.once))
    code = (every_step if count is None else cli).main(words)
    sys.stdout.flush()
    if count is not None:
        count.value = shim.faults_seen()
    sys.exit(code)
