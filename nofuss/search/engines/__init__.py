"""Where an index can be kept besides the run's own folder: a database that many machines share.

url (what a user gives, and what must never be shown of it) → milvus | postgres: one `Engine` each

An item's number in a database is its key. Writing an item again replaces it, so that an update that
was killed is repeated without harm, and several processes may write parts of one index at once.
What a database holds is checked row by row, as if a stranger had written it. Reading has a
deadline; writing has none, since it may wait for another process that builds a graph.
"""

import base64
import json
import re
import time
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar
from urllib.parse import unquote

import numpy as np
import torch
from torch import Tensor

from nofuss.data.columns import Type
from nofuss.errors import EngineError, NofussError, RunError
from nofuss.files import parse_json
from nofuss.search.engines.url import Url, read_url
from nofuss.search.filter import LABEL
from nofuss.search.index import (
    About,
    Hits,
    Index,
    Item,
    WrongFormatError,
    are_unit,
    first_drawn,
    is_value,
    number_of,
)

ANSWER_SECONDS = 8.0
"""How long a database may take to answer; the page answers within ten."""
ABOUT_SECONDS = 10.0
"""How long what was read of a whole index is believed: others may add columns."""
PAGE, PAGE_WITH_VECTORS = 10_000, 2_000
"""Most items in one query; Milvus allows 16,384."""
NAMES = ("id", "name")
FIELDS = (*NAMES, "label", "source", "digest", "columns")
"""What a database holds of an item, besides its vectors."""
ALL_FIELDS = (*FIELDS, "embedding", "features")
LAST = 2**63 - 1
"""The largest number of an item."""
EF_SEARCH = 100
"""Candidates of a search in a graph at least; recall against all distances is then near one."""
_WIDEST = 24_000  # features that fit the longest text of Milvus; an item with more keeps none
_KEY = re.compile("[0-7][0-9a-f]{15}")
_Any = TypeVar("_Any")
Fields = Sequence[str]
Row = Mapping[str, Any]


