"""The assignment of a name, as `assignment=` and `--assignment` take it."""

import torch

from nofuss.proxies.assignment import Assignment, Dynamic, Fractional, Several, Static
from nofuss.proxies.balanced import Balanced

NAMES = ("static", "dynamic", "matched", "balanced")


def count_proxies(num_classes: int, proxies_per_class: float) -> int:
    """Return the number of all proxies."""
    return max(1, round(num_classes * proxies_per_class))


def kind_of(name: str, num_classes: int, proxies_per_class: float) -> type[Assignment]:
    """Return the class of a name; "static" is fractional below 1 a class, several above."""
    if name not in NAMES:
        raise ValueError(f"unknown assignment {name!r}; choose from {', '.join(map(repr, NAMES))}")
    if name != "static":
        return Balanced if name == "balanced" else Dynamic
    num_proxies = count_proxies(num_classes, proxies_per_class)
    if num_proxies == num_classes:
        return Static
    return Fractional if num_proxies < num_classes else Several


def build_assignment(
    name: str,
    num_classes: int,
    proxies_per_class: float,
    *,
    generator: torch.Generator | None = None,
) -> Assignment:
    """Return the assignment of a name."""
    kind = kind_of(name, num_classes, proxies_per_class)
    num_proxies = count_proxies(num_classes, proxies_per_class)
    if kind is Static:
        return Static(num_classes)
    if kind is Dynamic:
        return Dynamic(num_proxies, matched=name == "matched")
    if kind is Fractional:
        return Fractional(num_classes, num_proxies, generator=generator)
    return (
        Several(num_classes, num_proxies) if kind is Several else Balanced(num_classes, num_proxies)
    )
