"""The paper's data sets, and how long to train on them: `--data` and `--budget`.

With `minutes` photographs become features of a fixed backbone, computed once and cached: a training
then takes seconds. Without --data the built-in characters are used, and for `products` the set
`han` of the same size.

Methods share start, batch, steps, schedule and number of tries; margins and scales are the defaults
of each. Only `paper` has a batch of 128 for losses over instances, as the paper does, and so a
quarter of their steps.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from nofuss.config import Options
from nofuss.data.collection import Collection, compact_labels
from nofuss.data.open import TrainingData, open_data
from nofuss.data.readers.benchmarks import layout_of, open_cars, open_cub, open_products
from nofuss.data.readers.han import open_han
from nofuss.data.split import Rows
from nofuss.data.triplets import NO_LABEL, Comparisons
from nofuss.distributed import processes
from nofuss.distributed.device import choose_device
from nofuss.errors import DataError
from nofuss.files import digest
from nofuss.losses import INSTANCE_LOSSES
from nofuss.model.backbones import Backbone
from nofuss.model.embedder import Embedder, build_embedder, for_inference
from nofuss.model.features import features_of
from nofuss.progress import Progress, silent
from nofuss.training.network import build_model

log = logging.getLogger("nofuss")

TITLES = {
    "cars": "Cars196",
    "cub": "CUB-200-2011",
    "products": "Stanford Online Products",
    "han": "Han and Hangul characters, as many as Stanford Online Products",
    "characters": "built-in characters",
}
"""In order of preference: the paper's figures use Cars196."""
LAYOUTS = {
    "cars": "a folder with cars_annos.mat and car_ims/000001.jpg …, or with cars_train/, "
    "cars_test/ and devkit/ holding cars_train_annos.mat and cars_test_annos_withlabels.mat",
    "cub": "a folder CUB_200_2011 with images.txt, image_class_labels.txt, classes.txt and "
    "images/001.Black_footed_Albatross/….jpg",
    "products": "a folder Stanford_Online_Products with Ebay_train.txt, Ebay_test.txt and "
    "bicycle_final/….JPG, cabinet_final/….JPG …",
}
_NAMES: dict[Callable[[Path], Collection], str] = {
    open_cars: "cars",
    open_cub: "cub",
    open_products: "products",
}


@dataclass(frozen=True)
class Budget:
    """How long and how to train."""

    name: Literal["minutes", "hours", "paper"]
    settings: dict[str, Any]
    """Options of `nofuss train`."""
    words: str
    """The same in words, for the report."""
    rates: tuple[float, ...]
    """Candidates for each method's rate."""
    seeds: int = 3
    proxy_factor: float = 10
    """How many times as high the rate of proxies is."""
    folds: int = 2
    """A try is scored on the other half of the training classes; 2: and the reverse."""
    try_epochs: int | None = None
    """Epochs of a try, if fewer than the training's."""
    try_classes: int | None = None
    """Classes of each half in a try, if not all."""
    classes: int | None = None
    """Classes of each side, if not all."""
    instance_batch: int | None = None
    """The batch of losses over instances, if it differs."""
    curve_items: int = 6000
    """Most test items of a curve, one point per epoch; the last epoch is scored on all."""
    long: bool = False
    """Whether a training takes minutes: it writes checkpoints, and sweeps have fewer points."""

    def batch_of(self, loss: str) -> int:
        """Return the batch of a method."""
        special = self.instance_batch if loss in INSTANCE_LOSSES else None
        return special or int(self.settings["batch_size"])