class Engine(Index):
    """An index in a database: what is the same in all of them."""

    matrix = None

    def __init__(self, url: Url) -> None:
        self._url, self.place = url, url.shown
        self._wanted, self._about, self._about_until = About("", 0), About("", 0), 0.0

    @abstractmethod
    def fields(self) -> list[set[str]]:
        """Return the names of the fields of both tables; of one that does not exist none."""

    @abstractmethod
    def read_about(self) -> list[tuple[Any, Any]]:
        """Return all keys and values of the second table."""

    @abstractmethod
    def write_about(self, said: Mapping[str, object], *, gone: str = "") -> None:
        """Write values into the second table, and delete one key."""

    @abstractmethod
    def create(self, about: About) -> None:
        """Make an empty index, unless another process just has."""

    @abstractmethod
    def complete(self) -> None:
        """Make what was written durable, and build what searching fast needs."""

    @abstractmethod
    def rows(self, fields: Fields, numbers: Sequence[int]) -> list[Row]:
        """Return the fields of the items with these numbers, at most a page of them."""

    @abstractmethod
    def scan(self, fields: Fields, source: str | None, first: int, count: int) -> Iterator[Row]:
        """Yield the fields of `count` items from a number on, in the order of their numbers.

        Fewer where there are no more; only those of a source, if one is given.
        """

    def check(self, wanted: About, *, create: bool = False) -> None:
        """Refuse an index of another model, dimension or format; make one if there is none."""
        found = self._read_about()
        if found is None and create:
            self.create(wanted)
            found = self._read_about()
        if found is None:
            raise RunError(f"no index in {self.place}; make one: nofuss index RUN DIR --to URL")
        if found.dim != wanted.dim:
            got = f"holds vectors of {found.dim} dimensions"
            raise self._refused(f"{got}, but the model gives {wanted.dim}")
        if found.model != wanted.model:
            raise self._refused("was made by another model than that of the run")
        self._wanted, self._about = wanted, found
        self._about_until = time.monotonic() + ABOUT_SECONDS

    def _refused(self, reason: str) -> RunError:
        return RunError(f"the index in {self.place} {reason}; choose another name for the index")

    @property
    def about(self) -> About:
        """What holds for all of it; read again now and then."""
        if time.monotonic() > self._about_until:
            try:
                self.check(self._wanted)
            except RunError as error:  # somebody has replaced it meanwhile
                raise EngineError(str(error)) from None
        return self._about

    def commit(self, about: About, *, source: str | None = None) -> None:
        """Write what holds for the index, and for one source; build what searching fast needs."""
        said: dict[str, object] = {"index": about.as_dict()}
        key = "" if source is None else f"source {to_utf8(source)}"
        if source is not None and source in about.sources:
            said[key], key = dict(about.sources[source]), ""
        self.write_about(said, gone=key)
        self._about_until = 0.0
        self.complete()

    def get(self, names: Sequence[str], *, vectors: bool = False) -> list[Item]:
        """Return items by their names; those that are not there are left out."""
        found, fields = dict[str, Item](), ALL_FIELDS if vectors else FIELDS
        for some in pages(names, page_size(fields)):
            rows = self.rows(fields, [number_of(name) for name in some])
            found |= {item.name: item for item in self._items_in(rows)}
        return [found[name] for name in names if name in found]

    def find(self, key: str) -> str | None:
        """Return the name of the item with this key; None if there is none."""
        rows = self.rows(NAMES, [int(key, 16)]) if _KEY.fullmatch(key) else []
        return next((self._name(row["id"], row["name"]) for row in rows), None)

    def items(self, source: str | None = None, *, vectors: bool = False) -> Iterator[Item]:
        """Yield all items, or those of one source, in the order of their numbers."""
        return self._items_in(self.scan(ALL_FIELDS if vectors else FIELDS, source, 0, LAST))

    def sample(self, count: int, *, seed: int = 0) -> list[str]:
        """Return the names of the `count` items that are drawn first, see `draw`."""
        rows = [*self.scan(NAMES, None, first_drawn(seed), count)]
        rows += self.scan(NAMES, None, 0, count - len(rows)) if len(rows) < count else []
        return [*dict.fromkeys(self._name(row["id"], row["name"]) for row in rows)]

    # What a database holds

    def row_of(self, item: Item) -> dict[str, Any]:
        """Return FIELDS of an item."""
        return {
            "id": number_of(item.name),
            "name": to_utf8(item.name),
            "label": item.label or "",
            "source": to_utf8(item.source),
            "digest": item.digest,
            "columns": dict(item.columns),
        }

    def _read_about(self) -> About | None:
        """Return what the second table says: keys "index" and "source PATH", values in JSON."""
        items, notes = self.fields()
        if not items:
            return None
        if not (items >= {*ALL_FIELDS} and notes >= {"key", "value"}):
            raise EngineError(
                f"{self.place}: something of this name exists, but nofuss (or this version of it) "
                "did not make it; choose another name"
            )
        rows = self.read_about()
        try:
            said = {key: parse_json(v.encode()) if isinstance(v, str) else v for key, v in rows}
            if "index" not in said:
                raise ValueError("no row has the key 'index'")
            sources = {
                from_utf8(key.removeprefix("source ")): said[key]
                for key in sorted(said)
                if key.startswith("source ")
            }
            return About.from_dict(said["index"], sources)
        except WrongFormatError as error:
            raise self._refused(str(error)) from None
        except (AttributeError, TypeError, ValueError) as error:
            raise self._foreign(f"what it says of itself can't be used ({error})") from None

    def _name(self, number: Any, name: Any) -> str:
        """Return an item's name, which its number must be a digest of."""
        try:
            if number_of(read := from_utf8(name)) == number:
                return read
        except (TypeError, UnicodeError):
            pass
        raise self._foreign(f"item {number!r:.24} has a name that is not its own, {name!r:.60}")

    def read_hits(self, found: Iterable[tuple[Any, Any, Any]]) -> Hits:
        """Return what has these numbers, names and squared distances, nearest first."""
        hits = list[tuple[float, str]]()
        for number, name, squared in found:
            if not isinstance(squared, float) or not -1e-3 < squared < 4.01:  # rounding of 0 to 2
                raise self._foreign(f"it answers with a distance of {squared!r:.24}")
            hits.append((max(0.0, squared) ** 0.5, self._name(number, name)))
        hits.sort()
        return Hits([name for _, name in hits], [distance for distance, _ in hits])

    def _items_in(self, rows: Iterable[Row]) -> Iterator[Item]:
        """Return the items in rows of FIELDS or ALL_FIELDS."""
        about = self.about
        types = {name: kind for name, kind in about.types.items() if name != LABEL}
        return (self._item(row, about.dim, types) for row in rows)

    def _item(self, row: Row, dim: int, types: Mapping[str, Type]) -> Item:
        """Return the item in a row.

        Columns without a type here, and values of another type, are left out: a filter can't find
        them, and the next update writes them again.
        """
        name, vector, features = self._name(row["id"], row["name"]), None, None
        try:
            # A client may have read the JSON; PostgreSQL writes 1e300 as an integer of 301 digits.
            columns = row["columns"]
            if isinstance(columns, str | bytes):
                columns = json.loads(columns, parse_int=float)
            texts = (row["source"], row["digest"], row["label"] or "")
            is_sound = isinstance(columns, dict) and all(type(text) is str for text in texts)
            if "embedding" in row:
                vector = torch.from_numpy(np.array(row["embedding"], np.float32))
                is_sound &= vector.shape == (dim,) and are_unit(vector[None])
                features = from_text(row["features"])
        except (TypeError, ValueError, RecursionError):
            is_sound = False
        if not is_sound:
            raise self._foreign(f"item {name!r:.80} has a field of another kind")
        source, digest, label = texts
        known = {name: value for name, value in columns.items() if is_value(value, types.get(name))}
        source = from_utf8(source)
        return Item(name, label or None, known, source, digest, vector, features=features)

    def _foreign(self, wrong: str) -> EngineError:
        return EngineError(
            f"{self.place}: {wrong}, which nofuss did not write; index into another name"
        )


