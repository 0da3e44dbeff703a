"""The real command with a fault at its n-th write: see faults.c.

Starting Python and torch costs more than the training, so the processes are forked from one that
has imported everything and done nothing. They run `main` as `python -m nofuss` does.
"""

import ctypes
import multiprocessing
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

PRELOADED = ("nofuss.pipeline", "nofuss.search.commands", "torch._dynamo")
"""What costs most to import; an optimizer brings in the last."""
KILL = 0
"""Instead of an error number: the process is killed at the call."""


class Fault(NamedTuple):
    """At the n-th call that changes something below a folder."""

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


Run = Callable[..., Outcome]


@contextmanager
def faulty_commands(home: Path) -> Iterator[Run]:
    """Hands out a function (words, fault) → Outcome; needs a C compiler and Linux."""
    shim = compile_shim(home)
    before = {name: os.environ.get(name) for name in ("LD_PRELOAD", "OMP_NUM_THREADS")}
    os.environ |= {"LD_PRELOAD": str(shim), "OMP_NUM_THREADS": "1"}
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*PRELOADED, "torture.faults"])

    def run(*words: object, fault: Fault | None = None) -> Outcome:
        log, count = home / "said.txt", context.Value("l", 0)
        arguments = ([str(word) for word in words], home, log, fault, count)
        child = context.Process(target=_child, args=arguments)
        began = time.monotonic()
        child.start()
        child.join()
        seconds = time.monotonic() - began
        assert child.exitcode is not None
        return Outcome(child.exitcode, log.read_text(), seconds, int(count.value))

    try:
        context.Process(target=os.getpid).start()  # the server starts here, with the shim
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
    yield run


def compile_shim(home: Path) -> Path:
    """faults.c as a library."""
    shim = home / "faults.so"
    source = files("torture").joinpath("faults.c")
    options = ("-shared", "-fPIC", "-O1", "-Wall", "-o", str(shim), str(source), "-ldl")
    subprocess.run([shutil.which("cc") or "gcc", *options], check=True)
    return shim


def _child(words: list[str], home: Path, log: Path, fault: Fault | None, count: object) -> None:
    """In the new process: plan the fault, then be the program."""
    from nofuss.cli import main

    target = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(target, 1)
    os.dup2(target, 2)
    os.environ["NOFUSS_CACHE"] = str(home / "cache")
    shim = ctypes.CDLL(None)
    if fault is not None:
        under = os.fsencode(fault.under.absolute())
        shim.faults_plan(under, ctypes.c_long(fault.at), fault.error, int(fault.once))
    code = main(words)
    sys.stdout.flush()
    count.value = shim.faults_seen()  # type: ignore[attr-defined]
    sys.exit(code)
