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
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch

from nofuss.config import is_named_data
from nofuss.data.collection import Collection, printable
from nofuss.data.columns import cells_of
from nofuss.data.corrections import corrected
from nofuss.data.decode import MAX_FILE
from nofuss.data.items import content_keys, read_item
from nofuss.data.open import open_any
from nofuss.data.readers.benchmarks import layout_of
from nofuss.data.readers.folder import (
    BY_FOLDER,
    Labelling,
    find_pictures,
    labelling_of,
    skipped_notes,
)
from nofuss.data.triplets import NO_LABEL
from nofuss.distributed import processes
from nofuss.errors import DataError, UsageError
from nofuss.model.encoder import Encoded, Encoder, check_fits, load
from nofuss.model.manifest import clear, manifest_file
from nofuss.model.onnx import accelerate
from nofuss.progress import Progress, silent, working
from nofuss.ranking.neighbours import nearest
from nofuss.run.directory import Run
from nofuss.search.engines import open_engine
from nofuss.search.feedback import read_feedback
from nofuss.search.folder import FolderIndex
from nofuss.search.index import BUILT_IN, About, Index, Item, Origin
from nofuss.search.open import Searched
from nofuss.search.verdict import calibrated, with_features

log = logging.getLogger("nofuss")

CHUNK = 256
SAVE_SECONDS, SAVE_FRACTION = 60.0, 0.1
"""A folder is saved at most once a minute, and saving may take this fraction of the time."""
_HASHED = 4096  # files whose content is compared at a time
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
            index = open_engine(to, flag="--to", wanted=wanted, create=not remove)
        with closing(index):
            if remove:
                changes = _remove(index, data or run.config.data)
            else:
                data = data or run.own_data
                changes = _update(index, encoder, _open(run, data, encoder), data, progress)
            with working(progress, f"completing the index in {index.place}"):
                shown = Searched(encoder, index, read_feedback(path)).index
                index.commit(calibrated(shown, encoder))
            if to is None and processes.first():
                clear(run.index, encoder.digest)
            log.info(f"{changes.describe()}: {index.count():,} items in {index.place}")
            if to is not None and changes.wrote and (recall := describe_recall(index)):
                log.info(recall)
            elif to is None and index.about.open_set is not None:
                log.info(index.about.open_set.describe())
        return changes


def _own_index(run: Run, wanted: About) -> FolderIndex:
    """Return the run's index as it is, or an empty one where there is none of this model."""
    index = FolderIndex(wanted, run.index)
    if manifest_file(run.index, wanted.model).is_file():
        index = FolderIndex.open(run.index, wanted.model)
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
    source, wanted = source_of(run.config.data), About(encoder.digest, encoder.dim)
    index = _own_index(run, wanted)
    types = {name: column.type for name, column in collection.columns.items()}
    with working(progress, "writing the index"):
        index.about = index.about._replace(sources={**index.about.sources, source: types})
        items = items_of(collection, run.config.data)
        contents = _digests(collection, progress)
        rows = {item.name: row for row, item in enumerate(items)}  # listed twice: the last
        embedded = [
            items[row]._replace(
                origin=Origin(source, contents[row]), vector=found.vectors[row], split=splits[row]
            )
            for row in rows.values()
        ]
        index.put(with_features(embedded, found.features[[*rows.values()]], len(rows)))
        index.commit(calibrated(index, encoder))


# What is there to be indexed


