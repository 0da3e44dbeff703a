"""Output in the terminal: lines, progress, tables, scores. Plain lines when piped.

Only the commands print: results with the functions here, while `speaking` shows what the library
logs and how far it is. Text may contain names of files, classes and tensors from outside: no
control character reaches the terminal, and no name is interpreted as markup.
"""

import json
import logging
import sys
import textwrap
import threading
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, Task, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from nofuss.errors import visible

if TYPE_CHECKING:
    from nofuss.training.callbacks import Event

# No emoji: a folder may be called :dog:.
out = Console(highlight=False, soft_wrap=True, emoji=False)
err = Console(highlight=False, soft_wrap=True, emoji=False, stderr=True)

LONG = 2.0
"""Seconds after which work is reported in a pipe; with --verbose everywhere, when it is done."""
MANY = 20
"""Number of pieces of work from which a rate is shown."""
STARTING = "starting"
EVERY = 10.0
"""Seconds between lines about the same work in a pipe."""


def say(message: str) -> None:
    """Print one line; without markup, so that names are shown as they are."""
    _print(out, message)


def sentence(text: str) -> None:
    """Print a sentence; on a terminal, lines break between words."""
    _started()
    out.print(visible(text), markup=False, soft_wrap=not out.is_terminal)


def print_json(content: Any) -> None:
    """Print JSON for a program; safe to show in a terminal."""
    _started()
    if not out.quiet:
        # DEL is the one control character that json does not escape.
        print(json.dumps(content, indent=2).replace("\x7f", "\\u007f"))


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
        words = "\n".join(textwrap.wrap(visible(name), 12, break_long_words=False))
        grid.add_column(Text(words), justify="left" if i == 0 else "right")
    for row in rows:
        grid.add_row(*(Text(visible(cell)) for cell in row))
    _started()
    out.print(grid)


def fail(message: str) -> None:
    """Print one line to standard error."""
    _print(err, f"nofuss: {message}", style="red" if sys.stderr.isatty() else "")


def show_traceback(error: BaseException) -> None:
    """Print a traceback for --debug, with control characters escaped."""
    for line in "".join(traceback.format_exception(error)).split("\n"):
        _print(err, line)


def _print(screen: Console, line: str, style: str = "") -> None:
    _started()
    screen.print(visible(line), markup=False, style=style)


def _started() -> None:
    """Record that something was printed: the program has started, and is not silent."""
    if _display is not None:
        _display.spoke = time.monotonic()
        _display.forget(STARTING)


# ---- what the library logs, and how far it is


@contextmanager
def speaking(*, as_json: bool = False, aloud: bool = True, verbose: bool = False) -> Iterator[None]:
    """Show records of the logger "nofuss" and `progress`; on standard error if JSON is printed.

    aloud: whether this process prints at all; of several under torchrun one does. verbose: also
    what explains the results, and how long each work took.
    """
    global _display
    logger, screen, before = logging.getLogger("nofuss"), err if as_json else out, _display
    handler, level = _Handler(screen), logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.CRITICAL if not aloud else logging.DEBUG if verbose else logging.INFO)
    out.quiet = not aloud
    for console in (out, err):
        console.file = console.file  # whoever hides the output of a library must not hide ours
    try:
        with _Display(screen, verbose=verbose) if aloud else nullcontext() as _display:
            progress(STARTING, 0, 1)  # loading torch takes seconds
            yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        for console in (out, err):
            console.file = None  # type: ignore[assignment]  # whatever sys.stdout is then
        _display, out.quiet = before, False


def progress(what: str, done: int, total: int, note: str = "") -> None:
    """Show how far something is; a `nofuss.progress.Progress`."""
    if _display is not None:
        _display.forget(STARTING)
        _display.update(visible(what), done, total, note)


class TrainingDisplay:
    """A callback that shows training: a bar with the loss, a line after each epoch."""

    def __init__(self) -> None:
        self._epochs: int | None = None
        self._loss: float | None = None
        self._note = ""

    def __call__(self, event: "Event") -> None:
        """Show an event."""
        values = event.values
        if event.kind == "start":
            self._epochs = values["epochs"]
        elif event.kind == "progress":
            note = self._note if values["what"].startswith("training") else ""
            progress(values["what"], values["done"], values["total"], note)
        elif event.kind == "step":
            before = values["loss"] if self._loss is None else self._loss
            self._loss = before + 0.05 * (values["loss"] - before)
            self._note = f"epoch {event.epoch + 1}  loss {self._loss:.3f}"
        elif event.kind == "epoch":
            of = "" if self._epochs is None else f"/{self._epochs}"
            parts = [f"epoch {event.epoch:>3}{of}", f"loss {values['loss']:8.4f}"]
            if "held_out_recall@1" in values:
                parts.append(f"held-out Recall@1 {values['held_out_recall@1']:.3f}")
            if "proxies_in_use" in values:
                parts.append(f"proxies in use {values['proxies_in_use']:.0%}")
            say("  ".join([*parts, f"{values['seconds']:.1f} s"]))


class _Handler(logging.Handler):
    """Prints a record as a line, a warning as a note in colour."""

    def __init__(self, screen: Console) -> None:
        super().__init__()
        self._screen = screen

    def emit(self, record: logging.LogRecord) -> None:
        line = record.getMessage()
        if record.levelno >= logging.ERROR:
            fail(line)
        elif record.levelno == logging.WARNING:
            _print(self._screen, f"note: {line}", style="yellow")
        else:
            _print(self._screen, line)


