"""What the page shows at one moment: an index, the model, and what people said of both.

A state never changes. A handler reads it once; whoever learns or corrects makes a new one and
replaces it by one assignment, so that no answer is made of two states.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from PIL import Image
from torch import Tensor

from nofuss.config import is_named_data
from nofuss.data.collection import Collection
from nofuss.data.decode import shrunk_item
from nofuss.data.items import place_of
from nofuss.data.open import open_data
from nofuss.errors import DataError
from nofuss.files import read_json
from nofuss.model.encoder import Encoder
from nofuss.run.directory import Run
from nofuss.run.proxies import load_proxies
from nofuss.search.feedback import Feedback, corrected
from nofuss.search.filter import Condition
from nofuss.search.folder import FolderIndex
from nofuss.search.index import BUILT_IN, SAMPLED, Index, vectors_of
from nofuss.search.page.map import ANCHORS, SHOWN, Plane, lay_out, map_of, stars_of
from nofuss.search.search import Answer, open_search, search
from nofuss.search.verdict import Query

SIDE = 224
"""Longest side of a picture on the page."""
ARRAYS = (".npz", ".safetensors")
_ROW = re.compile("[0-9]{1,18}")


class Pictures:
    """The pictures behind the names of items."""

    def __init__(self, sources: Iterable[str]) -> None:
        self._sources = set(sources)
        self._opened: dict[str, Collection | None] = {}

    def __getitem__(self, name: str) -> Path | Image.Image | None:
        """Return a picture's file, or its pixels where it is a row of an array, or None.

        Only arrays among the given sources are opened, each once: names are a stranger's words.
        """
        source, _, row = name.rpartition("#")
        if place_of(Path(name)) or source not in self._sources or not _ROW.fullmatch(row):
            return Path(name)
        if source not in self._opened:
            self._opened[source] = self._open(Path(source))
        collection = self._opened[source]
        if collection is None or collection.array is None or int(row) >= len(collection):
            return None
        return shrunk_item(collection, int(row), side=SIDE)

    def _open(self, source: Path) -> Collection | None:
        is_built_in = str(source) == BUILT_IN
        if not is_built_in and not is_named_data(source) and source.suffix.lower() not in ARRAYS:
            return None
        try:
            return open_data(None if is_built_in else source)
        except DataError:
            return None


class Base:
    """What follows from the items and the model alone, whatever people say of them."""

    def __init__(self, run: Run, encoder: Encoder, index: Index) -> None:
        self.encoder, self.index = encoder, index
        proxies = load_proxies(run.path, encoder.digest, encoder.dim).proxies
        # Others need not have the classes of their places, even where there are as many.
        is_by_class = run.config.assignment == "static"
        self.stars = stars_of(proxies, encoder.class_names if is_by_class else ())

    @cached_property
    def classes(self) -> list[str]:
        """Names of the classes in the data, sorted; corrections name no others.

        In a database those of a sample: it may have millions of items, which others add to.
        """
        if isinstance(self.index, FolderIndex):
            return self.index.classes
        labels = {item.label for item in self.index.get(self.index.sample(SAMPLED))}
        return sorted(label for label in labels if label is not None)

    @cached_property
    def pictures(self) -> Pictures:
        """Those of the items."""
        return Pictures(self.index.about.sources)

    @cached_property
    def plane(self) -> Plane:
        """Where the map places vectors; the first who asks waits for some seconds."""
        return lay_out(self.vectors_of(self.index.sample(ANCHORS)), self.stars.vectors)

    @property
    def is_drawn(self) -> bool:
        """Whether the map has been drawn."""
        return "plane" in vars(self)

    def vectors_of(self, names: Sequence[str]) -> Tensor:
        """Return the vectors (n, D) of those items that are there, as the model was trained."""
        return vectors_of(self.index.get(names, vectors=True), self.encoder.dim)

    def matching(self, words: str) -> list[int]:
        """Return the classes that are named so, else those whose name contains the words."""
        if words in self.classes:
            return [self.classes.index(words)]
        part = words.casefold().strip()
        return [i for i, name in enumerate(self.classes) if part in name.casefold()]


@dataclass(frozen=True, eq=False)
class State:
    """Everything that an answer is made of."""

    run: Run
    url: str | None
    """Of the database that is searched; None for the run's own index."""
    rerank: bool
    encoder: Encoder
    """As it was trained: what it gives is valid in every state of this model."""
    stored: Index
    """As it is on disk, with what was learned in force."""
    feedback: Feedback
    base: Base
    """Shared by all states of these items."""

    @cached_property
    def index(self) -> Index:
        """What is searched: the stored index with corrected labels."""
        return corrected(self.stored, self.feedback)

    @property
    def version(self) -> str:
        """The name of this state: two answers of one version are made of the same."""
        changes = self.stored.manifest.version if isinstance(self.stored, FolderIndex) else 0
        return f"{self.encoder.digest[:16]}-{changes}-{len(self.feedback.lines)}"

    @property
    def title(self) -> str:
        """What is searched."""
        return "The index of this run" if self.url is None else self.stored.place

    @property
    def scores(self) -> dict[str, float]:
        """Recall@1 and MAP@R of the run's last evaluation; empty where there is none."""
        try:
            stored = read_json(self.run.path / "scores.json")
        except (OSError, ValueError):
            return {}
        found = {name: stored.get(name) for name in ("recall@1", "map@r")}
        return {n: s for n, s in found.items() if isinstance(s, float) and 0 <= s <= 1}

    def search(
        self, query: Query, k: int, where: Condition | None = None, *, without: str | None = None
    ) -> Answer:
        """Return the k best of a query, among all items or those that pass a filter."""
        options: dict[str, Any] = {"where": where, "without": without, "rerank": self.rerank}
        return search(self.index, self.encoder, query, k, **options)

    def picture(self, name: str) -> Path | Image.Image | None:
        """Return an item's picture, or the file that holds it; None where there is none."""
        return self.base.pictures[name] if self.encoder.preprocessing else None

    @cached_property
    def map(self) -> dict[str, Any]:
        """The page's map."""
        items, base = self.index.get(self.index.sample(SHOWN), vectors=True), self.base
        vectors = vectors_of(items, self.encoder.dim)
        return map_of(base.plane, items, vectors, base.stars, base.classes)


def open_state(run: Run, url: str | None = None, *, rerank: bool = True) -> State:
    """Open what `nofuss search` would search in, with the model and its proxies."""
    found = open_search(run, url)
    encoder, stored = found.encoder, found.stored
    return State(run, url, rerank, encoder, stored, found.feedback, Base(run, encoder, stored))
