"""What an index can do, wherever it is kept: `Searched` for search and page, `Store` for engines.

Items have names (paths) and, for searching, numbers: rows of the run's own index, 63 bits of a
digest of the name in a database. There, writing an item again replaces it, so that an update that
was killed is repeated without harm.
"""

import re
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from nofuss.data.columns import Type, Value
from nofuss.files import digest
from nofuss.search.filter import Condition

FORMAT = 1
METRIC = "euclidean, unit vectors"
TYPES_SECONDS = 10.0


class Item(NamedTuple):
    """What an index tells about an item."""

    name: str
    label: str | None
    cells: Mapping[str, Value]
    """Its columns; those without a value are left out."""


class Note(NamedTuple):
    """What an item was when it was written: where from, its file, and its label and columns."""

    source: str
    size: int
    mtime_ns: int
    digest: str
    facts: str


class Record(NamedTuple):
    """An item to write."""

    item: Item
    note: Note


class About(NamedTuple):
    """What a whole index was made for."""

    model: str
    dim: int
    metric: str = METRIC
    format: int = FORMAT


class Searched(Protocol):
    """What search and page need of an index."""

    @property
    @abstractmethod
    def dim(self) -> int:
        """Dimensions of a vector."""

    @property
    @abstractmethod
    def types(self) -> Mapping[str, Type]:
        """The columns that a filter may name, `label` among them."""

    @property
    @abstractmethod
    def classes(self) -> list[str]:
        """Names of the classes, sorted."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def search(
        self, queries: Tensor, k: int = 10, *, where: Condition | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return distances and numbers (Q, k), nearest first; inf and −1 fill up."""

    @abstractmethod
    def items(self, rows: Sequence[int], /) -> list[Item]:
        """Return what is known of the items with these numbers."""

    @abstractmethod
    def vectors_of(self, rows: Sequence[int], /) -> Tensor:
        """Return the vectors (n, D) of the items with these numbers."""

    @abstractmethod
    def sample(self, count: int, *, seed: int = 0) -> list[int]:
        """Return numbers of at most `count` items, sorted."""


class Target(Protocol):
    """What `nofuss index` needs of an index."""

    @abstractmethod
    def notes(self, source: str, names: Sequence[str]) -> dict[str, Note]:
        """Return the notes of all items of a source, and of these names whatever their source."""

    @abstractmethod
    def declare(self, source: str, types: Mapping[str, Type]) -> None:
        """Note a source and its columns, before its items are written."""

    @abstractmethod
    def put(self, records: Sequence[Record], vectors: Tensor) -> None:
        """Write items, replacing those of the same name."""

    @abstractmethod
    def revise(self, records: Sequence[Record]) -> None:
        """Replace everything but the vectors of items."""

    @abstractmethod
    def discard(self, names: Sequence[str]) -> None:
        """Remove items; names that are not there are ignored."""

    @abstractmethod
    def forget(self, source: str) -> None:
        """Remove the note of a source that has no items any more."""

    @abstractmethod
    def sources(self) -> dict[str, Mapping[str, Type]]:
        """Return the sources, and the types of their columns."""


class Store(Searched, Target, ABC):
    """An index in a database: `Searched` and `Target`, and what only a database needs."""

    shown: str
    """Its address without credentials."""
    _types: dict[str, Type]
    _types_until = 0.0

    @property
    @abstractmethod
    def about(self) -> About | None:
        """What the index was made for; None if it does not exist yet."""

    @abstractmethod
    def create(self, about: About) -> None:
        """Make an empty index."""

    @abstractmethod
    def finish(self) -> None:
        """Build what searching fast needs, once all items are written."""

    @abstractmethod
    def chunks(self, count: int) -> Iterator[tuple[Sequence[int], Tensor]]:
        """Yield numbers and vectors of all items, at most `count` at a time."""

    @abstractmethod
    def records(self) -> Iterator[Record]:
        """Yield all items."""

    @abstractmethod
    def close(self) -> None:
        """Disconnect."""

    @property
    def dim(self) -> int:
        """Dimensions of a vector."""
        assert self.about is not None
        return self.about.dim

    @property
    def types(self) -> dict[str, Type]:
        """The columns that a filter may name, `label` among them; read again now and then."""
        if time.monotonic() > self._types_until:
            self._types = {"label": "text"}
            for columns in self.sources().values():
                self._types |= columns
            self._types_until = time.monotonic() + TYPES_SECONDS
        return self._types


def number_of(name: str) -> int:
    """Return an item's number in a database: 63 bits, of a digest of the name.

    The chance that any two of a million items share one is 1 in 18 million; of a billion, 5%.
    """
    return int(digest(to_utf8(name).encode())[:16], 16) >> 1


def to_utf8(name: str) -> str:
    """Return a file name as text that every database holds: other bytes as %80 to %FF, % as %25."""
    escaped = name.replace("%", "%25")
    return re.sub("[\udc80-\udcff]", lambda byte: f"%{ord(byte[0]) - 0xDC00:02X}", escaped)


def from_utf8(text: str) -> str:
    """Return the file name that `to_utf8` was given."""

    def byte(found: re.Match[str]) -> str:
        value = int(found[1], 16)
        return "%" if value == 0x25 else chr(0xDC00 + value)

    return re.sub("%(25|[89A-F][0-9A-F])", byte, text)
