"""What is searched: items with unit vectors, in a folder of the run or in a database.

`Index` is what every kind of index can do: the folder (folder.py), Milvus, PostgreSQL (engines/).
Items are addressed by their names, which are unique and stable: the absolute path of a picture, or
FILE#ROW for an item of a file that holds many.
"""

import sys
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from nofuss.config import read_as, to_json
from nofuss.data.columns import Type, Value
from nofuss.files import digest
from nofuss.model.manifest import FORMAT
from nofuss.ranking.open_set import OpenSet
from nofuss.search.filter import LABEL, Condition

BUILT_IN = "built-in characters"
"""The source of the items that come with the package."""
SPLITS = ("train", "val", "test", "query", "gallery")
SAMPLED = 5_000
"""Most items that an index is calibrated on."""
_NOTHING: Mapping[str, Value] = MappingProxyType({})


class WrongFormatError(ValueError):
    """An index that another version of nofuss made."""


class Item(NamedTuple):
    """What an index knows of an item."""

    name: str
    label: str | None = None
    columns: Mapping[str, Value] = _NOTHING
    """Those without a value are left out."""
    source: str = ""
    """What data it is from; empty for what was put in from Python."""
    digest: str = ""
    """Of its content when it was embedded."""
    vector: Tensor | None = None
    """(D,) unit, by the model as it was trained, where it was asked for."""
    split: str | None = None
    """What training used it for: one of `SPLITS`; None for what was added later."""
    features: Tensor | None = None
    """(F,) unit, of the backbone, in half precision: of items of the sample that the open-set rule
    is calibrated on (verdict.py), where vectors are asked for."""


class Hits(NamedTuple):
    """What was found, nearest first."""

    names: list[str]
    distances: list[float]


class About(NamedTuple):
    """What holds for a whole index."""

    model: str
    """The checksum of the model that made the vectors."""
    dim: int
    sources: Mapping[str, Mapping[str, Type]] = MappingProxyType({})
    """Where items are from → the types of their columns."""
    open_set: OpenSet | None = None
    relatives: int | None = 0
    """Others of its class that a typical item has; None without labels, 0 where not counted."""
    format: int = FORMAT

    @property
    def types(self) -> dict[str, Type]:
        """The columns that a filter may name, `label` among them."""
        found: dict[str, Type] = {LABEL: "text"}
        for types in self.sources.values():
            found |= types
        return found

    def as_dict(self) -> dict[str, Any]:
        """Return a dict for JSON, without the sources."""
        rule = self.open_set and to_json(self.open_set)
        return {**self._asdict(), "open_set": rule, "sources": None}

    @classmethod
    def from_dict(cls, stored: Any, sources: Any) -> "About":
        """Read what `as_dict` gave; ValueError, with what is wrong, for anything else."""
        found = stored.get("format") if isinstance(stored, dict) else None
        if found != FORMAT:
            raise WrongFormatError(f"is of format {found!r:.20}, expected {FORMAT}")
        made = read_as(cls, {**stored, "sources": sources})
        if not all(0 <= number < 2**31 for number in (made.dim, made.relatives or 0)):
            raise ValueError("its numbers are not those of an index")
        if any(LABEL in types for types in made.sources.values()):
            raise ValueError(f"{LABEL} is not a column")
        return made


class Index(Protocol):
    """What search, page and `nofuss index` need of an index, wherever it is kept."""

    place: str
    """Where it is, for messages: a folder, or a URL without credentials."""

    @property
    def matrix(self) -> Tensor | None:
        """What feedback taught, a map (D, D) of vectors; always None in a database."""

    @property
    def about(self) -> About:
        """What holds for all of it."""

    @abstractmethod
    def search(self, vectors: Tensor, k: int = 10, *, where: Condition | None = None) -> list[Hits]:
        """Return the k nearest of each vector (Q, D) among the items that pass a filter."""

    def get(self, names: Sequence[str], *, vectors: bool = False) -> list[Item]:
        """Return items by their names; those that are not there are left out."""

    def find(self, key: str) -> str | None:
        """Return the name of the item with this key (see `key_of`); None if there is none."""

    def items(self, source: str | None = None, *, vectors: bool = False) -> Iterator[Item]:
        """Yield all items, or those of one source."""

    @abstractmethod
    def put(self, items: Sequence[Item]) -> None:
        """Write items, replacing those of the same name; without a vector, the former one stays."""

    @abstractmethod
    def delete(self, names: Sequence[str]) -> None:
        """Remove items; names that are not there are ignored."""

    def sample(self, count: int, *, seed: int = 0) -> list[str]:
        """Return the names of the `count` items that are drawn first, see `draw`."""

    @abstractmethod
    def count(self) -> int:
        """Return how many items there are."""

    def commit(self, about: About, *, source: str | None = None) -> None:
        """Put `about` in force; what was written is durable and searched fast from here on.

        source: the one that is new, has other columns, or is not in `about` any more. What a
        database says of the other sources stays: another process may be writing them.
        """

    @abstractmethod
    def close(self) -> None:
        """Disconnect."""


def number_of(name: str) -> int:
    """Return an item's number, 63 bits of a digest of its name.

    The chance that any two of a million items share one is 1 in 18 million; of a billion, 5%.
    """
    return int(digest(name.encode("utf-8", "surrogateescape"))[:16], 16) >> 1


def key_of(name: str) -> str:
    """Return an item's key: its number in 16 hexadecimal digits."""
    return f"{number_of(name):016x}"


def draw(name: str, seed: int = 0) -> float:
    """Return when an item is drawn, from 0 to 1: those that come first are a random sample."""
    return (number_of(name) - first_drawn(seed)) % 2**63 / 2**63


@cache
def first_drawn(seed: int) -> int:
    """Return the number that is drawn first; the next ones follow, after the last the first."""
    return int(np.random.default_rng(seed).integers(2**63))


def is_value(value: object, kind: Type | None) -> bool:
    """Return whether a value is of a column's type; a number must be one that a float holds."""
    match kind:
        case "number":
            return type(value) in (float, int) and abs(value) <= sys.float_info.max  # type: ignore[arg-type]
        case "bool":
            return type(value) is bool
        case "text" | "date":
            return type(value) is str
    return False


def vectors_of(items: Iterable[Item], dim: int) -> Tensor:
    """Return the vectors (N, dim) of those items that have one."""
    found = [vector for item in items if (vector := item.vector) is not None]
    return torch.stack(found) if found else torch.empty(0, dim)


def are_unit(vectors: Tensor) -> bool:
    """Return whether all of (N, D) have length 1, or 0 for a picture of nothing."""
    norms = torch.linalg.vector_norm(vectors, dim=1)
    return bool((((norms - 1).abs() < 1e-3) | (norms == 0)).all())  # NaN is neither
