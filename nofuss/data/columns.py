"""Further columns of a table: price, shop, date, … of each item, for filters and results.

The type of a column is that of all its cells: bool (true, false), number, date (ISO 8601, with or
without a time), otherwise text. An empty cell is None. Dates are held as text in one form, in which
the alphabetical order is that of time.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime
from math import isfinite
from typing import Any, Literal

from nofuss.errors import visible

Type = Literal["number", "text", "date", "bool"]
Value = float | str | bool | None

# No leading zeros: 007 is a code. No digits that a float would lose.
_NUMBER = re.compile(r"[+-]?(0|[1-9][0-9]{0,14})?(\.[0-9]{0,15})?([eE][+-]?[0-9]{1,3})?")
_DATE = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}([T ][0-9]{2}:[0-9]{2}(:[0-9]{2})?)?")


@dataclass(frozen=True)
class Column:
    """One value for each item."""

    type: Type
    values: Sequence[Value]

    def subset(self, indices: Iterable[int]) -> "Column":
        """Return the values of these items in this order."""
        return Column(self.type, [self.values[i] for i in indices])


def read_column(cells: Sequence[str]) -> Column | None:
    """Return the column that these cells of a table spell; None if all of them are empty."""
    texts = [cell.strip() for cell in cells]
    if not any(texts):
        return None
    kinds: tuple[Type, ...] = ("bool", "number", "date")
    for kind in kinds:
        values = [None if not text else read_value(text, kind) for text in texts]
        if all((value is None) == (not text) for value, text in zip(values, texts, strict=True)):
            return Column(kind, values)
    return Column("text", [clean(text) if text else None for text in texts])


def as_column(values: "Column | Sequence[Any]") -> Column:
    """Return a column of Python values: bools, numbers, dates or text, and None."""
    if isinstance(values, Column):
        return values
    known = [value for value in values if value is not None]
    kinds: dict[Type, Any] = {"bool": bool, "number": (int, float), "date": date, "text": str}
    for kind, of in kinds.items():
        if all(isinstance(value, of) for value in known):
            return Column(kind, [None if v is None else _plain(v, kind) for v in values])
    raise ValueError("a column holds bools, numbers, dates or text, and None; got a mixture")


def _plain(value: Any, kind: Type) -> Value:
    if kind == "number":
        if not isfinite(value):
            raise ValueError(f"a column holds {value}; use None for a missing number")
        return float(value)
    if kind == "date":
        return read_value(value.isoformat()[:19], "date")
    return clean(value) if kind == "text" else bool(value)


def read_value(text: str, kind: Type) -> Value:
    """Return what a text says as a value of this type; None if it says nothing of the kind."""
    match kind:
        case "bool":
            return {"true": True, "false": False}.get(text.lower())
        case "number":
            digits = any(c in "0123456789" for c in text.lower().split("e")[0])
            number = float(text) if digits and _NUMBER.fullmatch(text) else None
            return None if number in (float("inf"), float("-inf")) else number
        case "date":
            try:
                moment = datetime.fromisoformat(text) if _DATE.fullmatch(text) else None
            except ValueError:
                return None
            return None if moment is None else moment.isoformat(timespec="seconds")
        case "text":
            return clean(text)


def clean(text: str) -> str:
    """Return a text that every database can hold: no control characters, no broken Unicode."""
    return visible(text.encode("utf-8", "backslashreplace").decode())


def shown(value: Value, kind: Type) -> str:
    """Return a value for a person: 20, not 20.0; 2024-05-01, not 2024-05-01T00:00:00."""
    if value is None:
        return "–"
    if kind == "bool":
        return "true" if value else "false"
    if kind == "number" and not isinstance(value, str):
        return f"{value:.15g}"
    return str(value).removesuffix("T00:00:00") if kind == "date" else str(value)


def cells_of(columns: Mapping[str, Column], item: int) -> dict[str, Value]:
    """Return the values of an item, without those that are None."""
    found = {name: column.values[item] for name, column in columns.items()}
    return {name: value for name, value in found.items() if value is not None}
