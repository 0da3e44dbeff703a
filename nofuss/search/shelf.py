"""What the page shows: an index, the pictures of its items, the model, and a map.

See searchable.py for which index that is.
"""

import time
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

from nofuss.files import read_json
from nofuss.model.encoder import Encoder
from nofuss.run.directory import Run
from nofuss.run.proxies import load_proxies
from nofuss.search.filter import LABEL, Compare, Condition, Join
from nofuss.search.folder import FolderIndex
from nofuss.search.index import Index, key_of
from nofuss.search.plane import ANCHORS, Plane, lay_out
from nofuss.search.refusals import Refused
from nofuss.search.search import Answer, codes_of, search
from nofuss.search.searchable import Pictures, open_searchable

STARS = 100
"""Most proxies on the map."""
ON_MAP = 20_000
"""Most items on the map."""
COUNT_SECONDS = 60


@dataclass
class Shelf:
    """An index with everything the page shows of it."""

    run: Run
    title: str
    index: Index
    encoder: Encoder
    rerank: bool
    pictures: Pictures | None
    """None where the items are vectors."""
    proxies: Tensor
    proxy_names: list[str]
    _drawing: Lock = field(default_factory=Lock)
    _size: int = 0
    _counted: float = -inf

    def picture(self, name: str) -> Path | Image.Image | None:
        """Return an item's picture, or the file that holds it, or None where there is none."""
        return None if self.pictures is None else self.pictures[name]

    @property
    def own(self) -> FolderIndex:
        """The run's own index; refused where the page searches in a database."""
        if isinstance(self.index, FolderIndex):
            return self.index
        raise Refused(409, "this needs the run's own index; open the page without --index")

    @property
    def size(self) -> int:
        """Number of items; counted again every minute, as a database counts one by one."""
        if time.monotonic() > self._counted + COUNT_SECONDS:
            self._size, self._counted = self.index.count(), time.monotonic()
        return self._size

    @property
    def threshold(self) -> float | None:
        """Distance within which items of one class mostly lie; None if that could not be found."""
        open_set = self.index.about.open_set
        return None if open_set is None or not open_set.useful else open_set.distance

    @cached_property
    def classes(self) -> list[str]:
        """Names of the classes, sorted."""
        labels = self.index.labels if isinstance(self.index, FolderIndex) else None
        found = labels or (item.label for item in self.index.items())
        return sorted({label for label in found if label is not None})

    @cached_property
    def codes(self) -> NDArray[np.int64]:
        """(N,) positions in `classes`; −1 without a label."""
        return codes_of(self.own.labels)

    @property
    def model(self) -> str:
        """The model's checksum."""
        return self.encoder.digest

    @property
    def taught(self) -> int:
        """How many marks have taught the model since its training."""
        return self.index.manifest.feedback if isinstance(self.index, FolderIndex) else 0

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
        without: str | None = None,
    ) -> Answer:
        """Return the k best of a vector (D,), leaving out item `without`.

        Of classes `only`, or of what passes a filter: the k nearest, without a verdict, which is
        about everything.
        """
        parts: list[Condition] = [] if where is None else [where]
        if only is not None:
            parts.append(Compare(LABEL, "in", tuple(self.classes[i] for i in only)))
        condition = Join(True, tuple(parts)) if parts else None
        return search(
            self.index,
            self.encoder,
            query,
            k,
            where=condition,
            without=without,
            rerank=self.rerank,
        )

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
        return lay_out(self.vectors_of(self.index.sample(ANCHORS)), self.proxies)

    def vectors_of(self, names: Sequence[str]) -> Tensor:
        """Return the vectors (n, D) of those items that are there."""
        items = self.index.get(names, vectors=True)
        found = [v for item in items if (v := item.vector) is not None]
        return torch.stack(found) if found else torch.empty(0, self.encoder.dim)

    def place(self, vectors: Tensor) -> NDArray[np.float32]:
        """Return where vectors lie on the map; the first call draws it and takes some seconds."""
        with self._drawing:
            plane = self.plane
        return plane.place(vectors)

    def of(self, index: FolderIndex) -> "Shelf":
        """Return the shelf of the same items under another map; the drawn map stays."""
        new = replace(self, index=index, _drawing=Lock())
        new.__dict__ |= {n: self.__dict__[n] for n in {"plane", "map"} & self.__dict__.keys()}
        return new

    @property
    def drawn(self) -> bool:
        """Whether the map has been drawn."""
        return "plane" in self.__dict__

    @cached_property
    def map(self) -> dict[str, Any]:
        """The page's map: keys, x, y and class of the items; x, y and name of the proxies."""
        items = self.index.get(self.index.sample(ON_MAP), vectors=True)
        places = self.place(torch.stack([v for item in items if (v := item.vector) is not None]))
        code = {name: i for i, name in enumerate(self.classes)}
        labels = [item.label for item in items]
        stars = self.place(self.proxies)
        return {
            "items": [key_of(item.name) for item in items],
            "places": places.astype(np.float64).round(4).reshape(-1).tolist(),
            "classes": [-1 if label is None else code.get(label, -1) for label in labels],
            "stars": stars.astype(np.float64).round(4).reshape(-1).tolist(),
            "star_names": self.proxy_names,
        }


def open_shelf(path: Path, url: str | None = None, *, rerank: bool = True) -> Shelf:
    """Open what `nofuss search` would search in, with the model and its proxies."""
    run = Run.open(path)
    encoder, index = open_searchable(run, url)
    proxies, names = _stars(run, encoder)
    title = "the index of this run" if url is None else index.place
    pictures = Pictures(index.about.sources) if encoder.preprocessing else None
    shelf = Shelf(run, title, index, encoder, rerank, pictures, proxies, names)
    _ = shelf.classes  # now, since a database may take its time
    return shelf


def _stars(run: Run, encoder: Encoder) -> tuple[Tensor, list[str]]:
    """Return proxies spread evenly over all, and their classes if each class has one."""
    proxies = load_proxies(run.path, encoder.digest, encoder.dim).proxies
    if not len(proxies):
        return torch.empty(0, encoder.dim), []
    chosen = np.unique(np.linspace(0, len(proxies) - 1, STARS).round().astype(np.int64))
    one_each = len(proxies) == len(encoder.class_names)
    names = [encoder.class_names[i] if one_each else f"proxy {i}" for i in chosen]
    return torch.from_numpy(proxies[chosen]), names
