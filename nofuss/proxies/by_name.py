"""The assignment of a name, as `assignment=` and `--assignment` take it."""

import torch

from nofuss.proxies.assignment import Assignment, Dynamic, Fractional, Several, Static
from nofuss.proxies.balanced import Balanced

NAMES = ("static", "dynamic", "balanced")


def build_assignment(
    name: str,
    num_classes: int,
    proxies_per_class: float,
    *,
    generator: torch.Generator | None = None,
) -> Assignment:
    """Return the assignment of a name; "static" is fractional below 1 a class, several above."""
    num_proxies = max(1, round(num_classes * proxies_per_class))
    if name == "dynamic":
        return Dynamic(num_proxies)
    if name == "balanced":
        return Balanced(num_classes, num_proxies)
    if name != "static":
        raise ValueError(f"unknown assignment {name!r}; choose from {', '.join(map(repr, NAMES))}")
    if num_proxies < num_classes:
        return Fractional(num_classes, num_proxies, generator=generator)
    if num_proxies > num_classes:
        return Several(num_classes, num_proxies)
    return Static(num_classes)
