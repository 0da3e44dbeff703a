"""Triplets and pairs, which say what is alike instead of labels: groups to learn, and scores.

A triplet (anchor, positive, negative) links anchor and positive and says that anchor and negative
are apart; a pair says one of the two. Items that a chain of links connects are a group, which
assumes that being alike carries over. One wrong link joins two groups, so where chains join items
that are known to be apart, only links count that a second, short way confirms: items of a class are
linked in more than one way, and wrong links rarely are. What contradictions remain is counted.

Training takes groups as labels, and whole groups are held out: training has seen neither anchor nor
positive of a held-out triplet. Triplets that contradict their groups ("more like this than that",
where likeness does not carry over) are learned as they are, by dynamic assignment; then single
triplets are held out, whose items others may contain.
"""

from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

Rows = NDArray[np.int64]
NO_LABEL = -1
"""The label of an item that has none."""
MOST_WALKS = 2**26
"""Walks of three links up to which links are confirmed: beyond, there are items with thousands."""
TOLERATED = 0.05
"""Fraction of contradictions up to which groups are believed."""
FEWEST_GROUPS = 4


class Linked(NamedTuple):
    """The groups of linked items."""

    groups: Rows
    """(N,) the group of each item, 0 … G − 1 in the order of their first items; −1 without any."""
    contradictions: int
    """How many of the pairs known to be apart are in one group."""
    dropped: int = 0
    """How many links were not confirmed, and left out, because some contradicted what is apart."""


def linked_groups(links: ArrayLike, count: int, *, apart: ArrayLike | None = None) -> Linked:
    """Return the groups that links (L, 2) between `count` items form.

    links: pairs of items that are alike, such as `triplets[:, :2]`.
    apart: pairs (M, 2) known not to be alike, such as `triplets[:, [0, 2]]`. If links join some
        of them, links without a second way from end to end, of three links at most, are dropped.

    >>> linked_groups([[0, 2], [2, 3], [1, 4]], 6).groups
    array([ 0,  1,  0,  0,  1, -1])
    """
    ends = np.asarray(links, dtype=np.int64).reshape(-1, 2)
    others = np.asarray([] if apart is None else apart, dtype=np.int64).reshape(-1, 2)
    for name, pairs in (("links", ends), ("apart", others)):
        if len(pairs) and (pairs.min() < 0 or pairs.max() >= count):
            raise ValueError(
                f"{name} reach from {pairs.min()} to {pairs.max()}, expected 0 to {count - 1}: "
                "pass rows of the items, and their count"
            )
    ends = np.unique(np.sort(ends[ends[:, 0] != ends[:, 1]], axis=1), axis=0)  # each link once
    linked = _connected(ends, others, count)
    if not linked.contradictions:
        return linked
    confirmed = ends[_is_confirmed(ends, count)]
    return _connected(confirmed, others, count)._replace(dropped=len(ends) - len(confirmed))


def _connected(ends: Rows, apart: Rows, count: int) -> Linked:
    """Return the connected components of the links, and how many pairs that are apart share one."""
    from scipy.sparse.csgraph import connected_components

    component = connected_components(_adjacency(ends, count), directed=False)[1]
    is_linked = np.zeros(count, dtype=bool)
    is_linked[ends.reshape(-1)] = True
    groups = np.full(count, NO_LABEL, dtype=np.int64)
    _, first, compact = np.unique(component[is_linked], return_index=True, return_inverse=True)
    groups[is_linked] = np.argsort(np.argsort(first))[compact]
    inside = (groups[apart[:, 0]] == groups[apart[:, 1]]) & (groups[apart[:, 0]] != NO_LABEL)
    return Linked(groups, int(inside.sum()))


def _is_confirmed(ends: Rows, count: int) -> NDArray[np.bool_]:
    """Return for each link whether two or three other links also lead from end to end."""
    graph = _adjacency(ends, count)
    degree = np.asarray(graph.sum(1)).reshape(-1)
    if (degree**3).sum() > MOST_WALKS:
        return np.ones(len(ends), dtype=bool)
    a, b = ends.T
    walks = graph @ graph  # of two links
    two, three = walks[a, b], (walks @ graph)[a, b]
    # Of the walks of three links, those that go along this link and back are no confirmation.
    confirmed: NDArray[np.bool_] = (two > 0) | (three > degree[a] + degree[b] - 1)
    return confirmed


