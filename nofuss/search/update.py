"""`nofuss index`: keep an index up to date with folders of pictures or files of arrays.

Only what is new or has another content is embedded; label and columns may change without. Nothing
is written into the data. The order (revise, delete, embed) is such that an update that was killed
is repeated without harm. The run itself is only read where the index is in a database, so that
several commands may write parts of one index at once.
"""

import json
import logging
import os
import time
from collections.abc import Container, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import torch

from nofuss.config import is_named_data
from nofuss.data import corrections
from nofuss.data.collection import Collection, printable
from nofuss.data.columns import cells_of
from nofuss.data.items import content_keys
from nofuss.data.open import open_data
from nofuss.data.readers.folder import labelling_of
from nofuss.distributed import processes
from nofuss.errors import DataError, UsageError
from nofuss.model.encoder import Encoded, Encoder, check_fits, load
from nofuss.model.manifest import clear
from nofuss.model.onnx import accelerate
from nofuss.progress import Progress, silent, working
from nofuss.ranking.neighbours import nearest
from nofuss.run.directory import Run
from nofuss.search.engines import open_engine
from nofuss.search.feedback import corrected, read_feedback
from nofuss.search.folder import FolderIndex
from nofuss.search.index import BUILT_IN, About, Index, Item, vectors_of
from nofuss.search.verdict import calibrated, with_features

log = logging.getLogger("nofuss")

CHUNK = 256
SAVE_SECONDS, SAVE_FRACTION = 60.0, 0.1
"""A folder is saved at most once a minute, and saving may take this fraction of the time."""
_HASHED = 4096  # files whose content is compared at a time
_READ = 10_000  # items that are compared with all queries at a time
_NAMED = 20  # unreadable pictures that are listed in the terminal
QUERIES, K, MOST_READ = 100, 10, 2_000_000
"""How many items the recall of a database is measured on, and the most that are read for it."""


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

    def describe(self) -> str:
        """Return words like "12 new, 1 changed, 3 removed, 11,772 unchanged"."""
        counts = {"new": self.added, "changed": self.changed, "removed": self.removed}
        counts |= {"with new labels or columns": self.revised, "unchanged": self.unchanged}
        counts |= {"unreadable": len(self.unreadable)}
        return ", ".join(f"{n:,} {what}" for what, n in counts.items() if n) or "nothing"


def update_index(
    path: Path,
    data: Path | None,
    *,
    to: str | None = None,
    remove: bool = False,
    device: str = "auto",
    progress: Progress = silent,
) -> Changes:
    """Add the items at a path to a run's index, or update or remove them; other items stay.

    data: the run's own by default. to: the URL of a database, instead of RUN/index.
    """
    if to is not None and processes.world() > 1:
        raise UsageError("nofuss index --to works in one process; leave torchrun out")
    with Run.open(path, write=to is None) as run:
        encoder = load(path, device=device, feedback=False)
        wanted = About(encoder.digest, encoder.dim)
        if to is None:
            index: Index = _own_index(run, wanted)
        else:
            index = open_engine(to, wanted, writes=True, create=not remove)
        with closing(index):
            if remove:
                changes = _remove(index, data or run.config.data)
            else:
                data = data or run.own_data
                changes = _update(index, encoder, _open(run, data, encoder), data, progress)
            with working(progress, f"completing the index in {index.place}"):
                shown = corrected(index, read_feedback(path))
                index.commit(calibrated(shown, encoder))
            log.info(f"{changes.describe()}: {index.count():,} items in {index.place}")
            if to is not None:
                has_new = changes.added or changes.changed or changes.removed
                if has_new and index.count() > 1:
                    log.info(describe_recall(index))
                return changes
            if processes.first():
                clear(run.index, encoder.digest)
            if index.about.open_set is not None:
                log.info(index.about.open_set.describe())
        return changes


def _own_index(run: Run, wanted: About) -> FolderIndex:
    """Return the run's index as it is, or an empty one where there is none of this model."""
    index = FolderIndex.open(run.index, wanted.model, wanted.dim, create=True)
    if not processes.first():  # all processes hold the same, the first one writes it
        index.folder = None
    return index


