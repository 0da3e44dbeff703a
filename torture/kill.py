"""Kill `nofuss train` (SIGKILL) at random moments, and within its saves.

A run is started, killed and resumed until it finishes; then the next one. A kill was within a save
if it left a half-written file. After every kill the run must open, its newest checkpoint must be
whole and no older than any before, and the next process must resume from it. Every step is saved,
so at most one step can be lost.
"""

import random
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from nofuss.errors import NofussError
from nofuss.files import TEMPORARY
from nofuss.run.directory import Run
from nofuss.training.checkpoint import load_checkpoint
from torture.training import STEPS_PER_EPOCH, Place, command, differing, environment, logged

Start = Callable[[Sequence[object], Path], "Process"]


class Process(Protocol):
    """A running command, started by subprocess or forked."""

    def poll(self) -> int | None:
        """Return its exit code, None while it runs."""

    def kill(self) -> None:
        """Send SIGKILL."""

    def wait(self) -> int:
        """Wait for its end; return the exit code."""


def executed(home: Path, module: str = "torture.every_step") -> Start:
    """Start `python -m nofuss` as a user does; imports take most of its time."""

    def start(words: Sequence[object], log: Path) -> Process:
        with log.open("w") as said:
            return subprocess.Popen(
                command(*words, module=module),
                env=environment(home) | {"PYTHONUNBUFFERED": "1"},
                stdout=said,
                stderr=subprocess.STDOUT,
            )

    return start


STARTED, RESUMED = "classes", r"resuming at epoch (\d+), step (\d+)"


@dataclass
class Tally:
    """What happened with a number of workers."""

    workers: int
    kills: int = 0
    in_saves: int = 0
    """Kills that left a half-written checkpoint."""
    finished: int = 0
    lost: int = 0
    """Most steps of a finished epoch that a kill lost."""
    complaints: list[str] = field(default_factory=list)


def campaign(
    place: Place, start: Start, workers: int, *, kills: int, in_saves: int, seed: int
) -> Iterator[Tally]:
    """Kill until both counts are reached; yield the tally after each process."""
    draw, tally = random.Random(f"{seed} {workers}"), Tally(workers)
    span = _undisturbed(place, start, workers, tally)
    number = 0
    while tally.kills < kills or tally.in_saves < in_saves:
        number += 1
        run = place.home / f"killed-{workers}-{number}"
        expected = 0
        while True:
            attempt = _Attempt(place, start, run, workers)
            if draw.random() < 0.1:  # while it still imports
                attempt.wait(time.monotonic() + draw.uniform(0, span))
            else:
                attempt.wait_for_words()
            began = time.monotonic()
            if tally.in_saves < in_saves and draw.random() < 0.5:
                attempt.wait_for_save(draw.randint(1, 6))
                time.sleep(draw.uniform(0, 0.015))
            elif draw.random() < 0.8:
                attempt.wait(began + draw.uniform(0, span))
            else:  # to its end: on a busy machine no run might finish otherwise
                attempt.process.wait()
            seen = _newest(run)
            ended = attempt.kill()
            tally.complaints += attempt.resumed_from(expected)
            if ended:
                if attempt.process.poll() != 0:
                    tally.complaints.append(f"{run.name}: exit {attempt.process.poll()}")
                tally.complaints += [f"{run.name}: {d}" for d in differing(run, place.reference)]
                tally.finished += 1
                shutil.rmtree(run)
                yield tally
                break
            tally.kills += 1
            tally.in_saves += bool(_half_written(run) - attempt.remains)
            expected = _inspect(run, seen, tally)
            yield tally


def _undisturbed(place: Place, start: Start, workers: int, tally: Tally) -> float:
    """Return seconds from the first output to the end; check that workers change no bit."""
    run = place.home / f"undisturbed-{workers}"
    attempt = _Attempt(place, start, run, workers)
    attempt.wait_for_words()
    began = time.monotonic()
    attempt.process.wait()
    span = time.monotonic() - began
    tally.complaints += [f"{workers} workers: {d}" for d in differing(run, place.reference)]
    shutil.rmtree(run)
    return span


def _half_written(run: Path) -> set[tuple[str, int]]:
    """Return saves that have begun, with inodes: a later save may have the same name."""
    found = set()
    for path in (run / "checkpoints").glob(f"{TEMPORARY}*"):
        with suppress(FileNotFoundError):  # just finished
            found.add((path.name, path.stat().st_ino))
    return found


def _inspect(run: Path, seen: int, tally: Tally) -> int:
    """Check a killed run; return the step that it can be resumed from, 0 for its start."""
    if not (run / "config.json").is_file():
        return 0
    try:
        Run.open(run)
    except NofussError as error:
        tally.complaints.append(f"{run.name}: {error}")
    with logged() as lines:
        checkpoint = load_checkpoint(run / "checkpoints")
    tally.complaints += lines
    step = 0 if checkpoint is None else checkpoint.step
    if step < seen:
        tally.complaints.append(f"{run.name}: step {step} is left, step {seen} had been saved")
    metrics = run / "metrics.jsonl"
    if metrics.is_file():
        done = STEPS_PER_EPOCH * len(metrics.read_text().splitlines())
        tally.lost = max(tally.lost, done - step)
        if done - step > 1:
            tally.complaints.append(f"{run.name}: {done} steps were done, {step} are left")
    return step


def _newest(run: Path) -> int:
    return max((int(path.stem[5:]) for path in (run / "checkpoints").glob("step-*")), default=0)


class _Attempt:
    """One process of the real command, to be killed."""

    def __init__(self, place: Place, start: Start, run: Path, workers: int) -> None:
        self.run, self.log, self.remains = run, run.with_suffix(".log"), _half_written(run)
        self.log.touch()
        words = (*place.again(run), "--num-workers", str(workers))
        self.process = start(words, self.log)

    def wait_for_words(self) -> None:
        """Wait until it has opened the data."""
        self._until(lambda: STARTED in self.log.read_text(), 0.01)

    def wait_for_save(self, count: int) -> None:
        """Wait for the count-th save that begins from now on."""
        begun: set[tuple[str, int]] = set()

        def enough() -> bool:
            begun.update(_half_written(self.run) - self.remains)
            return len(begun) >= count

        self._until(enough, 0.0005)

    def wait(self, until: float) -> None:
        """Wait until a moment, or until the process ends."""
        self._until(lambda: time.monotonic() > until, 0.001)

    def _until(self, reached: Callable[[], bool], pause: float) -> None:
        while not reached() and self.process.poll() is None:
            time.sleep(pause)

    def kill(self) -> bool:
        """Kill it; return whether it had ended before."""
        ended = self.process.poll() is not None
        self.process.kill()
        return self.process.wait() == 0 or ended

    def resumed_from(self, step: int) -> list[str]:
        """Return a complaint if it says that it resumed from another step."""
        found = re.search(RESUMED, self.log.read_text())
        said = (int(found[1]) - 1) * STEPS_PER_EPOCH + int(found[2]) - 1 if found else step
        return [] if said == step else [f"{self.run.name}: resumed from step {said}, not {step}"]