_LITE0_RATES, _CONVNET_RATES = (3e-5, 1e-4, 3e-4, 1e-3), (3e-4, 1e-3, 3e-3, 1e-2)
_SMALL = {"preset": "small", "epochs": 10, "batch_size": 64, "val_fraction": 0.0}
_SMALL_16 = "The small convnet from random weights on 16 × 16 pixels"
_SMALL_28 = "The small convnet from random weights on 28 × 28 pixels"
_PAPER = Budget(
    name="paper",
    settings={"preset": "paper", "batch_size": 32, "val_fraction": 0.0},
    words="Inception with batch norm, RMSprop, norms of Proxy-NCA and Proxy-Triplet free, as the "
    "paper has it; crops mirrored",
    rates=(1e-5, 3e-5, 1e-4, 3e-4),
    folds=1,
    instance_batch=128,
    long=True,
)
_PHOTOGRAPHS = (
    Budget(
        name="minutes",
        settings={"preset": "vectors", "start": "pca", "dim": 64, "epochs": 12, "batch_size": 64},
        words="A linear head to 64 dimensions on the roots of frozen EfficientNet-Lite0 features, "
        "started at their PCA, proxies at class means (found with Proxy-NCA, which it may favour)",
        rates=_LITE0_RATES,
    ),
    Budget(
        name="hours",
        # From the PCA most methods have more to forget than to learn.
        settings={"preset": "finetune", "unfreeze": "1", "views": 4, "start": "random", "dim": 64}
        | {"epochs": 10, "batch_size": 64, "size": 224, "val_fraction": 0.0, "mirror": False},
        words="The last stage of EfficientNet-Lite0 and a head of 64 dimensions from random "
        "weights, on cached activations of 4 random crops a picture; scored on the centre crop",
        rates=_LITE0_RATES,
        proxy_factor=100,  # as in the README's loop; 10 to 200 differ by noise (docs/lab)
        folds=1,
        try_epochs=5,
        curve_items=2000,
        long=True,
    ),
    _PAPER,
)
_CHARACTERS = (
    Budget(
        name="minutes",
        settings=_SMALL | {"epochs": 6, "size": 16},
        words=f"{_SMALL_16}, 160 characters in training and 160 in the test",
        rates=_CONVNET_RATES,
        classes=160,
    ),
    Budget(name="hours", settings=_SMALL, words=_SMALL_28, rates=_CONVNET_RATES),
    _PAPER,
)
# A class has five pictures: its proxy is the positive so rarely that it needs a higher rate (found
# on halves of the training classes, docs/lab).
_HAN = (
    Budget(
        name="minutes",
        settings=_SMALL | {"size": 16},
        words=_SMALL_16,
        rates=_CONVNET_RATES[:3],
        seeds=1,
        proxy_factor=100,
        folds=1,
        try_classes=1000,
    ),
    Budget(
        name="hours",
        settings=_SMALL,
        words=_SMALL_28,
        rates=_CONVNET_RATES[:3],
        proxy_factor=100,
        try_classes=2000,
        long=True,
    ),
    _PAPER,
)


def budget_of(name: str, budget: str) -> Budget:
    """Return how to train on a data set."""
    budgets = {"characters": _CHARACTERS, "han": _HAN}.get(name, _PHOTOGRAPHS)
    return next(b for b in budgets if b.name == budget)


