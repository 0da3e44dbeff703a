"""Proxies: assignment to items, how many triplets they save, how tightly they bound the loss."""

from nofuss.proxies.assignment import (
    Assignment,
    Balanced,
    Dynamic,
    Fractional,
    Sampled,
    Several,
    Static,
)
from nofuss.proxies.bounds import Bound, Bounds, proxy_bounds
from nofuss.proxies.counting import count_proxy_triplets, count_triplets

__all__ = [
    "Assignment",
    "Balanced",
    "Bound",
    "Bounds",
    "Dynamic",
    "Fractional",
    "Sampled",
    "Several",
    "Static",
    "count_proxy_triplets",
    "count_triplets",
    "proxy_bounds",
]
