"""Keep an index up to date with folders of pictures or files of arrays: embed only what changed.

A picture is named by its absolute path. It is unchanged if size and time of change are the same;
otherwise, or if it had just been written when it was last read, its content is compared. An item of
an array is named by its file and row, and compared by content. Nothing is written into the data.
"""

import json
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nofuss.config import is_named_data
from nofuss.data import find_pictures, open_data
from nofuss.data.benchmarks import layout_of
from nofuss.data.collection import Collection, printable
from nofuss.data.cost import MAX_FILE
from nofuss.data.decode import PictureError, decode_resized
from nofuss.data.labelling import BY_FOLDER, Labelling
from nofuss.data.transforms import middle
from nofuss.distributed import processes
from nofuss.errors import DataError
from nofuss.files.atomic import digest, sha256
from nofuss.files.checksum import digest_of
from nofuss.files.parts import status_of
from nofuss.model.encoder import Encoder
from nofuss.search.index import Index, Label

FRESH_NS = 2_000_000_000
"""A file read so soon after its change may change again without a new time stamp."""
SAVE_SECONDS = 60.0
BUILT_IN = "built-in characters"
UNLABELLED = ""
"""The class of pictures outside any class folder; no folder can have this name."""
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
    versions: dict[int, Version] = field(default_factory=dict)
    stale: list[int] = field(default_factory=list)
    """Items to embed: new, or changed."""
    unchanged: list[int] = field(default_factory=list)
    gone: list[str] = field(default_factory=list)
    """Names to remove from the index: their items no longer exist."""
    unreadable: list[str] = field(default_factory=list)


@dataclass
class Changes:
    """What an update did."""

    added: int = 0
    changed: int = 0
    removed: int = 0
    unchanged: int = 0
    unreadable: list[str] = field(default_factory=list)

    def describe(self) -> str:
        """Return words like "12 new, 1 changed, 3 removed, 11,772 unchanged"."""
        counts = {"new": self.added, "changed": self.changed, "removed": self.removed}
        counts |= {"unchanged": self.unchanged, "unreadable": len(self.unreadable)}
        return ", ".join(f"{n:,} {what}" for what, n in counts.items() if n) or "nothing"


def open_items(path: Path | None, labelling: Labelling = BY_FOLDER) -> Collection:
    """Open what `open_data` reads, and pictures outside class folders too, without a label."""
    if path is None or not (path := Path(path).expanduser()).is_dir() or layout_of(path):
        return open_data(path, labelling=labelling)
    path = path.absolute()
    loose = [picture for picture in find_pictures(path) if picture.parent == path]
    if not loose:
        return open_data(path, labelling=labelling)
    try:
        labelled = open_data(path, labelling=labelling)
    except DataError:  # no class folders beside them
        return Collection(
            name=path.name, layout="folder of pictures", kind="pictures", paths=loose, root=path
        )
    assert labelled.labels is not None
    known = set(labelled.paths)
    if not (loose := [picture for picture in loose if picture not in known]):
        return labelled
    return replace(
        labelled,
        paths=[*labelled.paths, *loose],
        labels=np.r_[labelled.labels, np.full(len(loose), labelled.num_classes)],
        class_names=(*labelled.class_names, UNLABELLED),
        split=None,
        notes=(),
    )


def item_names(collection: Collection, path: Path | None) -> list[str]:
    """Return the name of each item in an index: its absolute path, or its file and row."""
    if collection.kind == "pictures":
        return [str(picture.absolute()) for picture in collection.paths]
    return [f"{source_of(path)}#{row}" for row in range(len(collection))]


def item_labels(collection: Collection) -> list[Label]:
    """Return the class name of each item, None for unlabelled ones."""
    if collection.labels is None:
        return [None] * len(collection)
    return [
        None if (name := collection.class_names[c]) == UNLABELLED else name
        for c in collection.labels.tolist()
    ]


def source_of(path: Path | None) -> str:
    """Return the name of the data at a path in an index."""
    if path is None:
        return BUILT_IN
    return str(path if is_named_data(path) else Path(path).expanduser().absolute())


def model_digest(model: Path) -> str:
    """Return a digest of the model: vectors of different models can't be compared."""
    return sha256(model / "weights.safetensors")


def plan(index: Index, collection: Collection, path: Path | None) -> Plan:
    """Compare the items at `path` with what the index holds of it; ignore other sources."""
    names = item_names(collection, path)
    todo = Plan(source_of(path), names, item_labels(collection))
    known = _known(index)
    present = set(names)
    todo.gone = [n for n, (of, *_) in known.items() if of == todo.source and n not in present]
    for name, i in {
        name: i for i, name in enumerate(names)
    }.items():  # a name that is listed twice: the last
        before = Version(*known[name][1:]) if name in known else None
        try:
            todo.versions[i] = _version(collection, i, before)
        except OSError as error:
            todo.unreadable.append(f"{printable(name)}: {error.strerror}")
            todo.gone += [name] if name in known else []
            continue
        same = before is not None and before.digest == todo.versions[i].digest
        (todo.unchanged if same else todo.stale).append(i)
    return todo


