"""One training job: its data, its model, and the settings that follow from the data."""

import contextlib
import copy
import logging
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from nofuss.config import Preprocessing, TrainConfig
from nofuss.data.collection import Collection
from nofuss.data.decode import decode
from nofuss.data.open import TEST_FRACTION, TrainingData
from nofuss.data.scan import ScanReport
from nofuss.data.split import Rows, Split, classes_in
from nofuss.data.triplets import HeldOut
from nofuss.distributed import processes
from nofuss.distributed.device import choose_device
from nofuss.errors import DataError, UsageError
from nofuss.files import write_file
from nofuss.losses import INSTANCE_LOSSES
from nofuss.model.backbones import PRETRAINED, Backbone, check_precision
from nofuss.model.embedder import Embedder, build_embedder
from nofuss.model.lora import add_adapters
from nofuss.model.stages import ALL, check_unfreeze, fixed_count, freeze_first
from nofuss.ranking.open_set import OpenSet
from nofuss.ranking.rerank import Rerank
from nofuss.run.choice import Choice
from nofuss.run.directory import Run
from nofuss.training.callbacks import Callbacks
from nofuss.training.presets import DIM, head_dim, resolve
from nofuss.training.setup import items_per_class

log = logging.getLogger("nofuss")
SMALL_SIDE = 96
"""Pictures with a shorter side get the small convnet, not a network with ImageNet's weights."""

ZOOM, LIGHT = 0.25, 0.25
"""Random crops for the last stages show this fraction of a picture or more, in light that changes
by this fraction or less (LOG.md)."""


@dataclass
class Job:
    """State that the steps of one training pass on."""

    run: Run
    collection: Collection
    split: Split
    embedder: Embedder
    callbacks: Callbacks
    fingerprint: str
    """Of the data."""
    scan: ScanReport
    """What was found in the data before training."""
    features: Tensor | None = None
    """(N, F) of a pretrained backbone before training, or the vectors themselves."""
    criterion: nn.Module | None = None
    open_set: OpenSet | None = None
    """How search recognises unknown classes, if held-out classes sufficed to find out."""
    reranking: Rerank | None = None
    """Whether search re-ranks, if held-out classes sufficed to find out."""
    choice: Choice | None = None
    """What the folds decided, if the head starts from its closed form."""
    fell_back: bool = False
    """Whether the network from before training is kept, since held-out classes lost by it."""
    fold_scores: dict[str, Any] | None = None
    """Scores of classes held out in turn, if no classes are kept out for good."""
    compared: HeldOut | None = None
    """Held-out triplets or pairs, where the data have any."""

    @property
    def config(self) -> TrainConfig:
        """The resolved configuration."""
        return self.run.config

    @property
    def preprocessing(self) -> Preprocessing | None:
        """How a picture becomes an input of the embedder; None for vectors."""
        return self.embedder.backbone.preprocessing

    @property
    def fixed(self) -> bool:
        """Whether only the head is trained, on features that stay fixed."""
        return self.config.preset in ("frozen", "vectors")

    @property
    def fixed_stages(self) -> int:
        """Number of the backbone's first stages that are never trained; 0 if there are none."""
        return fixed_count(self.embedder.backbone, self.config.unfreeze)

    def for_head(self, rows: Rows) -> Tensor:
        """Return the features of these rows as the head takes them."""
        assert self.features is not None
        return self.embedder.to_head(self.features[rows])


def build_model(
    config: TrainConfig, collection: Collection, backbone: Backbone | None = None
) -> Embedder:
    """Build the embedder at its start; its backbone says how its pictures are prepared.

    backbone: of the caller, instead of one by name.
    """
    assert config.backbone is not None
    channels = _channels(config, collection)
    weights = config.weights or (None if config.backbone == "inception-bn" else PRETRAINED)
    if weights is None:
        log.warning(
            "inception-bn starts at random: its ImageNet weights are in no package; give a public "
            "BN-Inception file with --weights, as the paper starts from one"
        )
    embedder = build_embedder(
        backbone or config.backbone,
        dim=config.dim or DIM,
        channels=channels,
        weights=weights,
        root=bool(config.root),
        size=config.size,
        seed=config.seed,
    )
    device = choose_device(config.device)
    check_precision(config.precision, device)
    embedder.to(device).backbone.precision = config.precision
    preprocessing = embedder.backbone.preprocessing
    embedder.backbone.mirror = bool(config.mirror and preprocessing and preprocessing.flip)
    if config.freeze_batch_norm:
        embedder.freeze_batch_norm()
    if preprocessing is None:
        return embedder
    if config.backbone == "convnet":
        side = config.size or max(16, min(_side(collection) or preprocessing.size, 64))
        preprocessing = replace(preprocessing, size=side, resize=side)
    elif config.size:
        resize = round(config.size * preprocessing.resize / preprocessing.size)
        preprocessing = replace(preprocessing, size=config.size, resize=resize)
    if config.size:
        _check_size(embedder.backbone, config.size, "--size")
    embedder.backbone.preprocessing = preprocessing
    return embedder


