"""What the page searches: an index, the pictures behind its rows, and the model that made it.

A run with an index shows that; a run without one shows its own test classes.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from nofuss.data.collection import Collection
from nofuss.data.split import sides_of
from nofuss.data.usable import open_usable
from nofuss.errors import DataError, RunError, command
from nofuss.evaluate.neighbours import nearest
from nofuss.model.encoder import Encoder, load
from nofuss.report.thumbnails import has_pictures, picture
from nofuss.run.directory import open_run
from nofuss.run.embeddings import FILE, RunEmbeddings, load_embeddings
from nofuss.search.gallery import open_gallery, source_of, sources
from nofuss.search.index import MANIFEST, Index
from nofuss.search.indexing import open_index
from nofuss.search.plane import Plane, lay_out

SIDE = 224
"""Longest side of a picture on the page."""
STARS = 100
"""Proxies on the map."""
ON_MAP = 20_000


@dataclass(frozen=True)
class Found:
    """Rows of the index, the nearest first."""

    rows: list[int]
    distances: list[float]
    milliseconds: float
    nothing: bool
    """Even the nearest is beyond the model's threshold."""


@dataclass
class Shelf:
    """An index that can be looked at."""

    title: str
    index: Index
    encoder: Encoder
    pictures: Callable[[int], Path | Image.Image | None] | None
    """The picture of a row, or the file that holds it; None where the items are vectors."""
    proxies: Tensor
    proxy_names: list[str]
    _drawing: Lock = field(default_factory=Lock)

    @property
    def threshold(self) -> float | None:
        """Neighbours further than this are not alike, as the model's training found."""
        value = self.encoder.extra.get("threshold")
        return float(value) if isinstance(value, int | float) else None

    @cached_property
    def classes(self) -> list[str]:
        """Names of the classes, sorted."""
        return sorted({label for label in self.index.labels if label is not None})

    @cached_property
    def codes(self) -> NDArray[np.int64]:
        """(N,) places in `classes`; −1 without a label."""
        place = {name: i for i, name in enumerate(self.classes)}
        return np.array([-1 if c is None else place[c] for c in self.index.labels], np.int64)

    def search(
        self, query: Tensor, k: int, *, only: int | None = None, without: int | None = None
    ) -> Found:
        """The k nearest of a vector (D,), of one class if asked, an item itself left out."""
        began = time.perf_counter()
        wanted = k if without is None else k + 1
        if only is None:
            apart, rows = self.index.search(query[None], wanted)
        else:
            of_class = torch.from_numpy(np.flatnonzero(self.codes == only))
            apart, rows = nearest(query[None], self.index.vectors[of_class], wanted)
            rows = of_class[rows]
        pairs = [
            (int(row), float(distance))
            for row, distance in zip(rows[0], apart[0], strict=True)
            if row >= 0 and row != without
        ][:k]
        spent = 1000 * (time.perf_counter() - began)
        nearby = [distance for _, distance in pairs]
        nothing = self.threshold is not None and (not nearby or nearby[0] > self.threshold)
        return Found([row for row, _ in pairs], nearby, spent, nothing)

    @cached_property
    def _plane(self) -> Plane:
        return lay_out(self.index.vectors, self.proxies)

    def place(self, vectors: Tensor) -> NDArray[np.float32]:
        """Where vectors lie on the map; the first call draws it, which takes some seconds."""
        with self._drawing:
            plane = self._plane
        return plane.place(vectors)

    @property
    def drawn(self) -> bool:
        """Whether the map is there already."""
        return "_plane" in self.__dict__

    @cached_property
    def map(self) -> dict[str, Any]:
        """The page's map: rows, x, y and class of the items; x, y and name of the proxies."""
        rows = np.arange(len(self.index))
        if len(rows) > ON_MAP:
            rows = np.sort(np.random.default_rng(0).permutation(len(rows))[:ON_MAP])
        places = self.place(self.index.vectors[torch.from_numpy(rows)])
        stars = self.place(self.proxies)
        return {
            "rows": rows.tolist(),
            "places": places.astype(np.float64).round(4).reshape(-1).tolist(),
            "classes": self.codes[rows].tolist(),
            "stars": stars.astype(np.float64).round(4).reshape(-1).tolist(),
            "star_names": self.proxy_names,
        }


