"""How many triplets there are, over instances and over proxies (Section 3.2 and Figure 2)."""

import numpy as np
from torch import Tensor

from nofuss.geometry import Array


def count_triplets(labels: Array, *, ordered: bool = True) -> int:
    """Count triplets (x, y, z) with c(x) = c(y) ≠ c(z): n²(n−k)(k−1)/k² for k equal classes.

    `ordered=False` counts {x, y} once: Figure 2's two classes of four points give its 48.
    """
    total = sum(n * (n - 1) * (len(labels) - n) for n in _sizes(labels))
    return total if ordered else total // 2


def count_proxy_triplets(labels: Array, proxies_per_class: int = 1) -> int:
    """Count triplets (x, p(y), p(z)) over proxies: each anchor's own proxies times all others'.

    Figure 2's two classes of four points, one proxy each, give its 8.
    """
    items, classes = len(labels), len(_sizes(labels))
    return items * proxies_per_class * (classes - 1) * proxies_per_class


def _sizes(labels: Array) -> list[int]:
    """Return the size of each class, in Python's numbers, which have no end."""
    values = labels.cpu() if isinstance(labels, Tensor) else labels
    sizes: list[int] = np.unique(np.asarray(values), return_counts=True)[1].tolist()
    return sizes
