"""What the page shows: an index, the pictures of its items, the model, and a map.

See searchable.py for which index that is.
"""

import time
from dataclasses import dataclass, field
from functools import cached_property
from math import inf
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from nofuss.model.encoder import Encoder, load
from nofuss.run.directory import open_run
from nofuss.run.embeddings import RunEmbeddings
from nofuss.search.columns import LABEL
from nofuss.search.plane import ANCHORS, Plane, lay_out
from nofuss.search.searchable import Pictures, kept_embeddings, open_searchable
from nofuss.search.stores import Searched
from nofuss.search.where import Compare, Condition, Every

STARS = 100
"""Most proxies on the map."""
COUNT_SECONDS = 60
ON_MAP = 20_000
"""Most items on the map."""


@dataclass(frozen=True)
class Found:
    """Rows of the index, the nearest first."""

    rows: list[int]
    distances: list[float]
    milliseconds: float
    nothing: bool
    """Whether even the nearest is beyond the model's threshold."""


@dataclass
class Shelf:
    """An index with everything the page shows of it."""

    title: str
    index: Searched
    encoder: Encoder
    pictures: Pictures | None
    """None where the items are vectors."""
    proxies: Tensor
    proxy_names: list[str]
    _drawing: Lock = field(default_factory=Lock)
    _size: int = 0
    _counted: float = -inf

    def picture(self, row: int) -> Path | Image.Image | None:
        """Return an item's picture, or the file that holds it, or None where there is none."""
        return None if self.pictures is None else self.pictures[self.index.items([row])[0].name]

    @property
    def threshold(self) -> float | None:
        """Distance beyond which neighbours are not alike; None if training could not find it."""
        value = self.encoder.extra.get("threshold")
        return float(value) if isinstance(value, int | float) else None

    @property
    def size(self) -> int:
        """Number of items; counted again every minute, as a database counts one by one."""
        if time.monotonic() > self._counted + COUNT_SECONDS:
            self._size, self._counted = len(self.index), time.monotonic()
        return self._size

    @cached_property
    def classes(self) -> list[str]:
        """Names of the classes, sorted."""
        return self.index.classes

    def search(
        self,
        query: Tensor,
        k: int,
        *,
        only: int | None = None,
        where: Condition | None = None,
        without: int | None = None,
    ) -> Found:
        """Return the k nearest of a vector (D,), in class `only`, leaving out item `without`."""
        began = time.perf_counter()
        wanted = k if without is None else k + 1
        parts = [] if where is None else [where]
        if only is not None:
            parts.append(Compare(LABEL, "==", self.classes[only]))
        condition = Every(tuple(parts)) if parts else None
        distances, rows = self.index.search(query[None], wanted, where=condition)
        pairs = [
            (int(row), float(distance))
            for row, distance in zip(rows[0], distances[0], strict=True)
            if row >= 0 and row != without
        ][:k]
        spent = 1000 * (time.perf_counter() - began)
        nearby = [distance for _, distance in pairs]
        nothing = self.threshold is not None and (not nearby or nearby[0] > self.threshold)
        return Found([row for row, _ in pairs], nearby, spent, nothing)

    @cached_property
    def _plane(self) -> Plane:
        return lay_out(self.index.vectors_of(self.index.sample(ANCHORS)), self.proxies)

    def place(self, vectors: Tensor) -> NDArray[np.float32]:
        """Return where vectors lie on the map; the first call draws it and takes some seconds."""
        with self._drawing:
            plane = self._plane
        return plane.place(vectors)

    @property
    def drawn(self) -> bool:
        """Whether the map has been drawn."""
        return "_plane" in self.__dict__

    @cached_property
    def map(self) -> dict[str, Any]:
        """The page's map: rows, x, y and class of the items; x, y and name of the proxies."""
        rows = self.index.sample(ON_MAP)
        places = self.place(self.index.vectors_of(rows))
        code = {name: i for i, name in enumerate(self.classes)}
        labels = [item.label for item in self.index.items(rows)]
        stars = self.place(self.proxies)
        return {
            "rows": [as_text(row) for row in rows],
            "places": places.astype(np.float64).round(4).reshape(-1).tolist(),
            "classes": [-1 if label is None else code.get(label, -1) for label in labels],
            "stars": stars.astype(np.float64).round(4).reshape(-1).tolist(),
            "star_names": self.proxy_names,
        }


def as_text(number: int) -> int | str:
    """Return an item's number for the page: as text where a browser would round it."""
    return number if number < 2**53 else str(number)


def open_shelf(path: Path, url: str | None = None) -> Shelf:
    """Open what `nofuss search` would search in, with the model and its proxies."""
    run, encoder = open_run(path), load(path)
    kept = kept_embeddings(run, encoder)
    names: list[str] = []
    proxies = torch.empty(0, encoder.dim)
    if kept is not None and len(kept.proxies):
        proxies, names = _stars(kept, encoder)
    searchable = open_searchable(run, encoder, url)
    pictures = Pictures(searchable.sources) if encoder.preprocessing else None
    shelf = Shelf(searchable.title, searchable.index, encoder, pictures, proxies, names)
    _ = shelf.classes  # now, since a database may take its time
    return shelf


def _stars(kept: RunEmbeddings, encoder: Encoder) -> tuple[Tensor, list[str]]:
    """Return proxies spread evenly over all, and their classes if each class has one."""
    chosen = np.unique(np.linspace(0, len(kept.proxies) - 1, STARS).round().astype(np.int64))
    one_each = len(kept.proxies) == len(encoder.class_names)
    names = [encoder.class_names[i] if one_each else f"proxy {i}" for i in chosen]
    return torch.from_numpy(kept.proxies[chosen]), names
