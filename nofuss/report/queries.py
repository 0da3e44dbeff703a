"""Who searches where: items among each other, or queries in a gallery, of their data or others."""

from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from nofuss.data.collection import GALLERY, QUERY, Collection
from nofuss.data.split import Rows
from nofuss.errors import DataError
from nofuss.evaluate.protocol import Scores, evaluate
from nofuss.evaluate.side_by_side import KS
from nofuss.evaluate.task import Options
from nofuss.model.encoder import Encoder
from nofuss.progress import Progress, silent


class Queries(NamedTuple):
    """Arguments of `evaluate`: embeddings, their classes, and the gallery with its classes."""

    embeddings: Tensor
    labels: NDArray[np.generic]
    options: Options


def among_themselves(vectors: Tensor, collection: Collection) -> Queries:
    """Search every item among all others, or items marked query among those marked gallery."""
    labels = collection.labels
    assert labels is not None
    if (sides := query_and_gallery(collection)) is None:
        return Queries(vectors, labels, {})
    query_rows, gallery_rows = sides
    options: Options = {"gallery": vectors[gallery_rows], "gallery_labels": labels[gallery_rows]}
    return Queries(vectors[query_rows], labels[query_rows], options)


def query_and_gallery(collection: Collection) -> tuple[Rows, Rows] | None:
    """Return the rows marked query and gallery; None if there are none, DataError if not both."""
    if collection.split is None or GALLERY not in collection.split:
        return None
    query_rows, gallery_rows = (
        np.flatnonzero(collection.split == side) for side in (QUERY, GALLERY)
    )
    if not len(query_rows):
        raise DataError(
            f"{collection.name} has rows of split gallery but none of split query; add some"
        )
    names = _names_of(collection)
    _check_shared(names[query_rows], names[gallery_rows])
    return query_rows, gallery_rows


def score_all(
    embeddings: dict[str, Tensor],
    collection: Collection,
    *,
    seed: int,
    progress: Progress = silent,
) -> dict[str, Scores]:
    """Return the scores of each set of embeddings of a collection, searched `among_themselves`."""
    found = {}
    for name, vectors in embeddings.items():
        queries, labels, options = among_themselves(vectors, collection)
        found[name] = evaluate(queries, labels, ks=KS, seed=seed, progress=progress, **options)
    return found


def within_gallery(
    vectors: Tensor,
    collection: Collection,
    gallery: Collection,
    encoder: Encoder,
    *,
    same: bool,
    progress: Progress = silent,
) -> Queries:
    """Search all items in another collection; `same` says that it is their own."""
    labels, others = _names_of(collection), _names_of(gallery)
    _check_shared(labels, others)
    rows = np.arange(len(labels)) if same else _rows_in(collection, gallery)
    relabelled = np.flatnonzero((rows >= 0) & (others[rows] != labels))
    if len(relabelled):
        i = relabelled[0]
        raise DataError(
            f"{collection.names[i]} is {labels[i]} as a query and {others[rows[i]]} in the "
            "gallery; give it the same class in both"
        )
    options: Options = {
        "gallery": vectors if same else encoder.embed_collection(gallery, progress=progress),
        "gallery_labels": others,
        "query_rows": rows,
    }
    return Queries(vectors, labels, options)


def _names_of(collection: Collection) -> NDArray[np.str_]:
    """Return the name of each item's class."""
    if collection.labels is None:
        raise DataError(f"{collection.name} has no labels, so hits can't be counted; add labels")
    return np.asarray(collection.class_names)[collection.labels]


def _rows_in(collection: Collection, gallery: Collection) -> NDArray[np.int64]:
    """Return the row of each item in the gallery, −1 where its file is not in it."""
    if not collection.paths or not gallery.paths:
        return np.full(len(collection), -1)
    place = {Path(path).resolve(): i for i, path in enumerate(gallery.paths)}
    return np.array([place.get(Path(path).resolve(), -1) for path in collection.paths])


def _check_shared(labels: NDArray[np.str_], others: NDArray[np.str_]) -> None:
    if not len(np.intersect1d(labels, others)):
        raise DataError(
            f"queries and gallery share no class ({labels[0]}, … and {others[0]}, …); "
            "give the same class the same name in both"
        )
