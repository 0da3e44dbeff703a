"""Find the paper's data sets under --data, and prepare them for a budget.

With `minutes` photographs become features of a fixed backbone, computed once and cached: a training
then takes seconds. Without --data the built-in characters are used, and for `products` the set
`han` of the same size.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nofuss.data import benchmarks
from nofuss.data.collection import Collection, compact_labels
from nofuss.data.detect import open_data
from nofuss.data.han import open_han
from nofuss.data.split import Rows
from nofuss.distributed import processes
from nofuss.distributed.device import choose_device
from nofuss.errors import DataError
from nofuss.files import digest
from nofuss.model.embedder import build_embedder
from nofuss.model.features import backbone_features
from nofuss.paper.budgets import CHARACTERS, HAN, PHOTOGRAPHS, Budget
from nofuss.progress import Progress, silent

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
_READERS: dict[Callable[[Path], Collection], str] = {
    benchmarks.open_cars: "cars",
    benchmarks.open_cub: "cub",
    benchmarks.open_products: "products",
}


@dataclass(frozen=True, eq=False)
class Source:
    """A data set as trials use it."""

    name: str
    budget: Budget
    pictures: Collection
    """The pictures, for the report."""
    collection: Collection
    """What is trained on: pictures, or their features as vectors."""
    features: Tensor | None
    """(N, F) features that the head is initialized from; None if it starts at random."""
    train_rows: Rows
    test_rows: Rows
    fingerprint: str

    @property
    def title(self) -> str:
        """Name of the data set, for readers."""
        return TITLES[self.name]

    @property
    def ks(self) -> tuple[int, ...]:
        """The K of Recall@K."""
        return (1, 10, 100, 1000) if self.name in ("products", "han") else (1, 2, 4, 8)

    def with_scales(self, scales: dict[str, float]) -> "Source":
        """Return the same data with the scales that were chosen for methods."""
        return replace(self, budget=replace(self.budget, scales=scales))

    def labels(self, rows: Rows) -> Rows:
        """Return the classes of these rows."""
        assert self.collection.labels is not None
        return self.collection.labels[rows]

    def sides(self, fold: int | None) -> tuple[Rows, Rows]:
        """Return rows to train on and to score: train, test; or halves of the *training* classes.

        Halves follow the order of the classes, as the official splits do (CUB lists related birds
        side by side); those of the characters are random, as their split is.
        """
        if fold is None:
            return self.train_rows, self.test_rows
        labels = self.labels(self.train_rows)
        classes = np.unique(labels)
        if self.name in ("characters", "han"):
            classes = np.random.default_rng(0).permutation(classes)
        most = self.budget.try_classes
        halves = [
            self.train_rows[np.isin(labels, half[:most])]
            for half in np.split(classes, [len(classes) // 2])
        ]
        return (halves[0], halves[1]) if fold == 0 else (halves[1], halves[0])


def find_folders(data: Path) -> dict[str, Path]:
    """Return data set → its folder: `data` itself or a folder directly in it."""
    if not data.is_dir():
        raise DataError(
            f"--data {data} is not a folder; expected a data set's folder, or one that holds it"
        )
    folders: dict[str, Path] = {}
    for folder in (data, *sorted(path for path in data.iterdir() if path.is_dir())):
        reader = benchmarks.layout_of(folder)
        if reader is not None:
            folders.setdefault(_READERS[reader], folder)
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
    chosen = {"characters": CHARACTERS, "han": HAN}.get(name, PHOTOGRAPHS)[budget]
    chosen = replace(chosen, settings={**chosen.settings, "device": device})
    if seeds is not None:
        chosen = replace(chosen, seeds=seeds)
    if weights is not None:
        chosen = replace(chosen, settings={**chosen.settings, "weights": weights})
    with processes.in_turn():
        pictures = open_han() if name == "han" else open_data(folder)
    log.info(f"{name}: {pictures.describe()}")
    return make_source(name, pictures, chosen, progress=progress)


def make_source(
    name: str, pictures: Collection, budget: Budget, *, progress: Progress = silent
) -> Source:
    """Prepare a collection that has a split for trials."""
    assert pictures.split is not None
    assert pictures.labels is not None
    if budget.classes is not None:
        pictures = _fewer_classes(pictures, budget.classes)
    assert pictures.split is not None
    identity = [pictures.fingerprint().encode()]
    collection, features = _prepared(pictures, budget, progress)
    if features is not None:
        identity.append(f"{tuple(features.shape)} {features.double().sum():.6g}".encode())
    source = Source(
        name=name,
        budget=budget,
        pictures=pictures,
        collection=collection,
        features=features,
        train_rows=np.flatnonzero(pictures.split == "train"),
        test_rows=np.flatnonzero(pictures.split == "test"),
        fingerprint=digest(*identity),
    )
    return source if features is None else _fit_dim(source, features.shape[1])


def _fit_dim(source: Source, width: int) -> Source:
    """Lower the dimension to the number of features: the PCA has no more directions."""
    dim = source.budget.config("proxy-nca", source.budget.rates[0]).dim
    assert dim is not None
    if dim <= width:
        return source
    settings = {**source.budget.settings, "dim": width}
    return replace(source, budget=replace(source.budget, settings=settings))


def raw_features(source: Source) -> Tensor | None:
    """Return the backbone's features unchanged, for the untrained baseline."""
    preset = source.budget.settings["preset"]
    if preset in ("vectors", "finetune") and source.pictures.kind == "pictures":
        return _lite0_features(source.pictures, source.budget)[0]
    return source.features


