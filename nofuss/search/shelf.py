"""What the page shows: an index, the pictures of its items, the model, and a map.

See searchable.py for which index that is.
"""

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
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
from nofuss.files.atomic import read_json
from nofuss.files.checksum import digest_of
from nofuss.model.encoder import Encoder, load
from nofuss.model.taught import mapped
from nofuss.run.directory import Run, open_run
from nofuss.run.embeddings import RunEmbeddings
from nofuss.search.gallery import model_digest
from nofuss.search.index import Index
from nofuss.search.plane import Plane, lay_out
from nofuss.search.ranking import Found, Ranking, Rerank
from nofuss.search.searchable import Pictures, kept_embeddings, open_searchable

STARS = 100
"""Most proxies on the map."""
VOTERS = 10
"""Neighbours that say which class a picture most likely is of."""
ON_MAP = 20_000
"""Most items on the map."""


@dataclass(frozen=True)
class Likely:
    """The class of most of the nearest neighbours."""

    label: str
    votes: int
    voters: int


@dataclass
class Shelf:
    """An index with everything the page shows of it."""

    run: Run
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

    @cached_property
    def keys(self) -> dict[str, int]:
        """Key → row. A key stays the same when the index grows, so addresses can contain it."""
        return {self.key(name): row for row, name in enumerate(self.index.names)}

    def key(self, name: str) -> str:
        """Return the key of an item."""
        return digest_of([name.encode("utf-8", "surrogatepass")])[:16]

    @cached_property
    def model(self) -> str:
        """The model's checksum."""
        return model_digest(self.run.model)

    @property
    def taught(self) -> int:
        """How many marks have taught the model since its training."""
        stored = self.encoder.extra.get("taught")
        marks = stored.get("marks") if isinstance(stored, dict) else 0
        return marks if isinstance(marks, int) else 0

    def matching(self, words: str) -> list[int]:
        """Return the classes that are named so, else those whose name contains the words."""
        if words in self.classes:
            return [self.classes.index(words)]
        part = words.casefold().strip()
        return [i for i, name in enumerate(self.classes) if part in name.casefold()]

    def search(
        self,
        query: Tensor,
        k: int,
        *,
        only: Sequence[int] | None = None,
        without: int | None = None,
    ) -> Found:
        """Return the k best of a vector (D,), leaving out item `without`.

        Within classes `only`: the k nearest, without a verdict, which is about all classes.
        """
        began = time.perf_counter()
        if only is None:
            found = self.ranking.search(query, k, without=without)
        else:
            of_class = torch.from_numpy(np.flatnonzero(np.isin(self.codes, only)))
            distances, rows = nearest(query[None], self.index.vectors[of_class], k + 1)
            kept = (of_class[rows[0]] != (-1 if without is None else without)).nonzero()[:k, 0]
            found = Found(of_class[rows[0, kept]].tolist(), distances[0, kept].tolist())
        return replace(found, milliseconds=1000 * (time.perf_counter() - began))

    def likely(self, found: Found) -> Likely | None:
        """Return the class of most of the first neighbours; of equal ones the nearest."""
        labels = [self.index.labels[row] for row in found.rows[:VOTERS]]
        votes = Counter(label for label in labels if label is not None)
        if not votes:
            return None
        label, count = votes.most_common(1)[0]  # of equal counts the first met
        return Likely(label, count, len(labels))

    @cached_property
    def scores(self) -> dict[str, float]:
        """Recall@1 and MAP@R of the run's last evaluation; empty where there is none."""
        try:
            stored = read_json(self.run.path / "scores.json")
        except (OSError, ValueError):
            return {}
        names = ("recall@1", "map@r")
        return {n: float(stored[n]) for n in names if isinstance(stored.get(n), int | float)}

    @cached_property
    def plane(self) -> Plane:
        """Where the map places vectors."""
        return lay_out(self.index.vectors, self.proxies)

    def place(self, vectors: Tensor) -> NDArray[np.float32]:
        """Return where vectors lie on the map; the first call draws it and takes some seconds."""
        with self._drawing:
            plane = self.plane
        return plane.place(vectors)

    def mapped(self, matrix: Tensor, encoder: Encoder) -> "Shelf":
        """Return the shelf of a model that was taught by a map (D, D); its map stays as drawn."""
        index, proxies = self.index.mapped(matrix), mapped(self.proxies, matrix)
        ranking = self.ranking.of(index, encoder)
        new = replace(self, ranking=ranking, encoder=encoder, proxies=proxies, _drawing=Lock())
        if self.drawn:
            plane = Plane(mapped(self.plane.anchors, matrix), self.plane.places)
            new.__dict__ |= {"plane": plane, "map": self.map}
        return new

    @property
    def drawn(self) -> bool:
        """Whether the map has been drawn."""
        return "plane" in self.__dict__

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
    return Shelf(run, searchable.title, searchable.ranking, encoder, pictures, proxies, names)


def _stars(kept: RunEmbeddings, encoder: Encoder) -> tuple[Tensor, list[str]]:
    """Return proxies spread evenly over all, and their classes if each class has one."""
    chosen = np.unique(np.linspace(0, len(kept.proxies) - 1, STARS).round().astype(np.int64))
    one_each = len(kept.proxies) == len(encoder.class_names)
    names = [encoder.class_names[i] if one_each else f"proxy {i}" for i in chosen]
    return torch.from_numpy(kept.proxies[chosen]), names
