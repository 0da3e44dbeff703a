"""The columns of an index in memory, and which of its rows pass a filter."""

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nofuss.data.columns import Column, Type, Value
from nofuss.search.where import Compare, Condition, Every, Null, Operator, Some

LABEL = "label"
"""The name of the label in filters; no column of a table can have it."""
Mask = NDArray[np.bool_]
OPERATORS: dict[Operator, Callable[[Any, Any], Any]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


class ColumnTable:
    """Columns of equal length; items that lack one have None there."""

    def __init__(self, length: int = 0, columns: Mapping[str, Column] | None = None) -> None:
        self.length = length
        own = {n: Column(c.type, list(c.values)) for n, c in (columns or {}).items()}
        self.columns: dict[str, Column] = own
        self._coded_columns: dict[str, _Coded] = {}
        for name, column in self.columns.items():
            if len(column.values) != length:
                raise ValueError(f"{len(column.values)} values of {name} for {length} items")

    @property
    def types(self) -> dict[str, Type]:
        """The type of each column."""
        return {name: column.type for name, column in self.columns.items()}

    def extend(self, count: int, new: Mapping[str, Column]) -> None:
        """Append `count` items; all or nothing."""
        for name, column in new.items():
            if len(column.values) != count:
                raise ValueError(f"{len(column.values)} values of {name} for {count} items")
            if name == LABEL:
                raise ValueError("a column can't be called label; rename it")
            if self.types.get(name, column.type) != column.type:
                got = f"column {name} is {column.type} here, but {self.types[name]} in the index"
                raise ValueError(f"{got}; rename the column")
        for name in {**self.columns, **new}:
            if name not in self.columns:
                self.columns[name] = Column(new[name].type, [None] * self.length)
            values = self.columns[name].values
            assert isinstance(values, list)  # extended in place, which costs what is new
            values.extend(new[name].values if name in new else [None] * count)
        self.length += count
        self._coded_columns.clear()

    def replace(self, rows: Sequence[int], new: Mapping[str, Column]) -> None:
        """Replace all values of some rows; those of columns that are not given become None."""
        for name in {**self.columns, **new}:
            column = self.columns.get(name)
            values = list[Value]([None] * self.length if column is None else column.values)
            for i, row in enumerate(rows):
                values[row] = new[name].values[i] if name in new else None
            kind = new[name].type if column is None else column.type
            self.columns[name] = Column(kind, values)
        self._coded_columns.clear()

    def drop(self, name: str) -> None:
        """Remove a column."""
        del self.columns[name]
        self._coded_columns.clear()

    def kept(self, rows: Sequence[int]) -> "ColumnTable":
        """Return the table of these rows; a column without any value is dropped."""
        columns = {name: column.subset(rows) for name, column in self.columns.items()}
        used = {name: c for name, c in columns.items() if any(v is not None for v in c.values)}
        return ColumnTable(len(rows), used)

    def matching(self, condition: Condition, labels: Sequence[str | None]) -> Mask:
        """Return which rows pass a filter."""
        if isinstance(condition, Compare | Null):
            of = self._coded(condition.column, labels)
            if isinstance(condition, Null):
                return np.asarray((of.codes < 0) == condition.missing)
            compare = OPERATORS[condition.operator]
            passes = [bool(compare(value, condition.value)) for value in of.values]
            return np.array([*passes, False])[of.codes]  # −1, no value, is the last
        if (one_of := _one_of(condition)) is not None:  # thousands of classes, in one pass
            column, wanted = one_of
            of = self._coded(column, labels)
            return np.array([*(value in wanted for value in of.values), False])[of.codes]
        every = isinstance(condition, Every)
        mask = np.full(self.length, every)
        for part in condition.parts:
            passing = self.matching(part, labels)
            mask = mask & passing if every else mask | passing
        return mask

    def _coded(self, name: str, labels: Sequence[str | None]) -> "_Coded":
        if name == LABEL:  # not kept: labels may change
            return _encode(labels)
        if name not in self._coded_columns:
            self._coded_columns[name] = _encode(self.columns[name].values)
        return self._coded_columns[name]


def _one_of(condition: Every | Some) -> tuple[str, set[Any]] | None:
    """Return column and values where a filter asks for one of several values of a column."""
    equal = [p for p in condition.parts if isinstance(p, Compare) and p.operator == "=="]
    columns = {part.column for part in equal}
    if isinstance(condition, Every) or len(equal) < len(condition.parts) or len(columns) != 1:
        return None
    return columns.pop(), {part.value for part in equal}


class _Coded(NamedTuple):
    """A column as positions in its distinct values: a filter looks at each value once."""

    codes: NDArray[np.int64]
    """(N,), −1 for None."""
    values: list[Any]


def _encode(values: Sequence[Value]) -> _Coded:
    place: dict[Value, int] = {}
    codes = [-1 if value is None else place.setdefault(value, len(place)) for value in values]
    return _Coded(np.array(codes, np.int64), list(place))