class _Display:
    """What is being done: bars on a terminal, which vanish when it is done, and lines in a pipe."""

    def __init__(self, screen: Console, *, verbose: bool) -> None:
        self.spoke = time.monotonic()  # when the last line was printed
        self._screen, self._verbose = screen, verbose
        self._tasks: dict[str, Task] = {}
        self._closed = threading.Event()
        self._bars = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TextColumn("{task.fields[count]}", markup=False),
            TimeRemainingColumn(),
            console=screen,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
            disable=not screen.is_terminal,
        )

    def __enter__(self) -> "_Display":
        if not self._screen.is_terminal:
            threading.Thread(target=self._speak_now_and_then, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        self._bars.stop()

    def update(self, what: str, done: int, total: int, note: str) -> None:
        """Begin, advance or end some work."""
        task = self._tasks.get(what)
        if task is None:
            if done >= total:
                return
            size = None if total == 1 else total
            self._bars.add_task(what, total=size, count="", first=done, said=None)
            task = self._tasks[what] = self._bars.tasks[-1]
            self._bars.start()
        seconds, new = task.elapsed or 0.0, done - task.fields["first"]
        rate = f"{new / max(1e-9, seconds):,.0f}/s" if total >= MANY else ""
        count = f"{done:,} of {total:,}  {rate}  {note}".rstrip() if total > 1 and done else ""
        self._bars.update(task.id, completed=done, count=count)
        if done >= total:
            self.forget(what)
            if seconds >= LONG and (self._verbose or task.fields["said"]):
                many = f"{new:,} in {seconds:.1f} s ({rate})"
                self._say(f"{what}: {many if total >= MANY else f'{seconds:.1f} s'}")

    def forget(self, what: str) -> None:
        """End work without a line about it."""
        if task := self._tasks.pop(what, None):
            self._bars.remove_task(task.id)
            if not self._tasks:
                self._bars.stop()

    def _speak_now_and_then(self) -> None:
        """Print a line about the work that began last, if nothing else was said for long."""
        while not self._closed.wait(0.25):
            now = time.monotonic()
            for what, task in list(self._tasks.items())[-1:]:
                said, count = task.fields["said"], task.fields["count"]
                if now - self.spoke >= 0.75 * LONG and (said is None or now - said >= EVERY):
                    task.fields["said"] = now
                    self._say(f"{what}: {count}" if count else f"{what} …")

    def _say(self, line: str) -> None:
        self.spoke = time.monotonic()
        self._screen.print(visible(line), markup=False)


_display: _Display | None = None


# ---- scores


def score_lines(scores: Mapping[str, Any], method: str, *, preset: object) -> None:
    """Print what a training was worth: a sentence, and the scores that matter."""
    from nofuss.evaluate.protocol import headline  # here, since it loads torch

    say("")
    sentence(headline(scores, preset))
    columns = _columns(scores, method)
    if baselines := [*scores.get("baselines", {})]:
        columns = {name: of for name, of in columns.items() if name not in baselines}
        columns["untrained"] = scores["baselines"][baselines[0]]
    names = [name for name in ("recall@1", "map@r", "ordered") if name in scores]
    _percents("", names, columns, scores.get("gain", {}), digits=1)


def score_table(title: str, scores: Mapping[str, Any], method: str) -> None:
    """Print scores, their baselines and the gain over the first of them; then intervals."""
    # here, since it loads torch
    from nofuss.evaluate.protocol import compared, describe_gain, within_folds

    names = [name for name, value in scores.items() if isinstance(value, float)]
    _percents(title, names, _columns(scores, method), scores.get("gain", {}), digits=2)
    if "queries" in scores:
        low, high = scores[f"{names[0]}_interval"]
        sentence(
            f"{scores['queries']:,} queries of {scores['classes']:,} classes; 95% interval of "
            f"{names[0].capitalize()} over classes ({method}): {100 * low:.2f} to {100 * high:.2f}"
        )
    if "ordered" in scores:
        low, high = scores["ordered_interval"]
        sentence(
            f"{compared(scores)}; 95% interval over groups ({method}): {100 * low:.2f} to "
            f"{100 * high:.2f}"
        )
    if gain := scores.get("gain"):
        sentence(f"The gain is over the {gain['over']}.")
    if reranked := scores.get("reranked"):
        sentence(f"Gain from re-ranking: {describe_gain(reranked['gain'])}")
    if "folds" in scores:
        sentence(within_folds(scores))


def _columns(scores: Mapping[str, Any], method: str) -> dict[str, Any]:
    again = {"re-ranked": scores["reranked"]} if "reranked" in scores else {}
    return {method: scores, **again, **scores.get("baselines", {})}


def _percents(
    title: str,
    names: list[str],
    columns: Mapping[str, Any],
    gain: Mapping[str, Any],
    *,
    digits: int,
) -> None:
    """Print a table of scores: a row for each name, a column for each method, then the gain."""
    from nofuss.evaluate.protocol import score_title

    def cells(name: str) -> Iterator[str]:
        yield score_title(name)
        for of in columns.values():
            yield f"{100 * of[name]:.{digits}f}" if name in of else "–"
        if gain:
            by, low, high = (100 * value for value in gain.get(name, (0, 0, 0)))
            interval = f"({low:.{digits}f} to {high:.{digits}f})"
            yield f"{by:+.{digits}f} {interval}" if name in gain else ""

    header = ["%", *columns] + (["gain (95%)"] if gain else [])
    table(title, header, [list(cells(name)) for name in names])