def _adjacency(ends: Rows, count: int) -> Any:
    from scipy.sparse import csr_array

    a, b = ends.T
    rows, columns = np.r_[a, b], np.r_[b, a]
    return csr_array((np.ones(len(rows)), (rows, columns)), (count, count))


@dataclass(frozen=True, eq=False)
class Comparisons:
    """Triplets or pairs of a collection's items."""

    kind: Literal["triplets", "pairs"]
    rows: Rows
    """(M, 3): anchor, positive and negative; or two items, and 1 if they are alike, else 0."""

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, chosen: NDArray[np.bool_]) -> "Comparisons":
        return replace(self, rows=self.rows[chosen])

    @property
    def items(self) -> Rows:
        """The items that are compared, (M, 3) of triplets or (M, 2) of pairs."""
        return self.rows if self.kind == "triplets" else self.rows[:, :2]

    @property
    def apart(self) -> Rows:
        """Pairs (L, 2) of items that are known not to be alike."""
        of_triplets, is_apart = self.rows[:, [0, 2]], self.rows[:, 2] == 0
        return of_triplets if self.kind == "triplets" else np.asarray(self.items[is_apart])

    @property
    def can_be_scored(self) -> bool:
        """Whether there is an order to get right: a triplet, or both kinds of pairs."""
        return len(self) > 0 and 0 < len(self.apart) < len(self) + (self.kind == "triplets")

    def links(self, count: int) -> Linked:
        """Return the groups that form among all `count` items of the collection."""
        alike = self.rows[:, :2] if self.kind == "triplets" else self.items[self.rows[:, 2] == 1]
        return linked_groups(alike, count, apart=self.apart)

    def doubt(self, linked: Linked) -> str | None:
        """Return why groups of linked items can't be learned from, in words; None if they can."""
        known, groups = len(self.apart), int(linked.groups.max()) + 1
        if linked.contradictions > TOLERATED * known:
            return (
                f"chains of alike items connect {linked.contradictions:,} of {known:,} pairs that "
                "are known to differ"
            )
        if groups < FEWEST_GROUPS:
            return f"linked items form {groups} groups, and {FEWEST_GROUPS} are needed"
        return None

    def subset(self, kept: Rows, count: int) -> "Comparisons":
        """Return those whose items are all among the `kept` ones of `count`, as positions there."""
        position = np.full(count, -1, dtype=np.int64)
        position[kept] = np.arange(len(kept))
        moved = position[self.items]
        rows = np.column_stack([moved, self.rows[:, moved.shape[1] :]])
        return replace(self, rows=rows[(moved >= 0).all(axis=1)])

    def drawn(self, fraction: float, seed: int) -> NDArray[np.bool_]:
        """Return which comparisons are held out where single ones are, drawn by `seed`."""
        mask = np.zeros(len(self), dtype=bool)
        mask[np.random.default_rng(seed).permutation(len(self))[: round(fraction * len(self))]] = 1
        return mask

    def resampled_together(self, count: int) -> Rows | None:
        """Return the group of each item, for intervals; None where there are no two of them.

        An item without a link has a number of its own, after the groups.
        """
        linked = self.links(count)
        if linked.contradictions > TOLERATED * len(self) or linked.groups.max() < 1:
            return None
        groups, single = linked.groups.copy(), np.flatnonzero(linked.groups == NO_LABEL)
        groups[single] = int(groups.max()) + 1 + np.arange(len(single))
        return groups


class HeldOut(NamedTuple):
    """Comparisons that a model is scored by."""

    rows: Rows
    """Items to embed, ascending: held-out ones, and others that they are compared with."""
    comparisons: Comparisons
    """As positions in `rows`."""


def held_out(comparisons: Comparisons | None, test: Rows, count: int) -> HeldOut | None:
    """Return what the test items, of `count`, are scored by; None where that is nothing.

    That are triplets whose anchor and positive are test items, alike pairs of two of them, and
    different pairs with one of them.
    """
    if comparisons is None:
        return None
    is_test = np.isin(np.arange(count), test)
    inside = is_test[comparisons.items]
    chosen = np.asarray(inside[:, :2].all(axis=1))
    if comparisons.kind == "pairs":
        chosen |= (comparisons.rows[:, 2] == 0) & inside.any(axis=1)
    scored = comparisons[chosen]
    rows = np.unique(np.concatenate([test, scored.items.reshape(-1)]))
    return HeldOut(rows, scored.subset(rows, count)) if scored.can_be_scored else None
