"""Kill `nofuss train` (SIGKILL) at random moments, half of them while a checkpoint is written.

A run is started, killed and resumed until it finishes; then the next one. After every kill the run
must open, its newest checkpoint must be whole and no older than any before, and the next process
must resume from it. Every step is saved, so at most one can be lost; finished runs must have the
bits of an undisturbed one.
"""

import random
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from nofuss.errors import NofussError
from nofuss.files import TEMPORARY
from nofuss.run.directory import Run
from nofuss.training.checkpoint import load_checkpoint
from torture.commands import Case, Commands, Running
from torture.training import STEPS_PER_EPOCH, differing, logged, prepare

STARTED, RESUMED = "classes", r"resuming at epoch (\d+), step (\d+)"


def campaign(home: Path, seed: int, *, kills: int = 100) -> Iterator[Case]:
    """Kill runs with 0 to 2 loader workers."""
    place, commands, draw = prepare(home, epochs=12), Commands(home), random.Random(seed)
    began, done, number = time.monotonic(), 0, 0
    commands.start(*place.first(home / "timed"), every_step=True).wait()
    span = time.monotonic() - began
    while done < kills:
        number += 1
        run, expected = home / f"killed-{number}", 0
        while run_is_unfinished(run):
            workers = ("--num-workers", str(number % 3))
            process = commands.start(*place.again(run), *workers, every_step=True)
            in_save = _wait(process, run, draw, span)
            seen = _newest(run)
            process.child.kill()
            ended = process.wait()
            found = re.search(RESUMED, ended.said)
            came = (int(found[1]) - 1) * STEPS_PER_EPOCH + int(found[2]) - 1 if found else expected
            complaints = [] if came == expected else [f"resumed from {came}, not {expected}"]
            if ended.code not in (0, -9):
                complaints.append(f"exit {ended.code}, said {ended.line!r}")
            if ended.code == -9:
                done += 1
                expected = _check(run, seen, complaints)
            yield Case(f"kill {done}{' in a save' * in_save}", True, ended.seconds, complaints)
        yield Case(f"run {number}", False, 0.0, differing(run, place.reference))
        shutil.rmtree(run)


def run_is_unfinished(run: Path) -> bool:
    """Return whether the last file of a run, its report, is missing."""
    return not (run / "report.html").is_file()


def _wait(process: Running, run: Path, draw: random.Random, span: float) -> bool:
    """Wait for the moment to kill; return whether it is within a save."""
    if draw.random() > 0.1:  # else while it still opens its data
        process.wait_for(STARTED)
    until, saves = time.monotonic() + draw.uniform(0, span), draw.randint(1, 6)
    in_save, begun = draw.random() < 0.5, set[str]()
    while process.child.is_alive() and time.monotonic() < until:
        begun |= {path.name for path in (run / "checkpoints").glob(f"{TEMPORARY}*")}
        if in_save and len(begun) >= saves:
            return True
        time.sleep(0.0005)
    return False


def _check(run: Path, seen: int, complaints: list[str]) -> int:
    """Check a killed run; return the step that it can be resumed from, 0 for its start."""
    if not (run / "config.json").is_file():
        return 0
    try:
        Run.open(run)
    except NofussError as error:
        complaints.append(str(error))
    with logged() as lines:
        checkpoint = load_checkpoint(run / "checkpoints")
    step = 0 if checkpoint is None else checkpoint.step
    metrics = run / "metrics.jsonl"
    done = STEPS_PER_EPOCH * len(metrics.read_text().splitlines()) if metrics.is_file() else 0
    if step < seen or step < done - 1:
        complaints.append(f"step {step} is left; step {seen} was saved, {done} were done")
    complaints += lines
    return step


def _newest(run: Path) -> int:
    return max((int(path.stem[5:]) for path in (run / "checkpoints").glob("step-*")), default=0)
