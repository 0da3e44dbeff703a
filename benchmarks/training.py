"""A training epoch compared with its steps alone: the cost of loading, checks and the loop.

Pictures: the folder of CUB-200-2011 that $NOFUSS_DATA names (or holds); skipped without it.
"""

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from math import nan
from pathlib import Path

from torch import nn

from benchmarks.timing import Growth, Row, interleaved
from nofuss.config import Options, Preprocessing, Settings
from nofuss.data.collection import Collection
from nofuss.data.loader import Batch
from nofuss.data.open import TrainingData, open_data
from nofuss.data.split import split_collection
from nofuss.model.activations import activations_of
from nofuss.model.embedder import Embedder
from nofuss.model.stages import Top, fixed_count
from nofuss.training.criterion import build_criterion
from nofuss.training.feed import Batches
from nofuss.training.loop import Feed, Training, run_loop, train_step
from nofuss.training.network import apply_settings, build_model
from nofuss.training.settings import resolve


class First:
    """The first few batches of a feed, as an epoch."""

    def __init__(self, feed: Feed, steps: int) -> None:
        self.feed, self.steps = feed, steps

    def __len__(self) -> int:
        return self.steps

    def __call__(self, epoch: int, start: int) -> Iterator[Batch]:
        """Return these batches."""
        batches = self.feed(epoch, start)
        return (batch for _, batch in zip(range(self.steps), batches, strict=False))


def rows(*, quick: bool) -> Iterator[Row]:
    """Measure epochs of a few steps, with loop and loader, and the same steps from memory."""
    folder = _cub()
    if folder is None:
        print("training: $NOFUSS_DATA names no CUB_200_2011; skipped")
        return
    steps = 4 if quick else 12
    options = Options(preset="finetune", unfreeze="all", dim=512, schedule="constant")
    collection = open_data(folder)
    embedder = build_model(options, "finetune", collection)
    settings = resolve(options, TrainingData(collection, None, None, ""), embedder.backbone)
    apply_settings(settings, embedder)
    preprocessing = embedder.backbone.preprocessing
    assert preprocessing is not None
    data = collection.subset(split_collection(collection)[0])
    criterion = build_criterion(settings, data.num_classes, embedder.dim)
    training = training_of(settings, embedder, embedder, criterion)
    feed = First(Batches(data, preprocessing, settings), steps)
    held = list(feed(0, 0))
    embedder.train()

    def bare() -> None:
        for batch in held:
            train_step(embedder, criterion, training.optimizer, batch)

    def epoch() -> None:
        training.epochs = training.epoch + 1
        run_loop(training, feed)

    def loading() -> None:
        for _ in feed(0, 0):
            pass

    last_stages = kept_steps(settings, data, preprocessing, steps)
    timed: dict[str, Callable[[], object]] = {
        "bare": bare,
        "epoch": epoch,
        "loading": loading,
        "last stages": last_stages,
    }
    seconds = interleaved(timed, repeats=3)
    case = f"CUB, EfficientNet-Lite0, batch {settings.batch_size}, {preprocessing.size} px"
    limit = seconds["bare"]
    yield Row("training", case, "limit: the bare step on batches in memory", limit, limit, nan)
    yield Row(
        "training", case, "an epoch through loop and loader", seconds["epoch"], limit, nan, bar=1.1
    )
    yield Row("training", case, "loading alone", seconds["loading"], limit, nan, bar=0.1)
    part = "the last two stages on kept activations, beside the whole network"
    yield Row("training", case, part, seconds["last stages"], limit, nan, bar=0.3)


def training_of(
    settings: Settings, embedder: Embedder, model: nn.Module, criterion: nn.Module
) -> Training:
    """Return a training of the embedder's parameters by the model that holds them."""
    return Training.of(
        settings,
        model,
        criterion,
        backbone=embedder.backbone_parameters(),
        head=embedder.head.parameters(),
    )


def kept_steps(
    settings: Settings, data: Collection, preprocessing: Preprocessing, steps: int
) -> Callable[[], None]:
    """Return a function that trains the last stages on as many batches, read from the cache."""
    settings = replace(settings, unfreeze="2", size=preprocessing.size)
    embedder = build_model(settings, settings.preset, data)
    apply_settings(settings, embedder)
    fixed = fixed_count(embedder.backbone, "2")
    criterion = build_criterion(settings, data.num_classes, embedder.dim)
    training = training_of(settings, embedder, Top(embedder, fixed), criterion)
    kept = activations_of(embedder, fixed, data, views=1, augmented=True)
    feed = First(Batches(data, preprocessing, settings, kept), steps)
    for _ in feed(0, 0):  # computed and written here
        pass

    def run() -> None:
        training.model.train()
        for batch in feed(0, 0):
            train_step(training.model, criterion, training.optimizer, batch)

    return run


def growth(*, quick: bool) -> Iterator[Growth]:
    """Return no figure: an epoch grows with its steps."""
    yield from ()


def _cub() -> Path | None:
    named = os.environ.get("NOFUSS_DATA")
    for folder in (Path(named), Path(named) / "CUB_200_2011") if named else ():
        if (folder / "images.txt").is_file():
            return folder
    return None
