"""What the page shows: an index, the pictures of its items, the model, and a map.

See searchable.py for which index that is.
"""

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

from nofuss.evaluate.neighbours import nearest
from nofuss.model.encoder import Encoder, load
from nofuss.run.directory import open_run
from nofuss.run.embeddings import RunEmbeddings
from nofuss.search.index import Index
from nofuss.search.plane import Plane, lay_out
from nofuss.search.ranking import Found, Ranking, Rerank
from nofuss.search.searchable import Pictures, kept_embeddings, open_searchable

STARS = 100
"""Most proxies on the map."""
ON_MAP = 20_000
"""Most items on the map."""


@dataclass
class Shelf:
    """An index with everything the page shows of it."""

    title: str
    ranking: Ranking
    encoder: Encoder
    pictures: Pictures | None
    """None where the items are vectors."""
    proxies: Tensor
    proxy_names: list[str]
    _drawing: Lock = field(default_factory=Lock)

    def picture(self, row: int) -> Path | Image.Image | None:
        """Return an item's picture, or the file that holds it, or None where there is none."""
        return None if self.pictures is None else self.pictures[self.index.names[row]]

    @property
    def index(self) -> Index:
        """What is searched."""
        return self.ranking.index

    @property
    def threshold(self) -> float | None:
        """Distance within which items of one class mostly lie; None if that could not be found."""
        strangers = self.ranking.strangers
        return None if strangers is None or not strangers.useful else strangers.distance

    @cached_property
    def classes(self) -> list[str]:
        """Names of the classes, sorted."""
        return sorted({label for label in self.index.labels if label is not None})

    @cached_property
    def codes(self) -> NDArray[np.int64]:
        """(N,) positions in `classes`; −1 without a label."""
        place = {name: i for i, name in enumerate(self.classes)}
        return np.array([-1 if c is None else place[c] for c in self.index.labels], np.int64)

    def search(
        self, query: Tensor, k: int, *, only: int | None = None, without: int | None = None
    ) -> Found:
        """Return the k best of a vector (D,), leaving out item `without`.

        Within class `only`: the k nearest, without a verdict, which is about all classes.
        """
        if only is None:
            return self.ranking.search(query, k, without=without)
        of_class = torch.from_numpy(np.flatnonzero(self.codes == only))
        distances, rows = nearest(query[None], self.index.vectors[of_class], k + 1)
        pairs = [
            (row, distance)
            for row, distance in zip(of_class[rows[0]].tolist(), distances[0].tolist(), strict=True)
            if row != without
        ][:k]
        return Found([row for row, _ in pairs], [distance for _, distance in pairs])

    @cached_property
    def _plane(self) -> Plane:
        return lay_out(self.index.vectors, self.proxies)

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


def open_shelf(path: Path, *, rerank: Rerank = "auto") -> Shelf:
    """Open what `nofuss search` would search in, with the model and its proxies."""
    run, encoder = open_run(path), load(path)
    kept = kept_embeddings(run, encoder)
    names: list[str] = []
    proxies = torch.empty(0, encoder.dim)
    if kept is not None and len(kept.proxies):
        proxies, names = _stars(kept, encoder)
    searchable = open_searchable(run, encoder, rerank=rerank)
    pictures = Pictures(searchable.sources) if encoder.preprocessing else None
    return Shelf(searchable.title, searchable.ranking, encoder, pictures, proxies, names)


def _stars(kept: RunEmbeddings, encoder: Encoder) -> tuple[Tensor, list[str]]:
    """Return proxies spread evenly over all, and their classes if each class has one."""
    chosen = np.unique(np.linspace(0, len(kept.proxies) - 1, STARS).round().astype(np.int64))
    one_each = len(kept.proxies) == len(encoder.class_names)
    names = [encoder.class_names[i] if one_each else f"proxy {i}" for i in chosen]
    return torch.from_numpy(kept.proxies[chosen]), names
