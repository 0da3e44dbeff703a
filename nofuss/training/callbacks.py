"""Events of training, which the terminal, TensorBoard and the user's function receive alike.

`nofuss.train(…, callback=function)` calls the function with an `Event`

    start     once, with the settings, before the first step
    progress  while something takes its time: {"what": "embedding", "done": 512, "total": 2040}
    step      after each step of the optimizer: loss, rates
    epoch     after each epoch: the row of metrics.jsonl
    end       once, with the scores on unseen classes, when everything is written

Folds report progress only, and where nothing is trained there are no steps. Under torchrun only the
first process calls the function.
"""

import logging
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import torch

from nofuss.distributed.processes import first
from nofuss.errors import UsageError, visible
from nofuss.run.directory import Run

log = logging.getLogger("nofuss")
CPU = torch.device("cpu")
Kind = Literal["start", "progress", "step", "epoch", "end"]


@dataclass(frozen=True)
class Event:
    """A point of training, as a callback receives it."""

    kind: Kind
    run: Path | None
    """The run directory; None for progress before it is made."""
    step: int
    """Steps of the optimizer so far; a resumed run continues to count."""
    epoch: int
    """Epochs finished so far."""
    values: Mapping[str, Any]
    """Settings by name at the start; what, done and total of progress; else numbers by name."""


Callback = Callable[[Event], None]


class Control:
    """Callbacks, stop signal, checkpoints and device of a training; by default none of them.

    functions: called with every event; of several processes only the first calls them.
    run: named in events, and holds the checkpoints; without it `checkpoints` is their folder.
    device: where a head is trained.
    """

    def __init__(
        self,
        *functions: Callback | None,
        run: Run | None = None,
        checkpoints: Path | None = None,
        stop: Callable[[], bool] = lambda: False,
        device: torch.device = CPU,
    ) -> None:
        # Asked once: a process that works on its own for a moment counts as the first.
        self._functions = [function for function in functions if function and first()]
        self.run = None if run is None else run.path
        self.checkpoints = checkpoints if run is None else run.checkpoints
        self.stop, self.device = stop, device
        self.step = self.epoch = 0

    def tell(
        self,
        kind: Kind,
        values: Mapping[str, Any],
        *,
        step: int | None = None,
        epoch: int | None = None,
    ) -> None:
        """Call all functions with an event, where training now stands."""
        self.step = self.step if step is None else step
        self.epoch = self.epoch if epoch is None else epoch
        for function in self._functions:
            function(Event(kind, self.run, self.step, self.epoch, dict(values)))

    def progress(self, what: str, done: int, total: int) -> None:
        """Report how far something is; a `nofuss.progress.Progress`."""
        self.tell("progress", {"what": what, "done": done, "total": total})

    def quiet(self) -> "Control":
        """Return the control of a training within this one, without callbacks and checkpoints."""
        return Control(stop=self.stop, device=self.device)


def flat_numbers(scores: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """Return the numbers of nested scores under joined names: "baselines/PCA, 64-d/recall@1"."""
    found: dict[str, float] = {}
    for name, value in scores.items():
        if isinstance(value, Mapping):
            found |= flat_numbers(value, f"{prefix}{name}/")
        elif type(value) in (int, float):
            found[f"{prefix}{name}"] = float(value)
    return found


@contextmanager
def stop_on_signals() -> Iterator[Callable[[], bool]]:
    """Yield whether to stop: Ctrl-C or SIGTERM asks for it, a second one ends the process at once.

    The handlers of before are restored. Only the main thread gets signals; elsewhere none is heard.
    """
    asked = threading.Event()

    def handle(number: int, frame: FrameType | None) -> None:
        if asked.is_set():
            os._exit(130)
        asked.set()
        with suppress(RuntimeError):  # the signal may have come amid another line
            log.warning(
                "stopping after this step and saving; repeat to stop at once without saving"
            )

    if threading.current_thread() is not threading.main_thread():
        yield asked.is_set
        return
    previous = {n: signal.signal(n, handle) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked.is_set
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


class TensorBoard:
    """Write events as scalars for TensorBoard, each run to its own folder DIR/NAME."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise UsageError(
                "--tensorboard needs another package: pip install 'nofuss[tensorboard]'"
            ) from None
        self._open = SummaryWriter
        self._writer: SummaryWriter | None = None
        self._settings: Mapping[str, Any] = {}

    def __call__(self, event: Event) -> None:
        """Write the values of an event as scalars."""
        if event.kind == "progress" or event.run is None:
            return
        if event.kind == "start":
            self._settings = event.values
            return
        if self._writer is None:
            # A resumed run repeats the steps after its checkpoint, so their scalars are purged.
            # A run that only had to be scored repeats none.
            again = event.step + (event.kind == "end")
            where = self.folder / event.run.resolve().name
            self._writer = self._open(str(where), purge_step=again)
            rows = [f"| {name} | {visible(str(v))} |" for name, v in self._settings.items()]
            table = "\n".join(["| setting | value |", "|---|---|", *rows])
            self._writer.add_text("settings", table)
        group = "scores" if event.kind == "end" else event.kind
        for name, value in event.values.items():
            if name != "epoch":
                tag = re.sub(r"[^\w/.-]+", "_", name.replace("@", "_at_"))  # what it allows
                self._writer.add_scalar(f"{group}/{tag}", value, event.step)

    def close(self) -> None:
        """Write what is still in memory."""
        if self._writer is not None:
            self._writer.close()