def index_trained(
    run: Run,
    encoder: Encoder,
    collection: Collection,
    found: Encoded,
    splits: Sequence[str | None],
    *,
    progress: Progress = silent,
) -> None:
    """Put all items of a training into the index of its model, which is in force with the model.

    An index that this model has already, as a training that is resumed may, keeps its other items.
    """
    source, index = source_of(run.config.data), _own_index(run, About(encoder.digest, encoder.dim))
    types = {name: column.type for name, column in collection.columns.items()}
    with working(progress, "writing the index"):
        index.about = index.about._replace(sources={**index.about.sources, source: types})
        items = _described(collection, run.config.data, progress)
        embedded = [
            item._replace(vector=found.vectors[row], split=splits[row])
            for row, item in items.items()
        ]
        index.put(with_features(embedded, found.features[[*items]], len(items)))
        index.commit(calibrated(index, encoder))


# What is there to be indexed


def source_of(path: Path | None) -> str:
    """Return the name of the data at a path in an index."""
    if path is None:
        return BUILT_IN
    return str(path) if is_named_data(path) else os.path.abspath(os.path.expanduser(path))


def items_of(collection: Collection, path: Path | None) -> list[Item]:
    """Return all items with names, labels and columns; what their content is, is not read."""
    source = source_of(path)
    if collection.paths:
        names = [os.path.abspath(picture) for picture in collection.paths]
    else:
        names = [f"{source}#{row}" for row in range(len(collection))]
    labels: list[str | None] = [None] * len(names)
    if collection.has_classes:
        classes = [*collection.class_names, None]  # NO_LABEL is −1
        labels = [classes[label] for label in collection.labels.tolist()]
    return [
        Item(name, label, cells_of(collection.columns, i), source)
        for i, (name, label) in enumerate(zip(names, labels, strict=True))
    ]


def _open(run: Run, data: Path | None, encoder: Encoder) -> Collection:
    collection = open_data(data, labelling=labelling_of(run.config), unlabelled=True)
    if run.corrections is not None and source_of(data) == source_of(run.config.data):
        collection = corrections.corrected(collection, run.corrections)
    check_fits(collection, encoder.embedder.backbone)
    log.info(collection.describe())
    for note in collection.notes:
        log.warning(note)
    return collection


def _described(collection: Collection, data: Path | None, progress: Progress) -> dict[int, Item]:
    """Return row → item with a digest of its content, "" where it can't be read.

    Of a name that is listed twice it is the last.
    """
    count, digests = len(collection), list[str]()
    if collection.paths:
        for start in range(0, count, _HASHED):
            progress("comparing files with the index", start, count)
            some = collection.paths[start : start + _HASHED]
            digests += [key.hex() for key in content_keys(some)]
        progress("comparing files with the index", count, count)
    else:
        keys = collection.keys()  # None: a Dataset of Python, whose items are read one by one
        digests = [""] * count if keys is None else [key.hex() for key in keys]
    items = items_of(collection, data)
    rows = {item.name: row for row, item in enumerate(items)}
    return {row: items[row]._replace(digest=digests[row]) for row in rows.values()}


# How the index differs from it, and what is done about that


def _update(
    index: Index, encoder: Encoder, collection: Collection, data: Path | None, progress: Progress
) -> Changes:
    source = source_of(data)
    types = {name: column.type for name, column in collection.columns.items()}
    for other, others in index.about.sources.items():
        for name, kind in types.items():
            if other != source and others.get(name, kind) != kind:
                raise DataError(
                    f"column {name} is {kind} in {printable(source)}, but {others[name]} in "
                    f"{printable(other)}; rename it in one of them"
                )
    items = _described(collection, data, progress)
    names = {item.name for item in items.values()}
    known = {item.name: item for item in index.items(source)}
    gone = [name for name in known if name not in names]
    known |= {item.name: item for item in index.get([n for n in names if n not in known])}
    changes, revised, stale = Changes(removed=len(gone)), list[Item](), dict[int, Item]()
    for row, item in items.items():
        before = known.get(item.name)
        if before is None or before.digest != item.digest:
            stale[row] = item._replace(split=before and before.split)
            continue
        is_same = (item.label, dict(item.columns)) == (before.label, dict(before.columns))
        if item.label is None and before.source != source:
            is_same = True  # indexed before with its class folder: keep that source and label
        elif not is_same or before.source != source:
            revised.append(item._replace(split=before.split))
        changes.revised += not is_same
        changes.unchanged += is_same
    processes.check_same("pictures", lambda: json.dumps([len(items), [*stale]]))
    about = index.about
    if about.sources.get(source) != types:  # before its items: a filter may name their columns
        index.commit(about._replace(sources={**about.sources, source: types}), source=source)
    index.put(revised)
    index.delete(gone)
    _embed(index, encoder, collection, stale, known, changes, progress)
    for complaint in changes.unreadable[:_NAMED]:
        log.warning(f"left out: {complaint}")
    if len(changes.unreadable) > _NAMED:
        log.warning(f"and {len(changes.unreadable) - _NAMED:,} more left out")
    return changes