def update(
    index: Index,
    encoder: Encoder,
    collection: Collection,
    todo: Plan,
    *,
    progress: Callable[[int], None] | None = None,
    save: Callable[[], object] = lambda: None,
) -> Changes:
    """Carry out a plan; call `save` now and then, so that a killed update can be resumed."""
    known, names, labels = _known(index), todo.names, todo.labels
    for i in todo.unchanged:
        if labels[i] is None and known[names[i]][0] != todo.source:
            continue  # indexed before with its class folder: keep that source and label
        known[names[i]] = [todo.source, *todo.versions[i]]
        index.labels[index.row(names[i])] = labels[i]  # a CSV may give it another label now
    replaced = {names[i] for i in todo.stale if names[i] in index}
    index.remove({*todo.gone, *replaced})
    for name in (*todo.gone, *replaced):
        known.pop(name, None)
    changes = Changes(removed=len(todo.gone), unchanged=len(todo.unchanged))
    changes.unreadable += todo.unreadable
    done, saved = 0, time.monotonic()
    for start in range(0, len(todo.stale), CHUNK):
        chosen = todo.stale[start : start + CHUNK]
        rows, vectors, unreadable = _embed_together(encoder, collection, chosen)
        index.add(vectors, names=[names[i] for i in rows], labels=[labels[i] for i in rows])
        known.update({names[i]: [todo.source, *todo.versions[i]] for i in rows})
        changed = sum(names[i] in replaced for i in rows)
        changes.changed += changed
        changes.added += len(rows) - changed
        changes.unreadable += unreadable
        done += len(chosen)
        if progress:
            progress(done)
        if time.monotonic() - saved > SAVE_SECONDS:
            save()
            saved = time.monotonic()
    return changes


def remove_source(index: Index, path: Path | None) -> int:
    """Remove all items of a source from the index; return how many there were."""
    known = _known(index)
    names = [name for name, (of, *_) in known.items() if of == source_of(path)]
    index.remove(names)
    for name in names:
        del known[name]
    return len(names)


def sources(index: Index) -> list[str]:
    """Return where the items of an index came from."""
    return sorted({of for of, *_ in _known(index).values()})


def _known(index: Index) -> dict[str, list[Any]]:
    """Return name → [source, size, mtime_ns, digest], stored with the index."""
    known: dict[str, list[Any]] = index.extra.setdefault("items", {})
    return known


def _embed_together(
    encoder: Encoder, collection: Collection, chosen: list[int]
) -> tuple[list[int], Tensor, list[str]]:
    """Call `_embed` with a share of the items in each process."""
    if processes.world() == 1:
        return _embed(encoder, collection, chosen)
    share = chosen[processes.share(len(chosen))]
    vectors = torch.zeros(len(share), encoder.dim)  # zeros where a picture can't be read
    rows, unreadable = list[int](), list[str]()
    if share:
        with processes.alone():
            rows, readable, unreadable = _embed(encoder, collection, share)
        vectors[[share.index(i) for i in rows]] = readable
    vectors = processes.gather_rows(vectors, len(chosen))
    answers = [json.loads(text) for text in processes.exchange(json.dumps([rows, unreadable]))]
    rows = [i for readable_rows, _ in answers for i in readable_rows]
    position = {i: at for at, i in enumerate(chosen)}
    messages = [message for _, lines in answers for message in lines]
    return rows, vectors[[position[i] for i in rows]], messages


def _embed(
    encoder: Encoder, collection: Collection, chosen: list[int]
) -> tuple[list[int], Tensor, list[str]]:
    """Return the items that could be read, their embeddings, and messages about the others."""
    if collection.kind != "pictures":
        return chosen, encoder.embed_collection(collection.subset(chosen)), []
    preprocessing = encoder.preprocessing
    assert preprocessing is not None
    features, is_known = encoder.kept_features(collection.subset(chosen))
    missing = [at for at, known in enumerate(is_known) if not known]

    def read(at: int) -> NDArray[np.uint8] | PictureError:
        try:
            return middle(
                decode_resized(collection.paths[chosen[at]], preprocessing), preprocessing
            )
        except PictureError as error:
            return error

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        pictures = dict(zip(missing, pool.map(read, missing), strict=True))
    readable = {at: p for at, p in pictures.items() if not isinstance(p, PictureError)}
    if readable:
        new = collection.subset([chosen[at] for at in readable])
        features[list(readable)] = encoder.features(list(readable.values()), new)
    kept = [at for at in range(len(chosen)) if is_known[at] or at in readable]
    messages = [str(p) for p in pictures.values() if isinstance(p, PictureError)]
    return [chosen[at] for at in kept], encoder.embed_features(features[kept]), messages


def _version(collection: Collection, item: int, before: Version | None) -> Version:
    """Return the item's present version; read its content only if it may have changed."""
    if collection.kind != "pictures":
        if collection.array is None:
            raise DataError(
                f"{collection.name} can't be indexed: its items have no names; use arrays"
            )
        content = collection.array[item].tobytes()
        return Version(len(content), 0, digest_of([content]))
    path = collection.paths[item]
    size, mtime_ns = status_of(path)
    if before is not None and (size, mtime_ns) == (before.size, before.mtime_ns):
        return before
    if time.time_ns() - mtime_ns < FRESH_NS:
        mtime_ns = 0  # never equal, so that the content is compared the next time
    return Version(size, mtime_ns, digest(path, limit=MAX_FILE))
