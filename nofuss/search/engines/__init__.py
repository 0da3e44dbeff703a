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

import numpy as np
import torch
from torch import Tensor

from nofuss.data.columns import Type
from nofuss.errors import EngineError, NofussError, RunError
from nofuss.files import parse_json
from nofuss.model.manifest import WrongFormatError
from nofuss.search.engines.url import Url, read_url
from nofuss.search.filter import LABEL
from nofuss.search.index import (
    About,
    Hits,
    Index,
    Item,
    Origin,
    are_unit,
    is_value,
    key_of,
)

ANSWER_SECONDS = 8.0
"""How long a database may take to answer; the page answers within ten."""
ABOUT_SECONDS = 10.0
"""How long what was read of a whole index is believed: others may add columns."""
PAGE, PAGE_WITH_VECTORS = 10_000, 2_000
"""Most items in one query; Milvus allows 16,384."""
FIELDS = ("id", "name", "label", "source", "digest", "columns")
"""What a database holds of an item, besides its `embedding` and `features`."""
VECTORS = ("embedding", "features")
WIDEST = 24_000
"""Features that fit the longest text of Milvus; an item with more keeps none."""
_KEY = re.compile("[0-7][0-9a-f]{15}")
_Any = TypeVar("_Any")
Row = Mapping[str, Any]


class Engine(Index):
    """An index in a database: what is the same in all of them."""

    matrix = None

    def __init__(self, url: Url) -> None:
        self._url, self.place = url, url.shown
        self._wanted, self._about, self._about_until = About("", 0), About("", 0), 0.0

    @abstractmethod
    def read_about(self) -> About | None:
        """Return what holds for the index; None if it does not exist."""

    @abstractmethod
    def create(self, about: About) -> None:
        """Make an empty index, unless another process just has."""

    @abstractmethod
    def rows(self, numbers: Sequence[int], fields: Sequence[str]) -> Iterable[Row]:
        """Return the fields of the items with these numbers, at most a page of them."""

    @abstractmethod
    def between(self, first: int, last: int, count: int) -> list[Row]:
        """Return id and name of at most `count` items whose numbers lie between two."""

    def check(self, wanted: About, *, create: bool = False) -> None:
        """Refuse an index of another model, dimension or format; make one if there is none."""
        try:
            found = self.read_about()
        except WrongFormatError as error:
            reason = str(error)
        else:
            if found is None and create:
                self.create(wanted)
                return self.check(wanted)
            if found is None:
                raise RunError(f"no index in {self.place}; make one: nofuss index RUN DIR --to URL")
            if (found.dim, found.model) == (wanted.dim, wanted.model):
                self._wanted, self._about = wanted, found
                self._about_until = time.monotonic() + ABOUT_SECONDS
                return
            reason = "was made by another model than that of the run"
            if found.dim != wanted.dim:
                reason = (
                    f"holds vectors of {found.dim} dimensions, but the model gives {wanted.dim}"
                )
        raise RunError(f"the index in {self.place} {reason}; choose another name for the index")

    @property
    def about(self) -> About:
        """What holds for all of it; read again now and then."""
        if time.monotonic() > self._about_until:
            try:
                self.check(self._wanted)
            except RunError as error:  # somebody has replaced it meanwhile
                raise EngineError(str(error)) from None
        return self._about

    def get(self, names: Sequence[str], *, vectors: bool = False) -> list[Item]:
        """Return items by their names; those that are not there are left out."""
        about, found = self.about, dict[str, Item]()
        fields = (*FIELDS, *VECTORS) if vectors else FIELDS
        for some in pages(names, PAGE_WITH_VECTORS if vectors else PAGE):
            rows = self.rows([number_of(name) for name in some], fields)
            found |= {item.name: item for item in checked_items(rows, about, self.place)}
        return [found[name] for name in names if name in found]

    def find(self, key: str) -> str | None:
        """Return the name of the item with this key; None if there is none."""
        if _KEY.fullmatch(key):
            for row in self.rows([int(key, 16)], ("id", "name")):
                return checked_name(row["id"], row["name"], self.place)
        return None

    def sample(self, count: int, *, seed: int = 0) -> list[str]:
        """Return the names of at most `count` items; any range of digests is a sample."""
        start = int(np.random.default_rng(seed).integers(2**63))
        rows = self.between(start, 2**63 - 1, count)
        rows += self.between(0, start - 1, count - len(rows))
        return [checked_name(row["id"], row["name"], self.place) for row in rows]


