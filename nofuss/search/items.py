"""The items that are indexed: any data that `nofuss train` reads, with a name for each item.

A picture is named by its absolute path, an item of an array by its file and row.
"""

import os
from dataclasses import replace
from pathlib import Path

import numpy as np

from nofuss.config import is_named_data
from nofuss.data.collection import Collection, printable
from nofuss.data.open import open_any
from nofuss.data.readers.benchmarks import layout_of
from nofuss.data.readers.folder import BY_FOLDER, Labelling, find_pictures, skipped_notes
from nofuss.data.triplets import NO_LABEL
from nofuss.search.index import Label

BUILT_IN = "built-in characters"


def open_items(path: Path | None, labelling: Labelling = BY_FOLDER) -> Collection:
    """Open any data; pictures outside class folders belong to it too, without a label."""
    collection = open_any(path, labelling)
    if path is None or not (path := Path(os.path.expanduser(path))).is_dir() or layout_of(path):
        return collection
    path, known = path.absolute(), set(collection.paths)
    loose = [p for p in find_pictures(path) if p.parent == path and p not in known]
    if not collection.has_classes or not loose:
        return collection
    indexed = {printable(p.relative_to(path)) for p in loose}
    skipped = tuple(entry for entry in collection.skipped if entry[0] not in indexed)
    before = skipped_notes(collection.skipped)
    return replace(
        collection,
        paths=[*collection.paths, *loose],
        labels=np.r_[collection.labels, np.full(len(loose), NO_LABEL)],
        split=None,
        notes=(*skipped_notes(skipped), *(n for n in collection.notes if n not in before)),
        skipped=skipped,
    )


def item_names(collection: Collection, path: Path | None) -> list[str]:
    """Return the name of each item in an index: its absolute path, or its file and row."""
    if collection.kind == "pictures":
        return [str(picture.absolute()) for picture in collection.paths]
    source = source_of(path)
    return [f"{source}#{row}" for row in range(len(collection))]


def item_labels(collection: Collection) -> list[Label]:
    """Return the class name of each item, None for those without a class."""
    if not collection.has_classes:
        return [None] * len(collection)
    names = collection.class_names
    return [None if label == NO_LABEL else names[label] for label in collection.labels.tolist()]


def source_of(path: Path | None) -> str:
    """Return the name of the data at a path in an index."""
    if path is None:
        return BUILT_IN
    return str(path if is_named_data(path) else Path(os.path.expanduser(path)).absolute())