def _prepared(
    pictures: Collection, budget: Budget, progress: Progress
) -> tuple[Collection, Tensor | None]:
    """Return what trials train on, and the features that the head is initialized from."""
    preset = budget.settings["preset"]
    if preset == "vectors":
        if pictures.kind == "vectors":
            vectors = torch.from_numpy(np.array(pictures.array, dtype=np.float32))
        else:
            raw, embedder = _lite0_features(pictures, budget, progress)
            vectors = embedder.to_head(raw)
        as_vectors = replace(pictures, kind="vectors", array=vectors.numpy(), paths=())
        return as_vectors, vectors
    return pictures, None


def _lite0_features(
    pictures: Collection, budget: Budget, progress: Progress = silent
) -> tuple[Tensor, Any]:
    embedder = build_embedder("efficientnet-lite0", root=True)
    embedder.to(choose_device(budget.settings.get("device", "auto")))
    return backbone_features(embedder, pictures, progress=progress), embedder


def _fewer_classes(pictures: Collection, most: int) -> Collection:
    """Keep `most` classes of each side, the same every time."""
    assert pictures.split is not None
    assert pictures.labels is not None
    kept = []
    for side in ("train", "test"):
        classes = np.unique(pictures.labels[pictures.split == side])
        kept.append(np.random.default_rng(0).permutation(classes)[:most])
    return pictures.subset(np.flatnonzero(np.isin(pictures.labels, np.concatenate(kept))))


def bare_triplets(source: Source, rows: Rows, count: int, *, seed: int) -> Collection:
    """Return the collection with `count` triplets drawn from the labels of `rows`, and no labels.

    Its class names only say how many classes there are: the number of proxies depends on it.
    """
    labels, classes = compact_labels(source.labels(rows))
    generator = np.random.default_rng(seed)
    sizes = np.bincount(labels)
    order = np.argsort(labels, kind="stable")
    start = np.cumsum(sizes) - sizes
    with_positives = np.flatnonzero(sizes[labels] > 1)
    anchor = generator.choice(with_positives, count)
    label = labels[anchor]
    position = np.empty_like(order)  # of each item in `order`
    position[order] = np.arange(len(order))
    within = position[anchor] - start[label]
    # Items of a class are neighbours in `order`: a step of 1 to size − 1 within it is another item.
    step = 1 + generator.integers(sizes[label] - 1)
    positive = order[start[label] + (within + step) % sizes[label]]
    # Counted from the end of the class and around, all other items follow one another.
    outside = generator.integers(len(labels) - sizes[label])
    negative = order[(start[label] + sizes[label] + outside) % len(labels)]
    triplets = rows[np.stack([anchor, positive, negative], axis=1)]
    names = tuple(map(str, classes))
    return replace(source.collection, labels=None, triplets=triplets, class_names=names)
