"""Groups of items that belong together, from triplets or pairs instead of labels.

A triplet (anchor, positive, negative) links anchor and positive and says that anchor and negative
are apart; a pair says one of the two. Items that a chain of links connects are a group, which
assumes that being alike carries over. Where it does not, chains join items that are known to be
apart: those contradictions are counted, and training from groups is refused if there are many.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

Rows = NDArray[np.int64]
NO_GROUP = -1


class Linked(NamedTuple):
    """The groups of linked items."""

    groups: Rows
    """(N,) the group of each item, 0 … G − 1 in the order of their first items; −1 without any."""
    contradictions: int
    """How many of the pairs known to be apart are in one group."""


def linked_groups(links: ArrayLike, count: int, *, apart: ArrayLike | None = None) -> Linked:
    """Return the groups that links (L, 2) between `count` items form.

    links: pairs of items that are alike, such as `triplets[:, :2]`.
    apart: pairs (M, 2) known not to be alike, such as `triplets[:, [0, 2]]`; they only check.

    >>> linked_groups([[0, 2], [2, 3], [1, 4]], 6).groups
    array([ 0,  1,  0,  0,  1, -1])
    """
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    ends = np.asarray(links, dtype=np.int64).reshape(-1, 2)
    others = np.asarray([] if apart is None else apart, dtype=np.int64).reshape(-1, 2)
    for name, pairs in (("links", ends), ("apart", others)):
        if len(pairs) and (pairs.min() < 0 or pairs.max() >= count):
            raise ValueError(
                f"{name} reach from {pairs.min()} to {pairs.max()}, expected 0 to {count - 1}: "
                "pass rows of the items, and their count"
            )
    graph = coo_array((np.ones(len(ends), dtype=np.int8), (ends[:, 0], ends[:, 1])), (count, count))
    component = connected_components(graph, directed=False)[1]
    is_linked = np.zeros(count, dtype=bool)
    is_linked[ends[ends[:, 0] != ends[:, 1]].reshape(-1)] = True
    groups = np.full(count, NO_GROUP, dtype=np.int64)
    _, first, compact = np.unique(component[is_linked], return_index=True, return_inverse=True)
    groups[is_linked] = np.argsort(np.argsort(first))[compact]
    inside = (groups[others[:, 0]] == groups[others[:, 1]]) & (groups[others[:, 0]] != NO_GROUP)
    return Linked(groups, int(inside.sum()))
