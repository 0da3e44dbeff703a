"""Output in the terminal: lines, progress bars, tables. Plain lines when piped.

Everything is printed through these functions. It may contain names of files, classes and tensors
from outside: no control character reaches the terminal, and no name is interpreted as markup.
"""

import json
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import TracebackType
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from nofuss.errors import visible

# No emoji: a folder may be called :dog:.
out = Console(highlight=False, soft_wrap=True, emoji=False)
err = Console(highlight=False, soft_wrap=True, emoji=False, stderr=True)


LONG = 30.0
"""Seconds that are announced before they are spent."""
LONGEST = 4000
"""Characters of one message."""


def duration(seconds: float) -> str:
    """Return a rough duration in words: 40 seconds, 5 minutes, 3 hours."""
    for unit, name in ((3600.0, "hours"), (60.0, "minutes")):
        if seconds >= 2 * unit:
            return f"{seconds / unit:,.0f} {name}"
    return f"{seconds:.0f} seconds"


def announce(label: str, seconds: float) -> None:
    """Say how long work will take, if that is long."""
    if seconds >= LONG:
        say(f"{label}: takes about {duration(seconds)}")


def speak(aloud: bool) -> None:
    """Show or hide everything but failures: of several processes, one prints."""
    out.quiet = not aloud


def say(message: str) -> None:
    """Print one line; without markup, so that names are shown as they are."""
    out.print(_line(message), markup=False)


def warn(message: str) -> None:
    """Print one line as a note, in colour."""
    out.print(f"note: {_line(message)}", markup=False, style="yellow")


def aside(message: str) -> None:
    """Print one line to standard error, beside output that a program reads."""
    if not out.quiet:
        err.print(_line(message), markup=False)


def _line(message: str) -> str:
    """Return a message as one line that ends: a stranger's setting may have megabytes."""
    line = visible(message)
    return line if len(line) <= LONGEST else f"{line[:LONGEST]}…"


def print_json(content: Any) -> None:
    """Print JSON for a program; safe to show in a terminal."""
    # DEL is the one control character that json does not escape.
    print(json.dumps(content, indent=2).replace("\x7f", "\\u007f"))


@contextmanager
def progress(label: str, total: int, *, quiet: bool = False) -> Iterator[Callable[[int], None]]:
    """Show a bar for work of known length; yields the function to call with how many are done.

    A line with the time it took remains. `quiet` shows neither.
    """
    if quiet:
        yield lambda done: None
        return
    label = visible(label)
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn())
    with Progress(
        *columns,
        TextColumn("{task.fields[speed]}"),
        TimeRemainingColumn(),
        console=out,
        transient=True,
        disable=not out.is_terminal,
    ) as bar:
        task = bar.add_task(label, total=total, speed="")
        began = time.monotonic()

        def advance(done: int) -> None:
            speed = done / max(1e-9, time.monotonic() - began)
            bar.update(task, completed=done, speed=f"{speed:,.0f}/s")

        yield advance
    seconds = time.monotonic() - began
    say(f"{label}: {total:,} in {seconds:.1f} s ({total / max(seconds, 1e-9):,.0f}/s)")


@contextmanager
def busy(label: str, *, expected: float = 0.0) -> Iterator[None]:
    """Show a spinner for work of unknown length, and a line with the time if it took some.

    expected: seconds that it takes about; a line says so beforehand if they are many.
    """
    announce(label, expected)
    label, began = visible(label), time.monotonic()
    with out.status(Text(label)) if out.is_terminal and not out.quiet else nullcontext():
        yield
    if (seconds := time.monotonic() - began) >= 2:
        say(f"{label}: {seconds:.1f} s")


class TrainingDisplay:
    """Shows training: a bar within the epoch, a line after it (none without a record)."""

    def __init__(
        self,
        epochs: int,
        *,
        what: str = "images",
        record: Callable[[list[dict[str, Any]]], None] | None,
    ) -> None:
        self.epochs, self.what, self.record = epochs, what, record
        self._bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TextColumn("{task.fields[note]}", markup=False),
            TimeRemainingColumn(),
            console=out,
            transient=True,
            disable=not out.is_terminal,
        )
        self._task = self._bar.add_task("", total=None, note="")
        self._began, self._epoch, self._loss, self._first = time.monotonic(), -1, 0.0, 0

    def __enter__(self) -> "TrainingDisplay":
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def step(self, epoch: int, step: int, steps: int, loss: float, items: int) -> None:
        """Move the bar; the time left is that of the whole training."""
        if epoch != self._epoch:
            # The clock starts after the first step, whose items are therefore not counted.
            self._epoch, self._began, self._loss, self._first = epoch, time.monotonic(), loss, items
        self._loss += 0.05 * (loss - self._loss)
        speed = (items - self._first) / max(1e-9, time.monotonic() - self._began)
        self._bar.update(
            self._task,
            total=self.epochs * steps,
            completed=epoch * steps + step,
            description=f"epoch {epoch + 1}/{self.epochs}",
            note=f"loss {self._loss:.3f}  {speed:,.0f} {self.what}/s",
        )

    def epoch(self, history: list[dict[str, Any]]) -> None:
        """Print a line for the epoch, and call the record."""
        if self.record is None:
            return
        row = history[-1]
        parts = [f"epoch {row['epoch']:>3}/{self.epochs}", f"loss {row['loss']:8.4f}"]
        if "held_out_recall@1" in row:
            parts.append(f"held-out Recall@1 {row['held_out_recall@1']:.3f}")
        if "proxies_in_use" in row:
            parts.append(f"proxies in use {row['proxies_in_use']:.0%}")
        parts.append(f"{row['seconds']:.1f} s")
        say("  ".join(parts))
        self.record(history)

    def say(self, message: str) -> None:
        """Print a warning from within training."""
        warn(message)


def table(title: str, header: list[str], rows: list[list[str]]) -> None:
    """Print a small table; the first column is left-aligned, the others right-aligned."""
    grid = Table(
        title=Text(visible(title)),
        title_justify="left",
        title_style="bold",
        header_style="",
        box=box.SIMPLE_HEAD,
    )
    for i, name in enumerate(header):
        grid.add_column(Text(visible(name)), justify="left" if i == 0 else "right")
    for row in rows:
        grid.add_row(*(Text(visible(cell)) for cell in row))
    out.print(grid)


def fail(message: str) -> None:
    """Print one line to standard error."""
    line = f"nofuss: {_line(message)}"
    err.print(line, markup=False, style="red" if sys.stderr.isatty() else "")


def show_traceback(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Print a traceback for --debug, with control characters escaped; a `sys.excepthook`."""
    for text in traceback.format_exception(kind, error, trace):
        for line in text.split("\n"):
            err.print(visible(line), markup=False)
