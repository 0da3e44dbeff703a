"""A training epoch compared with its steps alone: the cost of loading, checks and the loop.

Pictures: the folder of CUB-200-2011 that $NOFUSS_DATA names (or holds); skipped without it.
"""

import os
from collections.abc import Callable, Iterator
from math import nan
from pathlib import Path

from torch import nn

from benchmarks.timing import Growth, Row, interleaved
from nofuss.config import Preprocessing, TrainConfig
from nofuss.data.collection import Collection
from nofuss.data.loader import Batch
from nofuss.data.open import open_data
from nofuss.data.split import split_collection
from nofuss.model.activations import activations_of
from nofuss.model.stages import Top, fixed_count, freeze_first
from nofuss.training.feed import ActivationFeed, CollectionFeed
from nofuss.training.job import build_model
from nofuss.training.loop import Feed, Training, run_loop
from nofuss.training.presets import resolve
from nofuss.training.setup import build_criterion, build_training
from nofuss.training.step import train_step


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
    config = resolve(
        TrainConfig(preset="finetune", unfreeze="all", dim=512, schedule="constant"),
        kind="pictures",
        small=False,
    )
    collection = open_data(folder)
    embedder = build_model(config, collection)
    preprocessing = embedder.backbone.preprocessing
    assert preprocessing is not None
    data = collection.subset(split_collection(collection)[0])
    criterion: nn.Module = build_criterion(config, data.num_classes)
    training: Training = build_training(config, embedder, criterion)
    feed = First(CollectionFeed(data, preprocessing, int(config.batch_size or 32)), steps)
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

    last_stages = kept_steps(config, data, preprocessing, steps)
    timed: dict[str, Callable[[], object]] = {
        "bare": bare,
        "epoch": epoch,
        "loading": loading,
        "last stages": last_stages,
    }
    seconds = interleaved(timed, repeats=3)
    case = f"CUB, EfficientNet-Lite0, batch {config.batch_size}, {preprocessing.size} px"
    limit = seconds["bare"]
    yield Row("training", case, "limit: the bare step on batches in memory", limit, limit, nan)
    yield Row(
        "training", case, "an epoch through loop and loader", seconds["epoch"], limit, nan, bar=1.1
    )
    yield Row("training", case, "loading alone", seconds["loading"], limit, nan, bar=0.1)
    part = "the last two stages on kept activations, beside the whole network"
    yield Row("training", case, part, seconds["last stages"], limit, nan, bar=0.3)


def kept_steps(
    config: TrainConfig, data: Collection, preprocessing: Preprocessing, steps: int
) -> Callable[[], None]:
    """Return a function that trains the last stages on as many batches, read from the cache."""
    embedder = build_model(config, data)
    freeze_first(embedder, "2")
    fixed = fixed_count(embedder.backbone, "2")
    criterion = build_criterion(config, data.num_classes)
    training = build_training(config, Top(embedder, fixed), criterion)
    kept = activations_of(embedder, fixed, data, views=1, augmented=True)
    batches = CollectionFeed(data, preprocessing, int(config.batch_size or 32))
    feed = First(ActivationFeed(batches, kept), steps)
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