def open_items(path: Path | None, labelling: Labelling = BY_FOLDER) -> Collection:
    """Open any data; pictures outside class folders belong to it too, without a label."""
    collection = open_any(path, labelling)
    if path is None or not (path := Path(os.path.expanduser(path))).is_dir() or layout_of(path):
        return collection
    path, known = path.absolute(), set(collection.paths)
    loose = [p for p in find_pictures(path) if p.parent == path and p not in known]
    if not collection.has_classes or not loose:
        return collection
    indexed = {printable(p.relative_to(path)) for p in loose}
    skipped = tuple(entry for entry in collection.skipped if entry[0] not in indexed)
    before = skipped_notes(collection.skipped)
    return replace(
        collection,
        paths=[*collection.paths, *loose],
        labels=np.r_[collection.labels, np.full(len(loose), NO_LABEL)],
        split=None,
        notes=(*skipped_notes(skipped), *(n for n in collection.notes if n not in before)),
        skipped=skipped,
    )


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
    origin = Origin(source, "")
    return [
        Item(name, label, cells_of(collection.columns, i), origin)
        for i, (name, label) in enumerate(zip(names, labels, strict=True))
    ]


def _open(run: Run, data: Path | None, encoder: Encoder) -> Collection:
    collection = open_items(data, labelling_of(run.config))
    if run.corrections is not None and source_of(data) == source_of(run.config.data):
        collection = corrected(collection, run.corrections)
    check_fits(collection, encoder.embedder.backbone)
    log.info(collection.describe())
    for note in collection.notes:
        log.warning(note)
    return collection


def _digests(collection: Collection, progress: Progress) -> list[str]:
    """Return the digest of each item's content, "" where it can't be read."""
    count, found = len(collection), list[str]()
    if not collection.paths:
        keys = collection.keys()  # None: a Dataset of Python, whose items are read one by one
        return [""] * count if keys is None else [key.hex() for key in keys]
    for start in range(0, count, _HASHED):
        progress("comparing files with the index", start, count)
        found += [key.hex() for key in content_keys(collection.paths[start : start + _HASHED])]
    progress("comparing files with the index", count, count)
    return found


# How the index differs from it, and what is done about that


@dataclass
class _Plan:
    items: dict[int, Item] = field(default_factory=dict)
    stale: list[int] = field(default_factory=list)
    """To embed: new, or with another content."""
    replaced: set[int] = field(default_factory=set)
    """Those of them that are not new."""
    revised: list[int] = field(default_factory=list)
    """Of the same content, and with another label, column or source."""
    gone: list[str] = field(default_factory=list)
    changes: Changes = field(default_factory=Changes)
    total: int = 0
    """Items in the index, when all are embedded."""


def _plan(index: Index, collection: Collection, data: Path | None, progress: Progress) -> _Plan:
    """Compare the items at a path with what the index holds of it, and of their names."""
    source, plan = source_of(data), _Plan()
    digests = _digests(collection, progress)
    items = items_of(collection, data)
    places = {item.name: i for i, item in enumerate(items)}
    known = {item.name: item for item in index.items(source)}
    plan.gone = [name for name in known if name not in places]
    known |= {item.name: item for item in index.get([n for n in places if n not in known])}
    for name, i in places.items():  # of a name that is listed twice: the last
        old = known.get(name)
        if not digests[i]:
            plan.changes.unreadable.append(f"{printable(name)}: {_why(collection.paths[i])}")
            plan.gone += [name] if old is not None else []
            continue
        item = plan.items[i] = items[i]._replace(origin=Origin(source, digests[i]))
        if old is None or old.origin is None or old.origin.digest != digests[i]:
            plan.stale.append(i)
            plan.replaced |= {i} if old is not None else set()
            continue
        plan.items[i] = item = item._replace(split=old.split)
        is_same = (item.label, dict(item.columns)) == (old.label, dict(old.columns))
        if item.label is None and old.origin.source != source:
            is_same = True  # indexed before with its class folder: keep that source and label
        elif not is_same or item.origin != old.origin:
            plan.revised.append(i)
        plan.changes.revised += not is_same
        plan.changes.unchanged += is_same
    return plan


def _why(path: Path) -> str:
    """Return why a file can't be read."""
    try:
        read_item(path, limit=MAX_FILE)
    except OSError as error:
        return error.strerror or type(error).__name__
    return "it could not be read a moment ago; index again"


