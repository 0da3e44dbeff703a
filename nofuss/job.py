"""One training job: what it trains on, what it trains, and what the data decide about both."""

import contextlib
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from nofuss import console
from nofuss.config import Preprocessing, TrainConfig
from nofuss.data.collection import Collection
from nofuss.data.decode import decode
from nofuss.data.split import hold_out, split_collection
from nofuss.device import choose_device
from nofuss.errors import DataError, UsageError
from nofuss.losses import INSTANCE_LOSSES
from nofuss.model.backbones import PRETRAINED
from nofuss.model.embedder import Embedder, build_embedder
from nofuss.presets import resolve
from nofuss.run import Run
from nofuss.search.threshold import Threshold
from nofuss.train.choice import Choice
from nofuss.train.folds import FEWEST_CLASSES
from nofuss.train.head import DIM
from nofuss.train.setup import items_per_class

Rows = NDArray[np.int64]
SMALL_SIDE = 96
"""Pictures with a shorter side are small: they want the small convnet, not ImageNet's weights."""


@dataclass(frozen=True)
class Sides:
    """Rows of the collection, with no class in common; held_out and test may be empty."""

    train: Rows
    held_out: Rows
    """Training classes kept aside to watch training."""
    test: Rows


@dataclass
class Job:
    """What the steps of one training hand to each other."""

    run: Run
    collection: Collection
    sides: Sides
    embedder: Embedder
    preprocessing: Preprocessing | None
    features: Tensor | None = None
    """(N, F) of a pretrained backbone before training, or the vectors themselves."""
    criterion: nn.Module | None = None
    learned: Rows | None = None
    """The rows that model and criterion were trained on in the end."""
    threshold: Threshold | None = None
    """The distance from which on nothing is alike, where held-out classes could tell it."""
    choice: Choice | None = None
    """What the folds decided, where the head starts from its closed form."""
    fold_scores: dict[str, Any] | None = None
    """Scores of classes held out in turn, where no classes are kept out for good."""

    @property
    def config(self) -> TrainConfig:
        """The resolved configuration."""
        return self.run.config

    @property
    def fixed(self) -> bool:
        """Only the head is trained, on features that stay as they are."""
        return self.config.preset in ("frozen", "vectors")

    @property
    def dim(self) -> int:
        """Dimensions of the embedding: as asked for, or as many as pay."""
        return dim_of(self.config, self.embedder.backbone.features)

    def for_head(self, rows: Rows) -> Tensor:
        """The features of these rows as the head takes them."""
        assert self.features is not None
        return self.embedder.to_head(self.features[rows])


def dim_of(config: TrainConfig, width: int) -> int:
    """The dimension asked for, else DIM; untrained features keep their own."""
    if config.dim is not None:
        return config.dim
    return width if config.untrained else min(DIM, width)


def by_folds(config: TrainConfig, collection: Collection) -> bool:
    """Whether every class is learned from, and scored by a model that has not seen it.

    So by default on fixed features, where training takes seconds; not where the data or the user
    keep classes out for good.
    """
    return bool(
        config.test_share is None
        and collection.split is None
        and collection.num_classes >= FEWEST_CLASSES
        and config.preset in ("frozen", "vectors")
        and (config.folds or config.untrained)
    )


def split(collection: Collection, config: TrainConfig) -> Sides:
    """The test classes, and those of the training classes that are held out."""
    nothing = np.empty(0, dtype=np.int64)
    everything = np.arange(len(collection))
    if collection.labels is None:
        return Sides(everything, nothing, nothing)
    train_rows, test = everything, nothing
    if collection.split is not None and config.test_share:
        raise UsageError(
            f"{collection.name} brings a split of its own, so --test-share {config.test_share:g} "
            "has nothing to say; leave it out (0 trains on all)"
        )
    if config.test_share != 0 and not by_folds(config, collection):
        share = 0.5 if config.test_share is None else config.test_share
        train_rows, test = split_collection(
            collection,
            seed=config.seed,
            test_share=share,
            allow_shared=config.allow_shared,
        )
    if len(classes_of(collection, train_rows)) < 2:
        raise DataError(
            f"{collection.name} has one class to train on; a distance is learned between two or "
            "more: add classes"
            + ("" if collection.split is not None else ", or lower --test-share")
        )
    share = float(config.holdout or 0)
    if not share or len(classes_of(collection, train_rows)) < 8:  # too few to spare any
        return Sides(train_rows, nothing, test)
    assert collection.labels is not None
    inner = hold_out(collection.labels[train_rows], share, config.seed)
    return Sides(train_rows[inner.train], train_rows[inner.test], test)


