"""Queries and the gallery they search, where the two are not the same: In-Shop style."""

from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from nofuss.data.collection import GALLERY, QUERY, Collection
from nofuss.encoder import Encoder
from nofuss.errors import DataError
from nofuss.evaluate.retrieval import Options


class Queries(NamedTuple):
    """What `evaluate` takes: embeddings, their classes, and the gallery with its classes."""

    embeddings: Tensor
    labels: NDArray[np.generic]
    options: Options


def among_themselves(found: Tensor, collection: Collection) -> Queries:
    """Every item a query to all others; or those marked query to those marked gallery."""
    labels = collection.labels
    assert labels is not None
    if collection.split is None or GALLERY not in collection.split:
        return Queries(found, labels, {})
    asking, searched = (np.flatnonzero(collection.split == side) for side in (QUERY, GALLERY))
    if not len(asking):
        raise DataError(f"{collection.name} marks a gallery but no query; add rows of split query")
    names = _names_of(collection)
    _check_shared(names[asking], names[searched])
    options: Options = {"gallery": found[searched], "gallery_labels": labels[searched]}
    return Queries(found[asking], labels[asking], options)


def within_gallery(
    found: Tensor, collection: Collection, gallery: Collection, encoder: Encoder, *, same: bool
) -> Queries:
    """All items as queries to another collection; `same` if it is the one they are from."""
    labels, others = _names_of(collection), _names_of(gallery)
    _check_shared(labels, others)
    rows = np.arange(len(labels)) if same else _rows_in(collection, gallery)
    differ = np.flatnonzero((rows >= 0) & (others[rows] != labels))
    if len(differ):
        i = differ[0]
        raise DataError(
            f"{collection.names[i]} is {labels[i]} as a query and {others[rows[i]]} in the "
            "gallery; give it the same class in both"
        )
    options: Options = {
        "gallery": found if same else encoder.embed_collection(gallery),
        "gallery_labels": others,
        "query_rows": rows,
    }
    return Queries(found, labels, options)


def _names_of(collection: Collection) -> NDArray[np.str_]:
    """The name of each item's class."""
    if collection.labels is None:
        raise DataError(f"{collection.name} has no labels, so that nothing says what is a hit")
    return np.asarray(collection.class_names)[collection.labels]


def _rows_in(collection: Collection, gallery: Collection) -> NDArray[np.int64]:
    """The row of each item in the gallery, −1 where its file is not there."""
    if not collection.paths or not gallery.paths:
        return np.full(len(collection), -1)
    place = {Path(path).resolve(): i for i, path in enumerate(gallery.paths)}
    return np.array([place.get(Path(path).resolve(), -1) for path in collection.paths])


def _check_shared(labels: NDArray[np.str_], others: NDArray[np.str_]) -> None:
    if not len(np.intersect1d(labels, others)):
        raise DataError(
            f"queries and gallery share no class ({labels[0]}, … and {others[0]}, …); "
            "name their classes alike"
        )