def _update(
    index: Index, encoder: Encoder, collection: Collection, data: Path | None, progress: Progress
) -> Changes:
    source, about = source_of(data), index.about
    types = {name: column.type for name, column in collection.columns.items()}
    for other, others in about.sources.items():
        for name, kind in types.items():
            if other != source and others.get(name, kind) != kind:
                raise DataError(
                    f"column {name} is {kind} in {printable(source)}, but {others[name]} in "
                    f"{printable(other)}; rename it in one of them"
                )
    plan = _plan(index, collection, data, progress)
    processes.check_same("pictures", lambda: json.dumps([list(plan.items), plan.stale]))
    backbone = encoder.embedder.backbone
    accelerate(backbone, len(plan.stale) * backbone.views, progress=progress)
    if about.sources.get(source) != types:  # before its items: a filter may name their columns
        index.commit(about._replace(sources={**about.sources, source: types}), source=source)
    index.put([plan.items[i] for i in plan.revised])
    index.delete(plan.gone)
    changes, due = plan.changes, time.monotonic() + SAVE_SECONDS
    changes.removed = len(plan.gone)
    plan.total = index.count() + len(plan.stale) - len(plan.replaced)
    progress("embedding", 0, len(plan.stale))
    for start in range(0, len(plan.stale), CHUNK):
        _embed(index, encoder, collection, plan, plan.stale[start : start + CHUNK])
        progress("embedding", min(start + CHUNK, len(plan.stale)), len(plan.stale))
        if isinstance(index, FolderIndex) and (began := time.monotonic()) > due:
            index.commit(index.about)
            spent = time.monotonic() - began
            due = time.monotonic() + max(SAVE_SECONDS, spent / SAVE_FRACTION)
    for complaint in changes.unreadable[:_NAMED]:
        log.warning(f"left out: {complaint}")
    if len(changes.unreadable) > _NAMED:
        log.warning(f"and {len(changes.unreadable) - _NAMED:,} more left out")
    return changes


def _embed(
    index: Index, encoder: Encoder, collection: Collection, plan: _Plan, chosen: Sequence[int]
) -> None:
    """Embed some items and write them; those that can't be read leave the index."""
    changes, subset = plan.changes, collection.subset(chosen)
    found = encoder.encode_collection(subset, skip_unreadable=True)
    rows = [chosen[at] for at in found.readable]
    vectors = found.vectors[found.readable]
    items = [plan.items[i]._replace(vector=v) for i, v in zip(rows, vectors, strict=True)]
    index.put(with_features(items, found.features[found.readable], plan.total))
    index.delete([plan.items[i].name for i in plan.replaced.intersection(chosen).difference(rows)])
    changed = len(plan.replaced.intersection(rows))
    changes.changed += changed
    changes.added += len(rows) - changed
    changes.unreadable += [str(error) for _, error in sorted(found.unreadable.items())]


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


def describe_recall(index: Index) -> str | None:
    """Return a line on recall@10 against all distances; None where there is nothing to compare."""
    count = index.count()
    if count < 2:
        return None
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
    q = _vectors(index.get(index.sample(queries, seed=1), vectors=True))
    best, some = torch.full((len(q), 0), torch.inf), list[Item]()
    for item in index.items(vectors=True):
        some.append(item)
        if len(some) == 10_000:
            best = torch.cat([best, nearest(q, _vectors(some), k)[0]], 1).sort(1).values[:, :k]
            some = []
    if some:
        best = torch.cat([best, nearest(q, _vectors(some), k)[0]], 1).sort(1).values[:, :k]
    hits = index.search(q, best.shape[1])
    # Squared, because rounding is of squares: near 0 it is large in a distance.
    limit = best[:, -1].square() + 1e-6
    near = [sum(d * d <= far for d in hit.distances) for hit, far in zip(hits, limit, strict=True)]
    return float(sum(near)) / max(1, best.numel())


def _vectors(items: Sequence[Item]) -> torch.Tensor:
    return torch.stack([item.vector for item in items if item.vector is not None])