def _embed(
    index: Index,
    encoder: Encoder,
    collection: Collection,
    items: Mapping[int, Item],
    known: Container[str],
    changes: Changes,
    progress: Progress,
) -> None:
    """Embed the items in some rows and write them; known ones that can't be read leave the index.

    known: the names of those that are not new.
    """
    backbone, rows = encoder.embedder.backbone, list(items)
    accelerate(backbone, len(rows) * backbone.views, progress=progress)
    total = index.count() + sum(item.name not in known for item in items.values())
    due = time.monotonic() + SAVE_SECONDS
    progress("embedding", 0, len(rows))
    for start in range(0, len(rows), CHUNK):
        chosen = rows[start : start + CHUNK]
        found = encoder.encode_collection(collection.subset(chosen), skip_unreadable=True)
        embedded = [
            items[chosen[at]]._replace(vector=found.vectors[at]) for at in found.readable.tolist()
        ]
        index.put(with_features(embedded, found.features[found.readable], total))
        index.delete([n for at in found.unreadable if (n := items[chosen[at]].name) in known])
        num_known = sum(item.name in known for item in embedded)
        changes.changed += num_known
        changes.added += len(embedded) - num_known
        changes.unreadable += [str(error) for _, error in sorted(found.unreadable.items())]
        progress("embedding", start + len(chosen), len(rows))
        if isinstance(index, FolderIndex) and (began := time.monotonic()) > due:
            index.commit(index.about)
            saved = time.monotonic()
            due = saved + max(SAVE_SECONDS, (saved - began) / SAVE_FRACTION)


def _remove(index: Index, data: Path | None) -> Changes:
    """Remove all items of a source."""
    source, about = source_of(data), index.about
    names = [item.name for item in index.items(source)]
    if not names:
        known = ", ".join(about.sources) or "nothing"
        shown = BUILT_IN if data is None else printable(data)
        raise UsageError(f"the index holds nothing of {shown}; it holds: {known}")
    index.delete(names)
    kept = {of: types for of, types in about.sources.items() if of != source}
    index.commit(about._replace(sources=kept), source=source)
    return Changes(removed=len(names))


# How much a database's approximate index finds of what is there


def describe_recall(index: Index) -> str:
    """Return a line on recall@10 against all distances."""
    count = index.count()
    if count > MOST_READ:
        return f"recall was not checked: {count:,} items are too many to read back"
    found = recall(index)
    note = "" if found >= 0.95 else "; consider the run's own index (without --to), which is exact"
    return (
        f"recall@{K} against exact search: {found:.1%} on {min(QUERIES, count)} of its items{note}"
    )


def recall(index: Index, *, queries: int = QUERIES, k: int = K) -> float:
    """Return the fraction of the k nearest, by all distances, that the database finds.

    An item that is as near as the k-th counts, too: copies may be found in any order.
    """
    items = index.get(index.sample(queries, seed=1), vectors=True)
    if not items:
        return 1.0
    q, every = vectors_of(items, index.about.dim), index.items(vectors=True)
    best = torch.empty(len(q), 0)
    while some := list(islice(every, _READ)):
        near = nearest(q, vectors_of(some, q.shape[1]), k)[0]
        best = torch.cat([best, near], 1).sort(1).values[:, :k]
    hits = index.search(q, best.shape[1])
    # Squared, because rounding is of squares: near 0 it is large in a distance.
    limit = best[:, -1].square() + 1e-6
    found = [sum(d * d <= far for d in hit.distances) for hit, far in zip(hits, limit, strict=True)]
    return float(sum(found)) / best.numel()
