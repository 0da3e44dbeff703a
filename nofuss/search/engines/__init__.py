"""Where an index can be kept besides the run's own folder: a database that many machines share.

url (what a user gives, and what must never be shown of it) → milvus | postgres: one `Index` each

An item's number in a database is its key. Writing an item again replaces it, so that an update that
was killed is repeated without harm, and several processes may write parts of one index at once.
What a database holds is checked row by row, as if a stranger had written it.
"""

import re
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import torch

from nofuss.errors import EngineError, NofussError, RunError
from nofuss.model.manifest import WrongFormatError
from nofuss.search.engines.url import read_url
from nofuss.search.index import (
    About,
    Index,
    Item,
    Origin,
    are_unit,
    is_value,
    key_of,
)

ABOUT_SECONDS = 10.0
"""How long what was read of a whole index is believed: others may add columns."""


class Engine(Index, Protocol):
    """An index in a database, which may not be there yet."""

    def read_about(self) -> About | None:
        """Return what holds for the index; None if it does not exist."""

    def create(self, about: About) -> None:
        """Make an empty index, unless another process just has."""


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
        _check(engine, wanted, create)
    except NofussError:
        engine.close()
        raise
    return engine


def _check(engine: Engine, wanted: About, create: bool) -> None:
    """Refuse an index of another model, dimension or format; make one if there is none."""
    try:
        found = engine.read_about()
    except WrongFormatError as error:
        reason = str(error)
    else:
        if found is None and create:
            engine.create(wanted)
            return
        if found is None:
            raise RunError(f"no index in {engine.place}; make one: nofuss index RUN DIR --to URL")
        if found.dim != wanted.dim:
            reason = f"holds vectors of {found.dim} dimensions, but the model gives {wanted.dim}"
        elif found.model != wanted.model:
            reason = "was made by another model than that of the run"
        else:
            return
    raise RunError(f"the index in {engine.place} {reason}; choose another name for the index")


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


# What a database holds


def checked_about(rows: Mapping[Any, Any], place: str) -> About:
    """Return what the rows of the second table say: "index", and "source PATH" for each source."""
    try:
        sources = {
            from_utf8(key.removeprefix("source ")): types
            for key, types in rows.items()
            if key.startswith("source ")
        }
        return About.from_dict(rows["index"], dict(sorted(sources.items())))
    except WrongFormatError:
        raise
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise _foreign(place, f"what it says of itself can't be used ({error})") from None


def checked_name(number: Any, name: Any, place: str) -> str:
    """Return an item's name, which its number must be a digest of."""
    read = from_utf8(name) if isinstance(name, str) else None
    if read is None or number_of(read) != number:
        raise _foreign(place, f"item {number!r:.24} has a name that is not its own, {name!r:.60}")
    return read


def checked_distance(squared: Any, place: str) -> float:
    """Return the root of a squared distance, a number from 0 to 2 but for rounding."""
    if not isinstance(squared, float) or not -1e-3 < squared < 4.01:
        raise _foreign(place, f"it answers with a distance of {squared!r:.24}")
    return float(max(0.0, squared) ** 0.5)


def checked_item(row: Mapping[str, Any], about: About, place: str) -> Item:
    """Return the item in a row: id, name, label, source, digest, columns and, if asked for, vector.

    Columns that `about` does not know of, and values of another type, are left out: a filter can't
    find them, and the next update writes them again.
    """
    name, types = checked_name(row["id"], row["name"], place), about.types
    label, source, digest, columns = (row[f] for f in ("label", "source", "digest", "columns"))
    wrong = ""
    if label is not None and type(label) is not str:
        wrong = "label that is not text"
    elif type(source) is not str or type(digest) is not str:
        wrong = "source and digest that are not text"
    elif not isinstance(columns, dict):
        wrong = "columns that are not a JSON object"
    vector = None
    if not wrong and "embedding" in row:
        try:
            vector = torch.from_numpy(np.array(row["embedding"], np.float32))
        except (TypeError, ValueError):
            vector = torch.empty(0)
        if vector.shape != (about.dim,) or not are_unit(vector[None]):
            wrong = f"vector that is not of {about.dim} dimensions and unit length"
    if wrong:
        raise _foreign(place, f"item {name!r:.80} has a {wrong}")
    known = {name: value for name, value in columns.items() if is_value(value, types.get(name))}
    return Item(name, label or None, known, Origin(from_utf8(source), digest), vector)


def _foreign(place: str, wrong: str) -> EngineError:
    return EngineError(f"{place}: {wrong}, which nofuss did not write; index into another name")