def open_engine(url: str, wanted: About, *, writes: bool = False, create: bool = False) -> Index:
    """Connect to the index that a URL names, which must be of the model of `wanted`.

    writes: for `nofuss index`, which waits for others that write where only one can. create: make
    an empty index if there is none.
    """
    address = read_url(url, flag="--to" if writes else "--index")
    engine: Engine
    if address.engine == "postgresql":
        from nofuss.search.engines.postgres import Postgres

        engine = Postgres(address)
    else:
        from nofuss.search.engines.milvus import Milvus

        engine = Milvus(address, writes=writes)
    try:
        engine.check(wanted, create=create)
    except NofussError:
        engine.close()
        raise
    return engine


def pages(items: Sequence[_Any], size: int = PAGE) -> Iterable[Sequence[_Any]]:
    """Return parts of at most `size` items."""
    return (items[start : start + size] for start in range(0, len(items), size))


def page_size(fields: Fields) -> int:
    """Return how many items are read at once with these fields."""
    return PAGE_WITH_VECTORS if "embedding" in fields else PAGE


def to_utf8(name: str) -> str:
    """Return a file name as text that every database holds: other bytes as %80 to %FF, % as %25."""
    escaped = name.replace("%", "%25")
    return re.sub("[\udc80-\udcff]", lambda byte: f"%{ord(byte[0]) - 0xDC00:02X}", escaped)


def from_utf8(text: str) -> str:
    """Return the file name that `to_utf8` was given."""
    return unquote(text, errors="surrogateescape")


def as_text(features: Tensor | None) -> str:
    """Return features as text: base64 of their halves, "" for none."""
    if features is None or len(features) > _WIDEST:
        return ""
    return base64.b64encode(features.half().numpy().tobytes()).decode()


def from_text(text: str) -> Tensor | None:
    """Return the features that `as_text` was given; ValueError for anything else."""
    if not text:
        return None
    features = torch.frombuffer(bytearray(base64.b64decode(text, validate=True)), dtype=torch.half)
    if not are_unit(features.float()[None]):
        raise ValueError("not of unit length")
    return features
