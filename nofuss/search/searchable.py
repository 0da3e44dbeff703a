"""What a run is searched in, by `nofuss search` and on the page alike, and the pictures behind it.

That is the run's index, or the database that the user names. A run without an index is searched in
its test items (all of its items where no classes were kept for testing), whose embeddings training
has left; nothing is written.
"""

import logging
import re
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from nofuss.config import is_named_data
from nofuss.data.collection import Collection
from nofuss.data.decode import shrunk_item
from nofuss.data.items import place_of
from nofuss.data.open import TrainingData, open_data, open_training_data
from nofuss.data.split import split_of
from nofuss.errors import DataError, RunError, command
from nofuss.files import read_bytes
from nofuss.model.encoder import Encoder
from nofuss.model.saved import model_digest
from nofuss.progress import Progress, silent
from nofuss.run.directory import Run
from nofuss.run.embeddings import FILE, RunEmbeddings, load_embeddings
from nofuss.search.engines import open_engine
from nofuss.search.folder import FolderIndex, holds_index
from nofuss.search.index import About, Index
from nofuss.search.search import calibrated

log = logging.getLogger("nofuss")
NOTE = "embeddings-of"
"""The file of RUN/taught that says which model the kept embeddings are of."""
ARRAYS = (".npz", ".safetensors")
_ROW = re.compile("[0-9]{1,18}")
BUILT_IN = "built-in characters"
"""The source of the items that come with the package."""
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


def open_searchable(
    run: Run, encoder: Encoder, url: str | None = None, *, progress: Progress = silent
) -> tuple[str, Index]:
    """Open the index at a URL, or the run's, or build one of its test items; what it is called."""
    if url is not None:
        wanted = About(model_digest(run.model), encoder.dim)
        index = open_engine(url, flag="--index", wanted=wanted)
        if not index.count():
            index.close()
            raise DataError(f"the index in {index.place} is empty")
        return index.place, index
    if not holds_index(run.path / "index"):
        title, items = _test_items(run, encoder, progress)
        log.info(
            f"no index yet: searching {title}; for other pictures: "
            f"{command('nofuss', 'index', run.path)} DIR"
        )
        return title, items
    own = open_own_index(run, encoder)
    if not len(own):
        raise DataError(
            f"{own.place} is empty; add pictures: {command('nofuss', 'index', run.path)} DIR"
        )
    return "the index of this run", own


def open_own_index(run: Run, encoder: Encoder) -> FolderIndex:
    """Load the run's index; RunError where there is none, or one of another model."""
    index = FolderIndex.load(run.path / "index")
    if index.about.model != model_digest(run.model):
        raise RunError(
            f"{index.place} was made by another model than {run.model}; update it: "
            + "; ".join(command("nofuss", "index", run.path, of) for of in index.about.sources)
        )
    if index.about.dim != encoder.dim:
        raise RunError(
            f"{index.place} holds vectors of {index.about.dim} dimensions, but the model gives "
            f"{encoder.dim}; delete the folder and make it again: "
            f"{command('nofuss', 'index', run.path)} DIR"
        )
    return index


def kept_embeddings(run: Run, encoder: Encoder) -> RunEmbeddings | None:
    """Load what training left, and refuse another model's."""
    kept = load_embeddings(run.path) if embeddings_fit(run) else None
    if kept is not None and kept.test.shape[1] != encoder.dim:
        raise RunError(
            f"{run.path / FILE} holds vectors of {kept.test.shape[1]} dimensions, but the model "
            f"gives {encoder.dim}; delete it or train again"
        )
    return kept


def embeddings_fit(run: Run) -> bool:
    """Return whether the kept embeddings are of the model; not where a lesson was killed."""
    note = run.path / "taught" / NOTE  # see lessons.py
    return not note.is_file() or read_bytes(note) == model_digest(run.model).encode()


def _test_items(run: Run, encoder: Encoder, progress: Progress) -> tuple[str, Index]:
    # Here: what reads an index does not need what writes one.
    from nofuss.search.update import items_of, source_of

    kept, data = kept_embeddings(run, encoder), run.own_data
    opened = open_training_data(data, run.config, corrections=run.corrections, progress=progress)
    collection = opened.collection
    rows, vectors = _test_vectors(run, encoder, kept, opened, progress)
    items = items_of(collection, data)
    _, firsts = np.unique([items[row].name for row in rows], return_index=True)
    firsts = np.sort(firsts)  # a list may name a file twice, names of an index are unique
    types = {name: column.type for name, column in collection.columns.items()}
    index = FolderIndex(About(model_digest(run.model), encoder.dim, {source_of(data): types}))
    found = zip(rows[firsts], torch.from_numpy(vectors[firsts]), strict=True)
    index.put([items[row]._replace(vector=vector) for row, vector in found])
    index.commit(calibrated(index, encoder))
    only_test = len(firsts) < len(collection)
    side = "test classes" if collection.has_classes else "test items"
    return f"{collection.name}, {side}" if only_test else collection.name, index


def _test_vectors(
    run: Run,
    encoder: Encoder,
    kept: RunEmbeddings | None,
    opened: TrainingData,
    progress: Progress,
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Return the rows of the test items, or of all items if there are none, and their vectors."""
    collection = opened.collection
    same = kept is not None and kept.fingerprint == opened.fingerprint
    if kept is not None and same and len(kept.test):
        if kept.test_rows.max() >= len(collection):
            raise RunError(f"{run.path / FILE} names items that are not in the data; delete it")
        return kept.test_rows, kept.test
    rows = split_of(opened, run.config).test
    if not len(rows):
        rows = np.arange(len(collection))
    if not len(rows):
        raise DataError(f"{collection.name} is empty, so there is nothing to search in")
    vectors = encoder.embed_collection(collection.subset(rows), progress=progress)
    return rows, vectors.numpy()
