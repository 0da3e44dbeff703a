"""What a run is searched in, by `nofuss search` and on the page alike, and the pictures behind it.

That is the run's own index, which holds the trained pictures from the beginning and what `nofuss
index` added, or the database that the user names. The data are never opened for it.
"""

import re
from collections.abc import Iterable
from pathlib import Path

from PIL import Image

from nofuss.config import is_named_data
from nofuss.data.collection import Collection
from nofuss.data.decode import shrunk_item
from nofuss.data.items import place_of
from nofuss.data.open import open_data
from nofuss.errors import DataError, RunError, command
from nofuss.model.encoder import Encoder, load
from nofuss.model.saved import model_digest
from nofuss.run.directory import Run
from nofuss.search.engines import open_engine
from nofuss.search.folder import FolderIndex
from nofuss.search.index import BUILT_IN, About, Index

ARRAYS = (".npz", ".safetensors")
_ROW = re.compile("[0-9]{1,18}")
SIDE = 224
"""Longest side of a picture on the page, and of one from an array."""


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
            self._opened[source] = _open_array(source)
        collection = self._opened[source]
        if collection is None or int(row) >= len(collection):
            return None
        return shrunk_item(collection, int(row), side=SIDE)


def _open_array(source: str) -> Collection | None:
    """Open the array that an index is from; None for anything else, which may cost anything."""
    path = Path(source)
    if source == BUILT_IN:
        return open_data(None)
    if not is_named_data(path) and path.suffix.lower() not in ARRAYS:
        return None
    try:
        collection = open_data(path)
    except DataError:
        return None
    return None if collection.array is None else collection


def open_searchable(run: Run, url: str | None = None) -> tuple[Encoder, Index]:
    """Open a run's model, as it was trained, and its index, or the one in the database at a URL."""
    while True:
        encoder = load(run.path, feedback=False)
        try:
            return encoder, _open(run, encoder, url)
        except RunError:  # has another command just replaced the model?
            if model_digest(run.model) == encoder.digest:
                raise


def _open(run: Run, encoder: Encoder, url: str | None) -> Index:
    index: Index
    if url is not None:
        index = open_engine(url, flag="--index", wanted=About(encoder.digest, encoder.dim))
        cure = "nofuss index RUN DIR --to URL"
    else:
        index = FolderIndex.open(run.index, encoder.digest)
        cure = f"{command('nofuss', 'index', run.path)} DIR"
        if index.about.dim != encoder.dim:
            raise RunError(
                f"{index.place} holds vectors of {index.about.dim} dimensions, but the model gives "
                f"{encoder.dim}; delete the folder and make it again: {cure}"
            )
    if not index.count():
        index.close()
        raise DataError(f"the index in {index.place} is empty; add pictures: {cure}")
    return index
