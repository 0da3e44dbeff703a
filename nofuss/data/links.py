"""Groups of items that belong together, from triplets or pairs instead of labels.

A triplet (anchor, positive, negative) links anchor and positive and says that anchor and negative
are apart; a pair says one of the two. Items that a chain of links connects are a group, which
assumes that being alike carries over. One wrong link joins two groups, so where chains join items
that are known to be apart, only links count that a second, short way confirms: items of a class are
linked in more than one way, and wrong links rarely are. What contradictions remain is counted.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

Rows = NDArray[np.int64]
NO_GROUP = -1
MOST_WALKS = 2**26
"""Walks of three links up to which links are confirmed: beyond, there are items with thousands."""


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
    groups = np.full(count, NO_GROUP, dtype=np.int64)
    _, first, compact = np.unique(component[is_linked], return_index=True, return_inverse=True)
    groups[is_linked] = np.argsort(np.argsort(first))[compact]
    inside = (groups[apart[:, 0]] == groups[apart[:, 1]]) & (groups[apart[:, 0]] != NO_GROUP)
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