def open_shelf(run: Path) -> Shelf:
    """The run's index if it has one, else its test classes."""
    encoder, kept = load(run), load_embeddings(run)
    if kept is not None and kept.test.shape[1] != encoder.dim:
        raise RunError(
            f"{run / FILE} holds vectors of {kept.test.shape[1]} dimensions, but the model gives "
            f"{encoder.dim}; delete it or train again"
        )
    names: list[str] = []
    proxies = torch.empty(0, encoder.dim)
    if kept is not None and len(kept.proxies):
        proxies, names = _stars(kept, encoder)
    if (run / "index" / MANIFEST).is_file():
        index = open_index(open_run(run), encoder)
        if not len(index):
            raise DataError(
                f"{run / 'index'} is empty; add pictures: {command('nofuss', 'index', run)} DIR"
            )
        of_row = _indexed_pictures(index) if encoder.preprocessing is not None else None
        return Shelf("the index of this run", index, encoder, of_row, proxies, names)
    collection, rows, vectors = _test_side(run, encoder, kept)
    once = np.unique([collection.names[i] for i in rows], return_index=True)[1]
    rows, vectors = rows[np.sort(once)], vectors[np.sort(once)]  # a list may name a file twice
    labels = None
    if collection.labels is not None:
        labels = [collection.class_names[i] for i in collection.labels[rows]]
    index = Index.build(vectors, names=[collection.names[i] for i in rows], labels=labels)

    pictures = None
    if has_pictures(collection):

        def pictures(row: int) -> Path | Image.Image | None:
            if collection.kind == "pictures":
                return collection.paths[int(rows[row])]
            return picture(collection, int(rows[row]), side=SIDE)

    seen = kept is not None and kept.seen
    title = collection.name if seen else f"{collection.name}, test classes"
    return Shelf(title, index, encoder, pictures, proxies, names)


def _test_side(
    run: Path, encoder: Encoder, kept: RunEmbeddings | None
) -> tuple[Collection, NDArray[np.int64], NDArray[np.float32]]:
    """The run's data, rows of its test items (all items without any), and their vectors."""
    config = open_run(run).config
    collection, _ = open_usable(config.data)
    same = kept is not None and kept.fingerprint == collection.fingerprint()
    if kept is not None and same and len(kept.test):
        if kept.test_rows.max() >= len(collection):
            raise RunError(f"{run / FILE} names items that are not in the data; delete it")
        return collection, kept.test_rows, kept.test
    rows = sides_of(collection, config).test
    if not len(rows):
        rows = np.arange(len(collection))
    if not len(rows):
        raise DataError(f"{collection.name} is empty, so there is nothing to search in")
    return collection, rows, encoder.embed_collection(collection.subset(rows)).numpy()


def _stars(kept: RunEmbeddings, encoder: Encoder) -> tuple[Tensor, list[str]]:
    """Proxies spread over all of them, and the class each stands for where there is one each."""
    few = np.unique(np.linspace(0, len(kept.proxies) - 1, STARS).round().astype(np.int64))
    own = len(kept.proxies) == len(encoder.class_names)
    names = [encoder.class_names[i] if own else f"proxy {i}" for i in few]
    return torch.from_numpy(kept.proxies[few]), names


def _indexed_pictures(index: Index) -> Callable[[int], Path | Image.Image | None]:
    """Pictures by what the index calls them: a file, or a file of arrays and a row."""
    opened: dict[str, Collection] = {}

    def of_row(row: int) -> Path | Image.Image | None:
        name = index.names[row]
        source, _, number = name.rpartition("#")
        if source in arrays and number.isdigit():
            if source not in opened:
                opened[source] = open_gallery(arrays[source])
            return picture(opened[source], int(number), side=SIDE)
        return Path(name)

    built_in = source_of(None)
    arrays = {of: None if of == built_in else Path(of) for of in sources(index)}
    return of_row