def open_engine(url: str, *, flag: str, wanted: About, create: bool = False) -> Index:
    """Connect to the index that a URL names, which must be of the model of `wanted`.

    flag: where the user has given the URL. create: make an empty index if there is none.
    """
    address = read_url(url, flag=flag)
    engine: Engine
    if address.engine == "postgresql":
        from nofuss.search.engines.postgres import Postgres

        engine = Postgres(address)
    else:
        from nofuss.search.engines.milvus import Milvus

        engine = Milvus(address)
    try:
        engine.check(wanted, create=create)
    except NofussError:
        engine.close()
        raise
    return engine


def pages(items: Sequence[_Any], size: int = PAGE) -> Iterable[Sequence[_Any]]:
    """Return parts of at most `size` items."""
    return (items[start : start + size] for start in range(0, len(items), size))


def number_of(name: str) -> int:
    """Return an item's number in a database."""
    return int(key_of(name), 16)


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


def as_text(features: Tensor | None) -> str:
    """Return features as text: base64 of their halves, "" for none."""
    if features is None or len(features) > WIDEST:
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


# What a database holds


def checked_about(rows: Iterable[tuple[Any, Any]], place: str) -> About:
    """Return what the second table says: keys "index" and "source PATH", values in JSON."""
    try:
        said = {key: parse_json(v.encode()) if isinstance(v, str) else v for key, v in rows}
        if "index" not in said:
            raise ValueError("no row has the key 'index'")
        sources = {
            from_utf8(key.removeprefix("source ")): types
            for key, types in said.items()
            if key.startswith("source ")
        }
        return About.from_dict(said["index"], dict(sorted(sources.items())))
    except WrongFormatError:
        raise
    except (AttributeError, TypeError, ValueError) as error:
        raise _foreign(place, f"what it says of itself can't be used ({error})") from None


def checked_name(number: Any, name: Any, place: str) -> str:
    """Return an item's name, which its number must be a digest of."""
    try:
        if number_of(read := from_utf8(name)) == number:
            return read
    except (TypeError, UnicodeError):
        pass
    raise _foreign(place, f"item {number!r:.24} has a name that is not its own, {name!r:.60}")


def checked_hits(found: Iterable[tuple[Any, Any, Any]], place: str) -> Hits:
    """Return number, name and squared distance of what was found, in the order of distance."""
    hits = list[tuple[float, str]]()
    for number, name, squared in found:
        if not isinstance(squared, float) or not -1e-3 < squared < 4.01:  # 0 to 2, but for rounding
            raise _foreign(place, f"it answers with a distance of {squared!r:.24}")
        hits.append((max(0.0, squared) ** 0.5, checked_name(number, name, place)))
    hits.sort()
    return Hits([name for _, name in hits], [distance for distance, _ in hits])


def checked_items(rows: Iterable[Row], about: About, place: str) -> Iterator[Item]:
    """Yield the items in rows; columns that `about` does not know of are left out."""
    types = {name: kind for name, kind in about.types.items() if name != LABEL}
    return (checked_item(row, about.dim, types, place) for row in rows)


def checked_item(row: Row, dim: int, types: Mapping[str, Type], place: str) -> Item:
    """Return the item in a row of FIELDS and, if asked for, VECTORS.

    Columns without a type here, and values of another type, are left out: a filter can't find them,
    and the next update writes them again.
    """
    name = checked_name(row["id"], row["name"], place)
    label, source, digest = row["label"], row["source"], row["digest"]
    columns, vector, features, wrong = _object(row["columns"]), None, None, ""
    if label is not None and type(label) is not str:
        wrong = "label that is not text"
    elif type(source) is not str or type(digest) is not str:
        wrong = "source and digest that are not text"
    elif columns is None:
        wrong = "columns that are not a JSON object"
    elif "embedding" in row:
        try:
            vector = torch.from_numpy(np.array(row["embedding"], np.float32))
        except (TypeError, ValueError):
            vector = torch.empty(0)
        if vector.shape != (dim,) or not are_unit(vector[None]):
            wrong = f"vector that is not of {dim} dimensions and unit length"
        try:
            features = from_text(row["features"])
        except (TypeError, ValueError):
            wrong = "text that is not its features"
    if wrong or columns is None:
        raise _foreign(place, f"item {name!r:.80} has a {wrong}")
    known = {name: value for name, value in columns.items() if is_value(value, types.get(name))}
    origin = Origin(from_utf8(source), digest)
    return Item(name, label or None, known, origin, vector, features=features)


def _object(value: Any) -> dict[str, Any] | None:
    """Return a JSON object that a client may have read already; None for anything else."""
    try:
        # PostgreSQL writes 1e300 as an integer of 301 digits.
        read = json.loads(value, parse_int=float) if isinstance(value, str | bytes) else value
    except (ValueError, RecursionError):
        return None
    return read if isinstance(read, dict) else None


def _foreign(place: str, wrong: str) -> EngineError:
    return EngineError(f"{place}: {wrong}, which nofuss did not write; index into another name")
