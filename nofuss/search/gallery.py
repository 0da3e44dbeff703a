"""Keep an index up to date with folders of pictures or files of arrays: embed only what changed.

A picture is unchanged if size and time of change are the same; otherwise, or if it had just been
written when it was last read, its content is compared. An item of an array is compared by content.
Label and columns may change without embedding again. Nothing is written into the data.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from nofuss.data.collection import Collection, printable
from nofuss.data.columns import Column, cells_of, facts_digest
from nofuss.data.decode import MAX_FILE
from nofuss.data.items import file_of, read_item
from nofuss.errors import DataError
from nofuss.files import digest
from nofuss.model.encoder import Encoder
from nofuss.progress import Progress, silent
from nofuss.search.index import Label
from nofuss.search.items import item_labels, item_names, source_of
from nofuss.search.stores.store import Item, Note, Record, Target

FRESH_NS = 2_000_000_000
"""A file read so soon after its change may change again without a new time stamp."""
CHUNK = 256


class Version(NamedTuple):
    """An item when it was embedded: size and time in the file system, digest of the content."""

    size: int
    mtime_ns: int
    digest: str


@dataclass
class Plan:
    """How an index differs from a source of items."""

    source: str
    names: list[str]
    labels: list[Label]
    columns: Mapping[str, Column] = field(default_factory=dict)
    versions: dict[int, Version] = field(default_factory=dict)
    stale: list[int] = field(default_factory=list)
    """Items to embed: new, or changed."""
    replaced: set[int] = field(default_factory=set)
    """Those of them that are not new."""
    unchanged: list[int] = field(default_factory=list)
    revised: list[int] = field(default_factory=list)
    """Those of the unchanged whose label, columns or time of change are others now."""
    relabelled: int = 0
    """How many of the revised have another label or other columns."""
    gone: list[str] = field(default_factory=list)
    """Names to remove from the index: their items no longer exist."""
    unreadable: list[str] = field(default_factory=list)

    def record(self, item: int) -> Record:
        """Return what is written of an item."""
        label, cells = self.labels[item], cells_of(self.columns, item)
        note = Note(self.source, *self.versions[item], facts_digest(label, cells))
        return Record(Item(self.names[item], label, cells), note)


@dataclass
class Changes:
    """What an update did."""

    added: int = 0
    changed: int = 0
    removed: int = 0
    revised: int = 0
    """Items that have another label or other columns, and were not embedded again."""
    unchanged: int = 0
    unreadable: list[str] = field(default_factory=list)

    @property
    def wrote(self) -> bool:
        """Whether other vectors are in the index now."""
        return bool(self.added or self.changed or self.removed)

    def describe(self) -> str:
        """Return words like "12 new, 1 changed, 3 removed, 11,772 unchanged"."""
        counts = {"new": self.added, "changed": self.changed, "removed": self.removed}
        counts |= {"with new labels or columns": self.revised, "unchanged": self.unchanged}
        counts |= {"unreadable": len(self.unreadable)}
        return ", ".join(f"{n:,} {what}" for what, n in counts.items() if n) or "nothing"


def plan(
    target: Target,
    collection: Collection,
    path: Path | None,
    *,
    progress: Progress = silent,
) -> Plan:
    """Compare the items at `path` with what the index holds of it; ignore other sources.

    New files are read for it.
    """
    names = item_names(collection, path)
    todo = Plan(source_of(path), names, item_labels(collection), collection.columns)
    check_types(target, todo.source, collection.columns)
    known = target.notes(todo.source, names)
    present = set(names)
    todo.gone = [
        name for name, note in known.items() if note.source == todo.source and name not in present
    ]
    places = {name: i for i, name in enumerate(names)}  # of a name that is listed twice: the last
    for done, (name, i) in enumerate(places.items()):
        if done % CHUNK == 0:
            progress("comparing files with the index", done, len(places))
        note = known.get(name)
        before = None if note is None else Version(note.size, note.mtime_ns, note.digest)
        try:
            todo.versions[i] = _version(collection, i, before)
        except OSError as error:
            todo.unreadable.append(f"{printable(name)}: {error.strerror}")
            todo.gone += [name] if name in known else []
            continue
        if note is None or note.digest != todo.versions[i].digest:
            todo.stale.append(i)
            todo.replaced |= {i} if note is not None else set()
            continue
        todo.unchanged.append(i)
        if todo.labels[i] is None and note.source != todo.source:
            continue  # indexed before with its class folder: keep that source and label
        if (now := todo.record(i).note) != note:
            todo.revised.append(i)
            todo.relabelled += now.facts != note.facts
    progress("comparing files with the index", len(places), len(places))
    return todo


def check_types(target: Target, source: str, columns: Mapping[str, Column]) -> None:
    """Raise DataError if a column has another type in another source."""
    for of, types in target.sources().items():
        for name, column in columns.items():
            if of != source and types.get(name, column.type) != column.type:
                raise DataError(
                    f"column {name} is {column.type} in {printable(source)}, but {types[name]} in "
                    f"{printable(of)}; rename it in one of them"
                )


def update(
    target: Target,
    encoder: Encoder,
    collection: Collection,
    todo: Plan,
    *,
    progress: Progress = silent,
) -> Changes:
    """Carry out a plan in such an order that a killed update can be repeated."""
    target.declare(todo.source, {name: column.type for name, column in todo.columns.items()})
    target.revise([todo.record(i) for i in todo.revised])
    target.discard(todo.gone)
    changes = Changes(removed=len(todo.gone), revised=todo.relabelled)
    changes.unchanged = len(todo.unchanged) - todo.relabelled
    changes.unreadable += todo.unreadable
    progress("embedding", 0, len(todo.stale))
    for start in range(0, len(todo.stale), CHUNK):
        chosen = todo.stale[start : start + CHUNK]
        found = encoder.embed_readable(collection.subset(chosen))
        rows = [chosen[at] for at in found.readable]
        target.put([todo.record(i) for i in rows], found.values[found.readable])
        lost = todo.replaced.intersection(chosen).difference(rows)
        target.discard([todo.names[i] for i in lost])
        changed = len(todo.replaced.intersection(rows))
        changes.changed += changed
        changes.added += len(rows) - changed
        changes.unreadable += [str(error) for _, error in sorted(found.unreadable.items())]
        progress("embedding", start + len(chosen), len(todo.stale))
    return changes


def remove_source(target: Target, path: Path | None) -> int:
    """Remove all items of a source from the index; return how many there were."""
    source = source_of(path)
    notes = target.notes(source, ())
    names = [name for name, note in notes.items() if note.source == source]
    target.discard(names)
    target.forget(source)
    return len(names)


def _version(collection: Collection, item: int, before: Version | None) -> Version:
    """Return the item's present version; read its content only if it may have changed."""
    if collection.kind != "pictures":
        if collection.array is None:
            raise DataError(
                f"{collection.name} can't be indexed: its items have no names; use arrays"
            )
        content = collection.array[item].tobytes()
        return Version(len(content), 0, digest(content))
    path = collection.paths[item]
    status = file_of(path).stat()
    size, mtime_ns = status.st_size, status.st_mtime_ns
    if before is not None and (size, mtime_ns) == (before.size, before.mtime_ns):
        return before
    if time.time_ns() - mtime_ns < FRESH_NS:
        mtime_ns = 0  # never equal, so that the content is compared the next time
    return Version(size, mtime_ns, digest(read_item(path, limit=MAX_FILE)))
