"""The run's own index as `nofuss index` writes it: in memory, saved now and then as a whole.

What it notes of its items is in the index's `extra`: name → [source, size, mtime_ns, digest].
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from nofuss.data.columns import Column, Type, cells_of, facts_digest
from nofuss.search.index import Index
from nofuss.search.stores.store import Note, Record, Target

SAVE_SECONDS = 60.0
SAVE_SHARE = 0.1
"""Share of the time that saving may take: a large index is saved less often."""


class Local(Target):
    """An index in memory that calls `save` when a minute or more has passed since the last time."""

    def __init__(self, index: Index, *, save: Callable[[], object] = lambda: None) -> None:
        self.index, self._save, self._due = index, save, time.monotonic() + SAVE_SECONDS
        self._known: dict[str, list[Any]] = index.extra.setdefault("items", {})

    def notes(self, source: str, names: Sequence[str]) -> dict[str, Note]:
        """Return the notes of all items."""
        columns, labels = self.index.table.columns, self.index.labels
        found = {}
        for name, note in self._known.items():
            row = self.index.row(name)
            of, size, mtime_ns, digest = note
            facts = facts_digest(labels[row], cells_of(columns, row))
            found[name] = Note(of, size, mtime_ns, digest, facts)
        return found

    def declare(self, source: str, types: Mapping[str, Type]) -> None:
        """Drop columns of another type: if one is of other sources, `check_types` has refused."""
        table = self.index.table
        for name in [n for n, kind in types.items() if table.types.get(n, kind) != kind]:
            table.drop(name)
        self._columns()[source] = dict(types)

    def put(self, records: Sequence[Record], vectors: Tensor) -> None:
        """Write items, replacing those of the same name."""
        self.discard([record.item.name for record in records])
        self.index.add(
            vectors,
            names=[record.item.name for record in records],
            labels=[record.item.label for record in records],
            columns=self._cells(records),
        )
        self._known.update({item.name: list(note[:-1]) for item, note in records})
        if (began := time.monotonic()) > self._due:
            self._save()
            ended = time.monotonic()
            self._due = ended + max(SAVE_SECONDS, (ended - began) / SAVE_SHARE)

    def revise(self, records: Sequence[Record]) -> None:
        """Replace everything but the vectors of items."""
        rows = [self.index.row(record.item.name) for record in records]
        for row, (item, note) in zip(rows, records, strict=True):
            self.index.labels[row] = item.label
            self._known[item.name] = list(note[:-1])
        self.index.table.replace(rows, self._cells(records))

    def discard(self, names: Sequence[str]) -> None:
        """Remove items; names that are not there are ignored."""
        self.index.remove({name for name in names if name in self.index})
        for name in names:
            self._known.pop(name, None)

    def forget(self, source: str) -> None:
        """Remove the note of a source that has no items any more."""
        self._columns().pop(source, None)

    def sources(self) -> dict[str, Mapping[str, Type]]:
        """Return the sources, and the types of their columns."""
        columns = self._columns()
        return {of: columns.get(of, {}) for of in sorted({of for of, *_ in self._known.values()})}

    def _columns(self) -> dict[str, Any]:
        found: dict[str, Any] = self.index.extra.setdefault("columns", {})
        return found

    def _cells(self, records: Sequence[Record]) -> dict[str, Column]:
        """Return the columns of some records; their types are those declared."""
        cells = [record.item.cells for record in records]
        types: dict[str, Type] = {}
        for source in {record.note.source for record in records}:
            types |= self._columns().get(source, {})
        return {n: Column(kind, [cell.get(n) for cell in cells]) for n, kind in types.items()}
