"""How slow work says how far it is: one form for the whole library.

A function that may take seconds takes `progress` and calls it with what it does, how much of that
is done, and of how many: first with 0, last with all. Training makes an event of it, the commands
a bar.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

Progress = Callable[[str, int, int], None]
"""Called with what is being done, how many are done, and of how many."""


def silent(what: str, done: int, total: int) -> None:
    """Show nothing: the default of whatever takes `progress`."""


@contextmanager
def working(progress: Progress, what: str) -> Iterator[None]:
    """Report work that can't be counted, as one piece."""
    progress(what, 0, 1)
    yield
    progress(what, 1, 1)
