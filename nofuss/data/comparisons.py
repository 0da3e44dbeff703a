"""Data with triplets or pairs instead of labels: groups to learn from, comparisons to score on.

Linked items form groups (`links.py`), which training takes as labels, and whole groups are held
out: training has seen neither anchor nor positive of a held-out triplet. Triplets that contradict
their groups ("more like this than that", where likeness does not carry over) are learned as they
are, by dynamic assignment; then single triplets are held out, whose items others may contain.
"""

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from nofuss.data.collection import Collection
from nofuss.data.links import NO_GROUP, Linked, Rows, linked_groups

TEST_FRACTION = 0.2
"""Default share of the groups, and so about of the triplets, that is held out for the scores."""
TOLERATED = 0.05
"""Share of contradictions up to which groups are believed."""
FEWEST_GROUPS = 4


def links_of(collection: Collection) -> Linked:
    """Return the groups of a collection that has triplets or pairs."""
    if collection.triplets is not None:
        t = collection.triplets
        return linked_groups(t[:, :2], len(collection), apart=t[:, [0, 2]])
    assert collection.pairs is not None
    is_alike = collection.pairs[:, 2] == 1
    items = collection.pairs[:, :2]
    return linked_groups(items[is_alike], len(collection), apart=items[~is_alike])


def contradicted(collection: Collection) -> str | None:
    """Return why groups of linked items can't be learned from, in words; None if they can."""
    linked = links_of(collection)
    count = int(linked.groups.max()) + 1
    if collection.triplets is not None:
        known = len(collection.triplets)
    else:
        assert collection.pairs is not None
        known = int((collection.pairs[:, 2] == 0).sum())
    if linked.contradictions > TOLERATED * known:
        return (
            f"chains of alike items connect {linked.contradictions:,} of {known:,} pairs that are "
            "known to differ"
        )
    if count < FEWEST_GROUPS:
        return f"linked items form {count} groups, and {FEWEST_GROUPS} are needed"
    return None


def as_groups(collection: Collection) -> Collection:
    """Return the collection with groups as labels; items without a link are groups of one."""
    groups = _every_item(links_of(collection).groups)
    names = tuple(f"group {i + 1}" for i in range(int(groups.max()) + 1))
    return replace(collection, labels=groups, class_names=names, by_links=True)


def without_groups(collection: Collection) -> Collection:
    """Return the collection without labels that are groups: the reader's view."""
    if not collection.by_links:
        return collection
    return replace(collection, labels=None, class_names=(), by_links=False)


def split_comparisons(
    collection: Collection, share: float, seed: int, *, linked_only: bool
) -> tuple[Rows, Rows]:
    """Return rows to train on, and held-out rows: whole groups, or those of held-out triplets.

    linked_only: leave items out of training that nothing is alike to; as negatives they count.
    """
    if contradicted(collection) is not None:
        if collection.triplets is None:  # training has refused such pairs
            return np.arange(len(collection)), np.empty(0, dtype=np.int64)
        held_out = _held_out(len(collection.triplets), share, seed)
        return np.arange(len(collection)), np.unique(collection.triplets[held_out])
    linked = links_of(collection).groups
    count = int(linked.max()) + 1
    is_held_out = np.zeros(count + 1, dtype=bool)  # the last is for items without a group
    number = max(1, round(share * count)) if share else 0
    is_held_out[np.random.default_rng(seed).permutation(count)[:number]] = True
    test = is_held_out[linked]
    is_trained = ~test & (linked != NO_GROUP) if linked_only else ~test
    return np.flatnonzero(is_trained), np.flatnonzero(test)


def to_learn(collection: Collection, share: float, seed: int) -> Collection:
    """Return the collection without triplets that are held out though their items are not."""
    if collection.triplets is None or contradicted(collection) is None:
        return collection
    held_out = _held_out(len(collection.triplets), share, seed)
    return replace(collection, triplets=collection.triplets[~held_out])


class Compared(NamedTuple):
    """Held-out comparisons, and the rows of their items."""

    rows: Rows
    """Ascending: held-out items, and others that they are compared with."""
    collection: Collection
    """These rows, with the held-out triplets or pairs alone."""


def to_score(collection: Collection, share: float, seed: int, test: Rows) -> Compared:
    """Return what the held-out items `test` are scored by."""
    is_test = np.zeros(len(collection), dtype=bool)
    is_test[test] = True
    triplets, pairs = collection.triplets, collection.pairs
    if triplets is not None and collection.labels is None and contradicted(collection) is not None:
        triplets = triplets[_held_out(len(triplets), share, seed)]
    elif triplets is not None:
        triplets = triplets[is_test[triplets[:, :2]].all(axis=1)]
    if pairs is not None:
        is_in = is_test[pairs[:, :2]]
        pairs = pairs[np.where(pairs[:, 2] == 1, is_in.all(axis=1), is_in.any(axis=1))]
    named = [
        table[:, :width].reshape(-1)
        for table, width in ((triplets, 3), (pairs, 2))
        if table is not None
    ]
    rows = np.unique(np.concatenate([test, *named]))
    return Compared(rows, replace(collection, triplets=triplets, pairs=pairs).subset(rows))


def groups_of(collection: Collection) -> Rows | None:
    """Return the group of each item, for intervals; None where there are no two to resample."""
    linked = links_of(collection)
    known = collection.triplets if collection.triplets is not None else collection.pairs
    assert known is not None
    if linked.contradictions > TOLERATED * len(known) or linked.groups.max() < 1:
        return None
    return _every_item(linked.groups)


def _held_out(count: int, share: float, seed: int) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    mask = np.zeros(count, dtype=bool)
    mask[np.random.default_rng(seed).permutation(count)[: round(share * count)]] = True
    return mask


def _every_item(groups: Rows) -> Rows:
    """Return groups in which an item without a link has a number of its own, after the others."""
    numbered = groups.copy()
    single = np.flatnonzero(groups == NO_GROUP)
    numbered[single] = int(groups.max()) + 1 + np.arange(len(single))
    return numbered
