"""The items that are indexed: any data that `nofuss train` reads, with a name for each item.

A picture is named by its absolute path, an item of an array by its file and row.
"""

import os
from dataclasses import replace
from pathlib import Path

import numpy as np

from nofuss.config import is_named_data
from nofuss.data.benchmarks import layout_of
from nofuss.data.collection import Collection, printable
from nofuss.data.folder import find_pictures
from nofuss.data.labelling import BY_FOLDER, Labelling, skipped_notes
from nofuss.data.usable import open_any
from nofuss.search.index import Label

BUILT_IN = "built-in characters"
UNLABELLED = ""
"""The class of pictures outside any class folder; no folder can have this name."""


def open_items(path: Path | None, labelling: Labelling = BY_FOLDER) -> Collection:
    """Open any data; pictures outside class folders belong to it too, without a label."""
    collection = open_any(path, labelling)
    if path is None or not (path := Path(os.path.expanduser(path))).is_dir() or layout_of(path):
        return collection
    path, known = path.absolute(), set(collection.paths)
    loose = [p for p in find_pictures(path) if p.parent == path and p not in known]
    if collection.labels is None or not loose:
        return collection
    indexed = {printable(p.relative_to(path)) for p in loose}
    skipped = tuple(entry for entry in collection.passed_over if entry[0] not in indexed)
    before = skipped_notes(collection.passed_over)
    return replace(
        collection,
        paths=[*collection.paths, *loose],
        labels=np.r_[collection.labels, np.full(len(loose), collection.num_classes)],
        class_names=(*collection.class_names, UNLABELLED),
        split=None,
        notes=(*skipped_notes(skipped), *(n for n in collection.notes if n not in before)),
        passed_over=skipped,
    )


def describe_items(collection: Collection) -> str:
    """Return the collection's line for the user; items without a label are not a class."""
    names = tuple(name for name in collection.class_names if name != UNLABELLED)
    if collection.labels is None or len(names) == collection.num_classes:
        return collection.describe()
    labels = np.zeros_like(collection.labels) if names else None  # only counted
    unlabelled = item_labels(collection).count(None)
    described = replace(collection, labels=labels, class_names=names).describe()
    return f"{described}; {unlabelled:,} without a label"


def item_names(collection: Collection, path: Path | None) -> list[str]:
    """Return the name of each item in an index: its absolute path, or its file and row."""
    if collection.kind == "pictures":
        return [str(picture.absolute()) for picture in collection.paths]
    source = source_of(path)
    return [f"{source}#{row}" for row in range(len(collection))]


def item_labels(collection: Collection) -> list[Label]:
    """Return the class name of each item, None for unlabelled ones."""
    if collection.labels is None:
        return [None] * len(collection)
    return [
        None if (name := collection.class_names[c]) == UNLABELLED else name
        for c in collection.labels.tolist()
    ]


def source_of(path: Path | None) -> str:
    """Return the name of the data at a path in an index."""
    if path is None:
        return BUILT_IN
    return str(path if is_named_data(path) else Path(os.path.expanduser(path)).absolute())
