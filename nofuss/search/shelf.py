"""What the page shows: an index, the pictures of its items, the model, and a map.

See searchable.py for which index that is.
"""

import re
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf, isfinite
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from nofuss.files import digest, read_json
from nofuss.model.encoder import Encoder, load
from nofuss.model.saved import model_digest
from nofuss.model.taught import mapped
from nofuss.progress import Progress, silent
from nofuss.run.directory import Run
from nofuss.run.embeddings import RunEmbeddings
from nofuss.search.filter import LABEL, Compare, Condition, Join
from nofuss.search.index import Index
from nofuss.search.plane import ANCHORS, Plane, lay_out
from nofuss.search.refusals import Refused
from nofuss.search.searchable import Pictures, kept_embeddings, open_searchable
from nofuss.search.searcher import Found, RerankMode, Searcher
from nofuss.search.stores import Searched
from nofuss.search.stores.store import number_of

STARS = 100
"""Most proxies on the map."""
VOTERS = 10
"""Neighbours that say which class a picture most likely is of."""
ON_MAP = 20_000
"""Most items on the map."""
COUNT_SECONDS = 60


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
    searcher: Searcher
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
    def own(self) -> Index:
        """The run's own index; refused where the page searches in a database."""
        if isinstance(self.index, Index):
            return self.index
        raise Refused(409, "this needs the run's own index; open the page without --index")

    @property
    def size(self) -> int:
        """Number of items; counted again every minute, as a database counts one by one."""
        if time.monotonic() > self._counted + COUNT_SECONDS:
            self._size, self._counted = len(self.index), time.monotonic()
        return self._size

    @property
    def index(self) -> Searched:
        """What is searched."""
        return self.searcher.index

    @property
    def threshold(self) -> float | None:
        """Distance within which items of one class mostly lie; None if that could not be found."""
        open_set = self.searcher.open_set
        return None if open_set is None or not open_set.useful else open_set.distance

    @cached_property
    def classes(self) -> list[str]:
        """Names of the classes, sorted."""
        return self.index.classes

    @cached_property
    def codes(self) -> NDArray[np.int64]:
        """(N,) positions in `classes`; −1 without a label."""
        place = {name: i for i, name in enumerate(self.classes)}
        return np.array([-1 if c is None else place[c] for c in self.own.labels], np.int64)

    @cached_property
    def keys(self) -> dict[str, int]:
        """Key → row. A key stays the same when the index grows, so addresses can contain it."""
        return {self.key(name): row for row, name in enumerate(self.own.names)}

    def key(self, name: str) -> str:
        """Return the key of an item; in a database that is its number."""
        if not isinstance(self.index, Index):
            return f"{number_of(name):016x}"
        return digest(name.encode("utf-8", "surrogatepass"))[:16]

    def row_of(self, key: str) -> int | None:
        """Return the row of a key; None where there is none."""
        if isinstance(self.index, Index):
            return self.keys.get(key)
        return int(key, 16) if re.fullmatch("[0-7][0-9a-f]{15}", key) else None

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
        where: Condition | None = None,
        without: int | None = None,
    ) -> Found:
        """Return the k best of a vector (D,), leaving out item `without`.

        Of classes `only`, or of what passes a filter: the k nearest, without a verdict, which is
        about everything.
        """
        began = time.perf_counter()
        parts: list[Condition] = [] if where is None else [where]
        if only is not None:
            parts.append(Compare(LABEL, "in", tuple(self.classes[i] for i in only)))
        condition = Join(True, tuple(parts)) if parts else None
        found = self.searcher.search(query, k, where=condition, without=without)
        return replace(found, milliseconds=1000 * (time.perf_counter() - began))

    def likely(self, found: Found) -> Likely | None:
        """Return the class of most of the first neighbours; of equal ones the nearest."""
        labels = [item.label for item in self.index.items(found.rows[:VOTERS])]
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
        found = {n: float(stored[n]) for n in names if isinstance(stored.get(n), int | float)}
        return {name: score for name, score in found.items() if isfinite(score)}

    @cached_property
    def plane(self) -> Plane:
        """Where the map places vectors."""
        return lay_out(self.index.vectors_of(self.index.sample(ANCHORS)), self.proxies)

    def place(self, vectors: Tensor) -> NDArray[np.float32]:
        """Return where vectors lie on the map; the first call draws it and takes some seconds."""
        with self._drawing:
            plane = self.plane
        return plane.place(vectors)

    def mapped(self, matrix: Tensor, encoder: Encoder) -> "Shelf":
        """Return the shelf of a model that was taught by a map (D, D); its map stays as drawn."""
        index, proxies = self.own.mapped(matrix), mapped(self.proxies, matrix)
        searcher = self.searcher.of(index, encoder)
        new = replace(self, searcher=searcher, encoder=encoder, proxies=proxies, _drawing=Lock())
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


def open_shelf(
    path: Path,
    url: str | None = None,
    *,
    rerank: RerankMode = "auto",
    progress: Progress = silent,
) -> Shelf:
    """Open what `nofuss search` would search in, with the model and its proxies."""
    run, encoder = Run.open(path), load(path)
    kept = kept_embeddings(run, encoder)
    names: list[str] = []
    proxies = torch.empty(0, encoder.dim)
    if kept is not None and len(kept.proxies):
        proxies, names = _stars(kept, encoder)
    searchable = open_searchable(run, encoder, url, rerank=rerank, progress=progress)
    pictures = Pictures(searchable.sources) if encoder.preprocessing else None
    shelf = Shelf(run, searchable.title, searchable.searcher, encoder, pictures, proxies, names)
    _ = shelf.classes  # now, since a database may take its time
    return shelf


def _stars(kept: RunEmbeddings, encoder: Encoder) -> tuple[Tensor, list[str]]:
    """Return proxies spread evenly over all, and their classes if each class has one."""
    chosen = np.unique(np.linspace(0, len(kept.proxies) - 1, STARS).round().astype(np.int64))
    one_each = len(kept.proxies) == len(encoder.class_names)
    names = [encoder.class_names[i] if one_each else f"proxy {i}" for i in chosen]
    return torch.from_numpy(kept.proxies[chosen]), names
