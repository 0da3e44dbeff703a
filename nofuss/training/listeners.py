"""Who is told of training besides the terminal: the caller's callback, and TensorBoard."""

from collections.abc import Mapping
from typing import Any

from torch.optim import Optimizer

from nofuss.config import TrainConfig, to_json
from nofuss.data.collection import Collection
from nofuss.distributed.processes import first
from nofuss.report.tensorboard import TensorBoard
from nofuss.run.directory import Run
from nofuss.run.embeddings import RunEmbeddings
from nofuss.run.events import Callback, Event, flat_numbers
from nofuss.training.loop import Watch


class Listeners:
    """Turns training into events; of several processes the first alone tells."""

    def __init__(self, config: TrainConfig, callback: Callback | None) -> None:
        self._board = None if config.tensorboard is None else TensorBoard(config.tensorboard)
        self._called = [each for each in (callback, self._board) if each is not None]
        self._step = self._epoch = 0

    def __enter__(self) -> "Listeners":
        return self

    def __exit__(self, *_: object) -> None:
        if self._board is not None:
            self._board.close()

    def start(self, run: Run) -> None:
        """Tell the settings."""
        self._tell("start", run, to_json(run.config))

    def continue_from(self, step: int, epoch: int) -> None:
        """Count steps and epochs from where a resumed run is."""
        self._step, self._epoch = step, epoch

    def step(self, run: Run, step: int, values: Mapping[str, Any]) -> None:
        """Tell the numbers of one step; `step` counts from the start of training."""
        self._step = step
        self._tell("step", run, values)

    def epoch(self, run: Run, row: Mapping[str, Any]) -> None:
        """Tell the numbers of one epoch."""
        self._epoch = int(row["epoch"])
        self._tell("epoch", run, row)

    def end(
        self, run: Run, scores: Mapping[str, Any], kept: RunEmbeddings, data: Collection
    ) -> None:
        """Tell the scores, and show the embeddings."""
        self._tell("end", run, flat_numbers(scores))
        if self._board is not None and first():
            self._board.embeddings(kept, data)

    def _tell(self, kind: Any, run: Run, values: Mapping[str, Any]) -> None:
        if first():
            event = Event(kind, run.path, self._step, self._epoch, dict(values))
            for call in self._called:
                call(event)


class Heard:
    """A watch that passes everything on, and tells listeners too."""

    def __init__(self, watch: Watch, listeners: Listeners, run: Run, optimizer: Optimizer) -> None:
        self._watch, self._listeners, self._run = watch, listeners, run
        self._optimizer = optimizer

    def step(self, epoch: int, step: int, steps: int, loss: float, items: int) -> None:
        """Tell the loss, and the learning rate of each group of parameters."""
        self._watch.step(epoch, step, steps, loss, items)
        rates = {f"lr/{group['name']}": group["lr"] for group in self._optimizer.param_groups}
        self._listeners.step(self._run, epoch * steps + step, {"loss": loss} | rates)

    def epoch(self, history: list[dict[str, Any]]) -> None:
        """Tell the last row."""
        self._watch.epoch(history)
        self._listeners.epoch(self._run, history[-1])

    def say(self, message: str) -> None:
        """Pass a message on."""
        self._watch.say(message)