@torch.no_grad()
def _check_size(backbone: Backbone, size: int, flag: str) -> None:
    """Raise UsageError if the network can't take pictures of that size.

    Large ones are not computed; small ones are, since torch 2.6 only then notices that a kernel is
    larger than its input.
    """
    device = "meta" if size >= SMALL_SIDE else "cpu"
    planned = copy.deepcopy(backbone.network).to(device).eval()
    try:
        planned(torch.zeros(1, backbone.channels, size, size, device=device))
    except NotImplementedError:  # an operation that only real numbers have
        return
    except (AssertionError, RuntimeError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UsageError(
            f"{backbone.name} can't take pictures of {size} pixels ({reason}); try another {flag}"
        ) from None


def settle(config: TrainConfig, data: TrainingData) -> TrainConfig:
    """Fill in the settings that follow from the data."""
    collection = data.collection
    kind = "vectors" if collection.kind == "vectors" else "pictures"
    side = _side(collection)
    if not collection.has_classes:
        if config.loss in INSTANCE_LOSSES:
            raise UsageError(
                f"--loss {config.loss} needs labels, and {collection.name} has none; use a loss "
                "over proxies: proxy-nca, proxy-triplet"
            )
        is_shared = float(config.proxies_per_class or 1) < 1
        by_groups = "balanced" if is_shared else config.assignment
        config = replace(
            config,
            assignment=by_groups if collection.is_labelled else "dynamic",
            test_fraction=TEST_FRACTION if config.test_fraction is None else config.test_fraction,
        )
    config = resolve(
        config,
        kind=kind,
        small=side is not None and side < SMALL_SIDE,
        labelled=collection.is_labelled,
    )
    if config.per_class is None:
        config = replace(config, per_class=items_per_class(config))
    return config


def check_dim(config: TrainConfig, width: int) -> TrainConfig:
    """Lower the dimension to the number of features, and say so."""
    dim = head_dim(config, width)
    if config.dim in (None, dim):
        return config
    log.warning(f"dim is {dim} instead of {config.dim}: the features have no more")
    return replace(config, dim=dim)


def check_stages(config: TrainConfig, embedder: Embedder) -> TrainConfig:
    """Fill in and check how many stages are trained and how crops are drawn; freeze the others."""
    preprocessing = embedder.backbone.preprocessing
    if preprocessing is None:
        return config
    if config.preset == "finetune":
        asked = None if config.unfreeze is None else str(config.unfreeze)  # Python has numbers
        unfreeze = check_unfreeze(embedder.backbone, asked, size=preprocessing.size)
        freeze_first(embedder, unfreeze)
        views = None if unfreeze == ALL else config.views  # which fixed stages alone have
        config = replace(config, unfreeze=unfreeze, views=views)
    if config.lora is not None:
        add_adapters(embedder, config.lora, unfreeze=config.unfreeze, seed=config.seed)
    if config.unfreeze not in (None, ALL) and preprocessing.flip:
        preprocessing = replace(preprocessing, zoom=ZOOM, light=LIGHT)
    if config.train_size is not None:
        if config.train_size > preprocessing.size:
            raise UsageError(
                f"--train-size is {config.train_size}, but the network searches pictures of "
                f"{preprocessing.size} pixels; give a smaller one, or raise --size"
            )
        _check_size(embedder.backbone, config.train_size, "--train-size")
    embedder.backbone.preprocessing = replace(preprocessing, train_size=config.train_size)
    return config


def describe_data(job: Job) -> None:
    """Write data.json, and scan.csv if the scan found anything."""
    c, s = job.collection, job.split
    parts = {
        name: rows
        for name, rows in (("train", s.train), ("val", s.val), ("test", s.test))
        if len(rows)
    }
    counts = {name: len(rows) for name, rows in parts.items()}
    classes = {
        name: [c.class_names[i] for i in classes_in(c, rows)] for name, rows in parts.items()
    }
    described = {"description": c.describe(), "items": counts, "classes": classes}
    job.run.write("data.json", described | ({"by_links": True} if c.by_links else {}))
    if job.scan.problems and processes.first():
        write_file(job.run.path / "scan.csv", job.scan.as_csv())


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
