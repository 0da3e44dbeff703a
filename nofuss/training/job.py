"""One training job: its data, its model, and the settings that follow from the data."""

import contextlib
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch import Tensor, nn

from nofuss.config import Preprocessing, TrainConfig
from nofuss.data.collection import Collection
from nofuss.data.decode import decode
from nofuss.data.split import Rows, Sides, classes_in
from nofuss.distributed.device import choose_device
from nofuss.errors import DataError, UsageError
from nofuss.evaluate.reranking import Reranking
from nofuss.evaluate.strangers import Strangers
from nofuss.losses import INSTANCE_LOSSES
from nofuss.model.backbones import PRETRAINED, Backbone
from nofuss.model.embedder import Embedder, build_embedder
from nofuss.run.choice import Choice
from nofuss.run.directory import Run
from nofuss.terminal import console
from nofuss.training.head import DIM
from nofuss.training.presets import resolve
from nofuss.training.setup import items_per_class

SMALL_SIDE = 96
"""Pictures with a shorter side get the small convnet, not a network with ImageNet's weights."""


@dataclass
class Job:
    """State that the steps of one training pass on."""

    run: Run
    collection: Collection
    sides: Sides
    embedder: Embedder
    preprocessing: Preprocessing | None
    features: Tensor | None = None
    """(N, F) of a pretrained backbone before training, or the vectors themselves."""
    criterion: nn.Module | None = None
    learned: Rows | None = None
    """Rows that model and criterion were trained on."""
    strangers: Strangers | None = None
    """How search recognises strangers, if held-out classes sufficed to find out."""
    reranking: Reranking | None = None
    """Whether search re-ranks, if held-out classes sufficed to find out."""
    choice: Choice | None = None
    """What the folds decided, if the head starts from its closed form."""
    fold_scores: dict[str, Any] | None = None
    """Scores of classes held out in turn, if no classes are kept out for good."""

    @property
    def config(self) -> TrainConfig:
        """The resolved configuration."""
        return self.run.config

    @property
    def fixed(self) -> bool:
        """Whether only the head is trained, on features that stay fixed."""
        return self.config.preset in ("frozen", "vectors")

    @property
    def dim(self) -> int:
        """Dimensions of the embedding: as configured, or the default."""
        return dim_of(self.config, self.embedder.backbone.features)

    def for_head(self, rows: Rows) -> Tensor:
        """Return the features of these rows as the head takes them."""
        assert self.features is not None
        return self.embedder.to_head(self.features[rows])


def dim_of(config: TrainConfig, width: int) -> int:
    """Return the configured dimension, else DIM; untrained features keep their own."""
    if config.dim is not None:
        return config.dim
    return width if config.untrained else min(DIM, width)


def build_model(
    config: TrainConfig, collection: Collection, backbone: Backbone | None = None
) -> tuple[Embedder, Preprocessing | None]:
    """Build the embedder at its start; return it and how its pictures are prepared.

    backbone: of the caller, instead of one by name.
    """
    assert config.backbone is not None
    channels = _channels(config, collection)
    weights = config.weights or (None if config.backbone == "inception-bn" else PRETRAINED)
    if weights is None:
        console.warn(
            "inception-bn starts at random: its ImageNet weights are in no package; give a public "
            "BN-Inception file with --weights, as the paper starts from one"
        )
    embedder = build_embedder(
        backbone or config.backbone,
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
    """Fill in the settings that follow from the data."""
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
    """Lower the dimension to the number of features: a head that starts from them has no more."""
    if config.start == "random" or config.dim is None or config.dim <= width:
        return config
    console.say(f"note: dim is {width} instead of {config.dim}: the features have no more")
    return replace(config, dim=width)


def describe_sides(job: Job) -> dict[str, Any]:
    """Return what data.json holds."""
    c, s = job.collection, job.sides
    sides = [side for side in ("train", "held_out", "test") if len(getattr(s, side))]
    counts = {side: len(getattr(s, side)) for side in sides}
    classes = {side: [c.class_names[i] for i in classes_in(c, getattr(s, side))] for side in counts}
    return {"description": c.describe(), "items": counts, "classes": classes}


def _side(collection: Collection) -> int | None:
    """Return the short side of the pictures: of the arrays, or the median of some files."""
    if collection.kind == "images" and collection.array is not None:
        return int(min(collection.array.shape[1:3]))
    if collection.kind == "pictures":
        sampled = collection.paths[:: max(1, len(collection.paths) // 20)]
        sides = []
        for path in sampled:
            with contextlib.suppress(DataError):
                sides.append(min(decode(path, at_least=SMALL_SIDE).size))
        return int(np.median(sides)) if sides else None
    return None


def _channels(config: TrainConfig, collection: Collection) -> int | None:
    """Return the width of vectors; 1 for gray arrays into the small convnet, 3 otherwise."""
    if collection.kind == "vectors":
        assert collection.array is not None
        return int(collection.array.shape[1])
    if config.backbone == "convnet":
        gray = collection.array is not None and collection.array.ndim == 3
        return 1 if gray else 3
    return None
