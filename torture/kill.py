"""SIGKILL at random moments of `nofuss train`, and aimed into its saves.

A run is started, killed, resumed, killed again, until it comes to its end; then the next. A save is
hit when the kill leaves its half-written folder behind. After every kill the run must open, its
newest checkpoint be whole and no older than any that was there before, and the next process must
go on from it. Every step is saved, so a step is the most that can be lost.
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
from nofuss.run.directory import open_run
from nofuss.training.checkpoint import load_checkpoint
from torture.training import STEPS_PER_EPOCH, Place, command, differing, environment

EVERY_STEP = ("--checkpoint-seconds", "0")
Start = Callable[[Sequence[object], Path], "Process"]


class Process(Protocol):
    """A command that runs: of subprocess, or forked."""

    def poll(self) -> int | None:
        """Its exit code, once it has ended."""

    def kill(self) -> None:
        """SIGKILL."""

    def wait(self) -> int:
        """Its exit code at its end."""


def executed(home: Path) -> Start:
    """`python -m nofuss`, as a user starts it: most of its time goes into imports."""

    def start(words: Sequence[object], log: Path) -> Process:
        with log.open("w") as said:
            return subprocess.Popen(
                command(*words),
                env=environment(home) | {"PYTHONUNBUFFERED": "1"},
                stdout=said,
                stderr=subprocess.STDOUT,
            )

    return start


AT_WORK, GOING_ON = "classes", r"resuming at epoch (\d+), step (\d+)"


@dataclass
class Tally:
    """What happened with so many workers."""

    workers: int
    kills: int = 0
    in_saves: int = 0
    """Kills that left a half-written checkpoint."""
    finished: int = 0
    lost: int = 0
    """Most steps of a finished epoch that a kill took."""
    complaints: list[str] = field(default_factory=list)


def campaign(
    place: Place, start: Start, workers: int, *, kills: int, in_saves: int, seed: int
) -> Iterator[Tally]:
    """Kill until there are so many, and so many of them in saves; the tally after each process."""
    draw, tally = random.Random(f"{seed} {workers}"), Tally(workers)
    span = _undisturbed(place, start, workers, tally)
    number = 0
    while tally.kills < kills or tally.in_saves < in_saves:
        number += 1
        run = place.home / f"killed-{workers}-{number}"
        expected = 0
        while True:
            attempt = _Attempt(place, start, run, workers)
            if draw.random() < 0.1:  # while it still loads
                attempt.wait(time.monotonic() + draw.uniform(0, span))
            else:
                attempt.wait_for_words()
            began = time.monotonic()
            if tally.in_saves < in_saves and draw.random() < 0.5:
                attempt.wait_for_save(draw.randint(1, 6))
                time.sleep(draw.uniform(0, 0.015))
            elif draw.random() < 0.8:
                attempt.wait(began + draw.uniform(0, span))
            else:  # to its end: on a busy machine none might get there
                attempt.process.wait()
            seen = _newest(run)
            ended = attempt.kill()
            tally.complaints += attempt.went_on_from(expected)
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
    """Seconds from the first word of a run to its end; the number of workers changes no bit."""
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
    """Saves that have begun; a folder of the same name may be of a later one."""
    found = set()
    for path in (run / "checkpoints").glob(".step-*.new"):
        with suppress(FileNotFoundError):  # done in this moment
            found.add((path.name, path.stat().st_ino))
    return found


def _inspect(run: Path, seen: int, tally: Tally) -> int:
    """The step that the run can go on from, after a kill; 0 for its start."""
    if not (run / "config.json").is_file():
        return 0
    try:
        open_run(run)
    except NofussError as error:
        tally.complaints.append(f"{run.name}: {error}")
    checkpoint = load_checkpoint(run / "checkpoints", say=tally.complaints.append)
    step = 0 if checkpoint is None else checkpoint.step
    if step < seen:
        tally.complaints.append(f"{run.name}: step {step} is left, {seen} was there before")
    metrics = run / "metrics.jsonl"
    if metrics.is_file():
        done = STEPS_PER_EPOCH * len(metrics.read_text().splitlines())
        tally.lost = max(tally.lost, done - step)
        if done - step > 1:
            tally.complaints.append(f"{run.name}: {done} steps were done, {step} are left")
    return step


def _newest(run: Path) -> int:
    return max((int(path.name[5:]) for path in (run / "checkpoints").glob("step-*")), default=0)


class _Attempt:
    """One process of the real command, to be killed."""

    def __init__(self, place: Place, start: Start, run: Path, workers: int) -> None:
        self.run, self.log, self.remains = run, run.with_suffix(".log"), _half_written(run)
        self.log.touch()
        words = (*place.again(run), *EVERY_STEP, "--workers", str(workers))
        self.process = start(words, self.log)

    def wait_for_words(self) -> None:
        """Until it is at work."""
        self._until(lambda: AT_WORK in self.log.read_text(), 0.01)

    def wait_for_save(self, count: int) -> None:
        """Until the count-th save that begins from now on."""
        begun: set[tuple[str, int]] = set()

        def enough() -> bool:
            begun.update(_half_written(self.run) - self.remains)
            return len(begun) >= count

        self._until(enough, 0.0005)

    def wait(self, until: float) -> None:
        """Until a moment, or the process's own end."""
        self._until(lambda: time.monotonic() > until, 0.001)

    def _until(self, reached: Callable[[], bool], pause: float) -> None:
        while not reached() and self.process.poll() is None:
            time.sleep(pause)

    def kill(self) -> bool:
        """True where it had ended by itself before."""
        ended = self.process.poll() is not None
        self.process.kill()
        return self.process.wait() == 0 or ended

    def went_on_from(self, step: int) -> list[str]:
        """Complaints where it says that it went on from elsewhere."""
        found = re.search(GOING_ON, self.log.read_text())
        said = (int(found[1]) - 1) * STEPS_PER_EPOCH + int(found[2]) - 1 if found else step
        return [] if said == step else [f"{self.run.name}: went on from {said}, not {step}"]
