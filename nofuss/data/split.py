"""Which items are for training and which for testing: split by class.

The paper's setting is zero-shot: the two sides have no class in common.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from nofuss.config import TrainConfig
from nofuss.data.collection import TRAIN, Collection, first_five
from nofuss.data.comparisons import as_groups, split_comparisons
from nofuss.errors import DataError, UsageError

Rows = NDArray[np.int64]
LEAST_CLASSES = 8
"""Training classes from which on some are held out."""
FEWEST_CLASSES = 4
"""With fewer, two folds can't have two classes each."""


class Split(NamedTuple):
    """Rows of the items on each side, ascending."""

    train: Rows
    test: Rows


@dataclass(frozen=True)
class Sides:
    """Rows of the collection, with no class in common; held_out and test may be empty."""

    train: Rows
    held_out: Rows
    """Training classes held out to monitor training."""
    test: Rows


def by_folds(config: TrainConfig, collection: Collection) -> bool:
    """Return whether every class is trained on, and scored by a model that has not seen it.

    That is the default on fixed features, where training takes seconds, unless the data or the
    user reserve classes for testing.
    """
    return bool(
        config.test_fraction is None
        and collection.split is None
        and collection.num_classes >= FEWEST_CLASSES
        and config.preset in ("frozen", "vectors")
        and (config.folds or config.untrained)
    )


def sides_of(collection: Collection, config: TrainConfig) -> Sides:
    """Split as configured: test classes, and training classes that are held out."""
    nothing = np.empty(0, dtype=np.int64)
    everything = np.arange(len(collection))
    if collection.labels is None or collection.by_links:
        return _sides_by_comparisons(collection, config)
    train_rows, test = everything, nothing
    if collection.split is not None and config.test_fraction:
        raise UsageError(
            f"{collection.name} has a split already, so --test-fraction {config.test_fraction:g} "
            "can't apply; leave it out (0 trains on all)"
        )
    if config.test_fraction != 0 and not by_folds(config, collection):
        share = 0.5 if config.test_fraction is None else config.test_fraction
        train_rows, test = split_collection(
            collection,
            seed=config.seed,
            test_fraction=share,
            allow_shared=config.allow_shared,
        )
    if len(classes_in(collection, train_rows)) < 2:
        raise DataError(
            f"{collection.name} has one class to train on; training needs two or more: add classes"
            + ("" if collection.split is not None else ", or lower --test-fraction")
        )
    return _with_held_out(collection.labels, train_rows, test, config)


def _with_held_out(labels: Rows, train_rows: Rows, test: Rows, config: TrainConfig) -> Sides:
    """Hold out the configured share of the training classes, two at least: one can't be scored.

    None where there are fewer than LEAST_CLASSES.
    """
    share, classes = float(config.val_fraction or 0), len(np.unique(labels[train_rows]))
    if not share or classes < LEAST_CLASSES:
        return Sides(train_rows, np.empty(0, dtype=np.int64), test)
    inner = hold_out(labels[train_rows], max(share, 2 / classes), config.seed)
    return Sides(train_rows[inner.train], train_rows[inner.test], test)


def _sides_by_comparisons(collection: Collection, config: TrainConfig) -> Sides:
    """Split data without labels by their triplets or pairs; all are for training without any."""
    nothing = np.empty(0, dtype=np.int64)
    if collection.triplets is None and collection.pairs is None:
        return Sides(np.arange(len(collection)), nothing, nothing)
    balanced, share = config.assignment == "balanced", float(config.test_fraction or 0)
    train, test = split_comparisons(collection, share, config.seed, linked_only=balanced)
    labels = as_groups(collection).labels
    assert labels is not None
    return _with_held_out(labels, train, test, config) if balanced else Sides(train, nothing, test)


def classes_in(collection: Collection, rows: Rows) -> Rows:
    """Return the classes of these rows, ascending."""
    if collection.labels is None:
        return np.empty(0, dtype=np.int64)
    return np.unique(collection.labels[rows])


def split_collection(
    collection: Collection, *, seed: int = 0, test_fraction: float = 0.5, allow_shared: bool = False
) -> Split:
    """Return the collection's own split if it has one, else draw `test_fraction` of the classes.

    A class on both sides is refused unless `allow_shared`. Without labels all items are for
    training.
    """
    if collection.split is None:
        if collection.labels is None:
            return Split(np.arange(len(collection)), np.empty(0, dtype=np.int64))
        return split_classes(collection.labels, share=test_fraction, seed=seed)
    sides = Split(
        np.flatnonzero(collection.split == TRAIN), np.flatnonzero(collection.split != TRAIN)
    )
    for side, items in zip(sides._fields, sides, strict=True):
        if not len(items):
            raise DataError(f"{collection.name}: its split has no items for {side}ing")
    if collection.labels is not None and not allow_shared:
        shared_classes = np.intersect1d(
            collection.labels[sides.train], collection.labels[sides.test]
        )
        if len(shared_classes):
            names = first_five([collection.class_names[i] for i in shared_classes])
            raise DataError(
                f"{len(shared_classes):,} classes are in both train and test ({names}); "
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
    """Hold out `share` of the training *classes* for validation, never single images."""
    return split_classes(labels, share=share, seed=seed)