@dataclass(frozen=True, eq=False)
class Source:
    """A data set as trials use it."""

    name: str
    budget: Budget
    pictures: Collection
    """The pictures, for the report; with the split of the data set."""
    collection: Collection
    """What is trained on: pictures, or their features as vectors."""

    @cached_property
    def fingerprint(self) -> str:
        """A digest of the data."""
        return digest(self.pictures.fingerprint().encode())

    @cached_property
    def features(self) -> Tensor | None:
        """(N, F) features that the head is initialized from; None if it starts at random."""
        vectors = self.collection.vectors
        return None if vectors is None else torch.from_numpy(np.array(vectors, dtype=np.float32))

    @property
    def title(self) -> str:
        """Name of the data set, for readers."""
        return TITLES[self.name]

    @property
    def ks(self) -> tuple[int, ...]:
        """The K of Recall@K."""
        return (1, 10, 100, 1000) if self.name in ("products", "han") else (1, 2, 4, 8)

    @cached_property
    def data(self) -> TrainingData:
        """The collection as training takes it."""
        return TrainingData(self.collection, None, None, self.fingerprint)

    @cached_property
    def backbone(self) -> Backbone:
        """The network of all trials, before training."""
        settings = self.budget.settings
        options, side = Options(**settings), self.data.side
        return build_model(options, settings["preset"], self.collection, side=side).backbone

    @property
    def train_classes(self) -> int:
        """The number of training classes."""
        return len(np.unique(self.labels(self.split(None)[0])))

    def labels(self, rows: Rows) -> Rows:
        """Return the classes of these rows."""
        return self.collection.known_labels()[rows]

    def split(self, fold: int | None) -> tuple[Rows, Rows]:
        """Return rows to train on and to score: train, test; or halves of the *training* classes.

        Halves follow the order of the classes, as the official splits do (CUB lists related birds
        side by side); those of the characters are random, as their split is.
        """
        train, test = (np.flatnonzero(self.pictures.split == side) for side in ("train", "test"))
        if fold is None:
            return train, test
        labels = self.labels(train)
        classes = np.unique(labels)
        if self.name in ("characters", "han"):
            classes = np.random.default_rng(0).permutation(classes)
        one, other = (
            train[np.isin(labels, half[: self.budget.try_classes])]
            for half in np.split(classes, [len(classes) // 2])
        )
        return (one, other) if fold == 0 else (other, one)


def find_folders(data: Path) -> dict[str, Path]:
    """Return data set → its folder: `data` itself or a folder directly in it."""
    if not data.is_dir():
        raise DataError(
            f"--data {data} is not a folder; expected a data set's folder, or one that holds it"
        )
    folders: dict[str, Path] = {}
    for folder in (data, *sorted(path for path in data.iterdir() if path.is_dir())):
        if reader := layout_of(folder):
            folders.setdefault(_NAMES[reader], folder)
    return folders


def missing(name: str, data: Path | None) -> str:
    """Return one line: which data set is missing, and its layout."""
    where = f"{data} has no {TITLES[name]}" if data else f"{TITLES[name]} needs --data"
    return f"{name}: {where}; its official layout: {LAYOUTS[name]}"


def open_source(
    name: str,
    folder: Path | None,
    budget: str,
    *,
    seeds: int | None,
    weights: Path | None,
    device: str = "auto",
    progress: Progress = silent,
) -> Source:
    """Open a data set for a budget; slow steps are cached."""
    chosen = budget_of(name, budget)
    more: dict[str, Any] = {"device": device} | ({"weights": weights} if weights else {})
    chosen = replace(chosen, settings=chosen.settings | more, seeds=seeds or chosen.seeds)
    with processes.in_turn():
        pictures = open_han() if name == "han" else open_data(folder)
    log.info(f"{name}: {pictures.describe()}")
    return make_source(name, pictures, chosen, progress=progress)


def make_source(
    name: str, pictures: Collection, budget: Budget, *, progress: Progress = silent
) -> Source:
    """Prepare a collection that has a split for trials."""
    if budget.classes is not None:
        pictures = _fewer_classes(pictures, budget.classes)
    collection = pictures
    if budget.settings["preset"] == "vectors" and pictures.paths:
        raw, embedder = _lite0_features(pictures, budget, progress)
        collection = replace(pictures, array=embedder.to_head(raw).numpy(), paths=())
    return Source(name, budget, pictures, collection)


def raw_features(source: Source) -> Tensor | None:
    """Return the backbone's features unchanged, for the untrained baseline."""
    if source.budget.settings["preset"] in ("vectors", "finetune") and source.pictures.paths:
        return _lite0_features(source.pictures, source.budget)[0]
    return source.features


def _lite0_features(
    pictures: Collection, budget: Budget, progress: Progress = silent
) -> tuple[Tensor, Embedder]:
    """Return the features, from the cache if they are there, and the network that computes them."""
    embedder = build_embedder("efficientnet-lite0", root=True)
    embedder.to(choose_device(budget.settings.get("device", "auto")))
    backbone = for_inference(embedder).backbone
    return features_of(backbone, pictures, progress=progress).values, embedder


def _fewer_classes(pictures: Collection, most: int) -> Collection:
    """Keep `most` classes of each side, the same every time."""
    assert pictures.split is not None
    kept = []
    for side in ("train", "test"):
        classes = np.unique(pictures.labels[pictures.split == side])
        kept.append(np.random.default_rng(0).permutation(classes)[:most])
    return pictures.subset(np.flatnonzero(np.isin(pictures.labels, np.concatenate(kept))))


def bare_triplets(source: Source, rows: Rows, count: int, *, seed: int) -> Collection:
    """Return the collection with `count` triplets drawn from the labels of `rows`, and no labels.

    Its class names only say how many classes there are: the number of proxies depends on it.
    """
    rows = rows[np.argsort(source.labels(rows), kind="stable")]
    labels, classes = compact_labels(source.labels(rows))
    sizes = np.bincount(labels)
    generator = np.random.default_rng(seed)
    anchor = generator.choice(np.flatnonzero(sizes[labels] > 1), count)
    size = sizes[labels[anchor]]
    first = (np.cumsum(sizes) - sizes)[labels[anchor]]
    # Items of a class are neighbours: a step of 1 to size − 1 around it is another one of them,
    # and from the end of the class and around follow all others.
    step = 1 + generator.integers(size - 1)
    positive = first + (anchor - first + step) % size
    negative = (first + size + generator.integers(len(labels) - size)) % len(labels)
    return replace(
        source.collection,
        labels=np.full(len(source.collection), NO_LABEL),
        comparisons=Comparisons("triplets", rows[np.stack([anchor, positive, negative], axis=1)]),
        class_names=tuple(map(str, classes)),
    )
