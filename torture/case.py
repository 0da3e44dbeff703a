"""What was tried, and what became of it."""

from typing import NamedTuple


class Case(NamedTuple):
    """One disturbance or attack, and its result."""

    name: str
    refused: bool
    """Whether it was noticed, or refused in one line; otherwise the work was done as without it."""
    seconds: float
    complaints: list[str]