def build_model(
    config: TrainConfig, collection: Collection
) -> tuple[Embedder, Preprocessing | None]:
    """The embedder at its start, and how its pictures are prepared."""
    assert config.backbone is not None
    channels = _channels(config, collection)
    weights = config.weights or (None if config.backbone == "inception-bn" else PRETRAINED)
    if weights is None:
        console.warn(
            "inception-bn starts at random: its ImageNet weights are in no package; give a public "
            "BN-Inception file with --weights, as the paper starts from one"
        )
    embedder = build_embedder(
        config.backbone,
        dim=config.dim or DIM,
        channels=channels,
        weights=weights,
        root=bool(config.root),
        seed=config.seed,
    )
    embedder.to(choose_device(config.device))
    preprocessing = embedder.backbone.preprocessing
    embedder.backbone.mirror = bool(config.mirror and preprocessing and preprocessing.flip)
    if config.freeze_batch_norm:
        embedder.freeze_batch_norm()
    if preprocessing is None:
        return embedder, None
    if config.backbone == "convnet":
        side = config.size or max(16, min(_side(collection) or preprocessing.size, 64))
        preprocessing = replace(preprocessing, size=side, resize=side)
    elif config.size:
        resize = round(config.size * preprocessing.resize / preprocessing.size)
        preprocessing = replace(preprocessing, size=config.size, resize=resize)
    return embedder, preprocessing


def settle(config: TrainConfig, collection: Collection) -> TrainConfig:
    """Resolve what the data decide."""
    kind = "vectors" if collection.kind == "vectors" else "pictures"
    side = _side(collection)
    small, labelled = side is not None and side < SMALL_SIDE, collection.labels is not None
    config = resolve(config, kind=kind, small=small, labelled=labelled)
    if collection.labels is None and config.loss in INSTANCE_LOSSES:
        raise UsageError(
            f"--loss {config.loss} needs labels, and {collection.name} has triplets only; use a "
            "loss over proxies: proxy-nca, proxy-triplet"
        )
    if collection.labels is None and config.assignment != "dynamic":
        console.say("triplets without labels: assignment is dynamic")
        config = replace(config, assignment="dynamic")
    if config.per_class is None:
        config = replace(config, per_class=items_per_class(config))
    return config


def check_dim(config: TrainConfig, width: int) -> TrainConfig:
    """A head that starts from the features has no more directions than they have."""
    if config.start == "random" or config.dim is None or config.dim <= width:
        return config
    console.say(f"note: dim is {width} instead of {config.dim}: the features have no more")
    return replace(config, dim=width)


def describe_sides(job: Job) -> dict[str, Any]:
    """What data.json holds."""
    c, s = job.collection, job.sides
    sides = [side for side in ("train", "held_out", "test") if len(getattr(s, side))]
    counts = {side: len(getattr(s, side)) for side in sides}
    classes = {side: [c.class_names[i] for i in classes_of(c, getattr(s, side))] for side in counts}
    return {"description": c.describe(), "items": counts, "classes": classes}


def classes_of(collection: Collection, rows: Rows) -> Rows:
    """The classes of these rows, ascending."""
    if collection.labels is None:
        return np.empty(0, dtype=np.int64)
    return np.unique(collection.labels[rows])


def _side(collection: Collection) -> int | None:
    """The pictures' short side: of the arrays, or the median of a few files."""
    if collection.kind == "images" and collection.array is not None:
        return int(min(collection.array.shape[1:3]))
    if collection.kind == "pictures":
        few = collection.paths[:: max(1, len(collection.paths) // 20)]
        sides = []
        for path in few:
            with contextlib.suppress(DataError):
                sides.append(min(decode(path, at_least=SMALL_SIDE).size))
        return int(np.median(sides)) if sides else None
    return None


def _channels(config: TrainConfig, collection: Collection) -> int | None:
    """Width of vectors; 1 for gray arrays into the small convnet, 3 for other pictures."""
    if collection.kind == "vectors":
        assert collection.array is not None
        return int(collection.array.shape[1])
    if config.backbone == "convnet":
        gray = collection.array is not None and collection.array.ndim == 3
        return 1 if gray else 3
    return None
