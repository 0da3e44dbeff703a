"""Which items are for training, for validation and for testing: split by class.

The paper's setting is zero-shot: no class is in two of them. Data without classes are split by
groups of linked items, or by single triplets (triplets.py).
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from nofuss.config import Settings
from nofuss.data.collection import TRAIN, Collection, first_five
from nofuss.data.open import TrainingData
from nofuss.data.triplets import NO_LABEL
from nofuss.errors import DataError, UsageError

Rows = NDArray[np.int64]
NOTHING: Rows = np.empty(0, dtype=np.int64)
LEAST_CLASSES = 8
"""Training classes from which on some are held out for validation."""
FEWEST_CLASSES = 4
"""With fewer, two folds can't have two classes each, and none are kept for testing by default."""


@dataclass(frozen=True, eq=False)
class Split:
    """Rows of the collection, ascending; val and test may be empty."""

    train: Rows
    val: Rows
    """Training classes held out to monitor training."""
    test: Rows
    by_folds: bool = False
    """Whether every class is trained on, and scored by a model that has not seen it."""


def split_of(data: TrainingData, settings: Settings) -> Split:
    """Split as the resolved settings say: test classes, and training classes for validation."""
    collection, fraction = data.collection, settings.test_fraction
    if data.groups is not None:
        return _split_by_comparisons(data, data.groups, settings)
    if collection.split is not None and fraction:
        raise UsageError(
            f"{collection.name} has a split already, so --test-fraction {fraction:g} can't apply; "
            "leave it out (0 trains on all)"
        )
    train, test = np.arange(len(collection)), NOTHING
    few = collection.num_classes < FEWEST_CLASSES
    by_default = fraction is None and collection.split is None
    # A head on fixed features takes seconds, so that every class can be held out in turn.
    by_folds = by_default and settings.is_fixed and settings.start == "whitened" and not few
    if fraction != 0 and not by_folds and not (by_default and few):
        train, test = split_collection(
            collection,
            seed=settings.seed,
            test_fraction=0.5 if fraction is None else fraction,
            allow_shared=settings.allow_shared,
        )
    if len(classes_in(collection, train)) < 2:
        cure = "add classes, or lower --test-fraction" if fraction else "add classes"
        raise DataError(
            f"{collection.name} has one class to train on; training needs two or more: {cure}"
        )
    return Split(*_with_val(collection, train, settings), test, by_folds)


def _split_by_comparisons(data: TrainingData, groups: Rows, settings: Settings) -> Split:
    """Hold out whole groups of linked items; where none can be believed, items of single triplets.

    Items that nothing is alike to are not trained on as groups; as negatives of others they count.
    """
    if not (groups != NO_LABEL).any():
        assert data.comparisons is not None
        return Split(np.arange(len(groups)), NOTHING, np.unique(data.comparisons.items))
    count, fraction = int(groups.max()) + 1, float(settings.test_fraction or 0)
    number = max(1, round(fraction * count)) if fraction else 0
    held_out = np.random.default_rng(settings.seed).permutation(count)[:number]
    if count - number < 2:
        raise DataError(
            f"{data.collection.name} has {count} groups of linked items, and {number} of them are "
            "held out; training needs two or more: lower --test-fraction"
        )
    is_test = np.isin(groups, held_out)
    test = np.flatnonzero(is_test)
    if not data.collection.is_labelled:
        return Split(np.flatnonzero(~is_test), NOTHING, test)
    train = np.flatnonzero(~is_test & (groups != NO_LABEL))
    return Split(*_with_val(data.collection, train, settings), test)


def _with_val(collection: Collection, train: Rows, settings: Settings) -> tuple[Rows, Rows]:
    """Hold out the configured fraction of the training classes, two at least: one can't be scored.

    None where there are fewer than LEAST_CLASSES.
    """
    fraction, count = float(settings.val_fraction or 0), len(classes_in(collection, train))
    if not fraction or count < LEAST_CLASSES:
        return train, NOTHING
    labels = collection.labels[train]
    rest, val = split_classes(labels, fraction=max(fraction, 2 / count), seed=settings.seed)
    return train[rest], train[val]


def classes_in(collection: Collection, rows: Rows) -> Rows:
    """Return the classes of these rows, ascending."""
    labels = collection.labels[rows]
    return np.unique(labels[labels != NO_LABEL])


def split_collection(
    collection: Collection, *, seed: int = 0, test_fraction: float = 0.5, allow_shared: bool = False
) -> tuple[Rows, Rows]:
    """Return rows to train and to test on: the collection's own split, else one drawn by `seed`.

    A class in both is refused unless `allow_shared`.
    """
    if collection.split is None:
        labels = collection.known_labels()
        return split_classes(labels, fraction=test_fraction, seed=seed)
    is_train = collection.split == TRAIN
    train, test = np.flatnonzero(is_train), np.flatnonzero(~is_train)
    for rows, purpose in ((train, "training"), (test, "testing")):
        if not len(rows):
            raise DataError(f"{collection.name}: its split has no items for {purpose}")
    shared = np.intersect1d(classes_in(collection, train), classes_in(collection, test))
    if len(shared) and not allow_shared:
        names = first_five([collection.class_names[i] for i in shared])
        raise DataError(
            f"{len(shared):,} classes are in both train and test ({names}); "
            "keep each on one side, or pass --allow-shared"
        )
    return train, test


def split_classes(labels: ArrayLike, *, fraction: float = 0.5, seed: int = 0) -> tuple[Rows, Rows]:
    """Return the rows to keep, and those of a `fraction` of the classes, held out as a whole.

    They are drawn by `seed`; the fraction is rounded, with at least one class on each side.
    """
    labels = np.asarray(labels)
    classes = np.unique(labels)
    if len(classes) < 2:
        raise DataError(
            f"{len(classes)} class can't be split by class; at least two are needed, "
            "four to train and test"
        )
    if not 0 < fraction < 1:
        raise ValueError(f"fraction is {fraction}; expected a number between 0 and 1")
    count = min(max(round(fraction * len(classes)), 1), len(classes) - 1)
    held_out = np.random.default_rng(seed).permutation(classes)[:count]
    is_held_out = np.isin(labels, held_out)
    return np.flatnonzero(~is_held_out), np.flatnonzero(is_held_out)
