"""Which items are for training and which for testing: by class, so that no test class is seen.

The paper's setting is zero-shot: the two sides share no class.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from nofuss.data.collection import TRAIN, Collection, first_five
from nofuss.errors import DataError

Indices = NDArray[np.int64]


class Split(NamedTuple):
    """Indices of the items on each side, ascending."""

    train: Indices
    test: Indices


def split_collection(
    collection: Collection, *, seed: int = 0, test_share: float = 0.5, allow_shared: bool = False
) -> Split:
    """The collection's own split where it has one, else `test_share` of the classes by seed.

    A class on both sides is refused unless `allow_shared`. Without labels all items are
    for training.
    """
    if collection.split is None:
        if collection.labels is None:
            return Split(np.arange(len(collection)), np.empty(0, dtype=np.int64))
        return split_classes(collection.labels, share=test_share, seed=seed)
    sides = Split(
        np.flatnonzero(collection.split == TRAIN), np.flatnonzero(collection.split != TRAIN)
    )
    for side, items in zip(sides._fields, sides, strict=True):
        if not len(items):
            raise DataError(f"{collection.name}: its own split has no items for {side}ing")
    if collection.labels is not None and not allow_shared:
        both = np.intersect1d(collection.labels[sides.train], collection.labels[sides.test])
        if len(both):
            names = first_five([collection.class_names[i] for i in both])
            raise DataError(
                f"{len(both):,} classes are in both train and test ({names}); "
                "keep each on one side, or pass --allow-shared"
            )
    return sides


def split_classes(labels: ArrayLike, *, share: float = 0.5, seed: int = 0) -> Split:
    """Hold out `share` of the classes, drawn by `seed`, with all their items.

    The share is rounded, with at least one class on each side.
    """
    labels = np.asarray(labels)
    classes = np.unique(labels)
    if len(classes) < 2:
        raise DataError(
            f"{len(classes)} class can't be split by class; at least two are needed, "
            "four to train and test"
        )
    if not 0 < share < 1:
        raise ValueError(f"share is {share}; expected a number between 0 and 1")
    count = min(max(round(share * len(classes)), 1), len(classes) - 1)
    held_out = np.random.default_rng(seed).permutation(classes)[:count]
    test = np.isin(labels, held_out)
    return Split(np.flatnonzero(~test), np.flatnonzero(test))


def hold_out(labels: ArrayLike, share: float, seed: int) -> Split:
    """Validation within the training side: `share` of its *classes*, never of its images."""
    return split_classes(labels, share=share, seed=seed)
