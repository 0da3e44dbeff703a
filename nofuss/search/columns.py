"""The columns of an index in memory."""

from collections.abc import Mapping, Sequence

from nofuss.data.columns import Column, Type, Value
from nofuss.search.filter import LABEL, Coded, Condition, Mask, as_mask, encode


class ColumnTable:
    """Columns of equal length; items that lack one have None there."""

    def __init__(self, length: int = 0, columns: Mapping[str, Column] | None = None) -> None:
        self.length = length
        own = {n: Column(c.type, list(c.values)) for n, c in (columns or {}).items()}
        self.columns: dict[str, Column] = own
        self._coded_columns: dict[str, Coded] = {}
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
        return as_mask(condition, lambda name: self._coded(name, labels))

    def _coded(self, name: str, labels: Sequence[str | None]) -> Coded:
        if name == LABEL:  # not kept: labels may change
            return encode(labels)
        if name not in self._coded_columns:
            self._coded_columns[name] = encode(self.columns[name].values)
        return self._coded_columns[name]
