"""Update the index of a run from a folder, or open it."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from nofuss.data.collection import printable
from nofuss.data.corrections import corrected
from nofuss.data.labelling import labelling_of
from nofuss.distributed import processes
from nofuss.errors import RunError, UsageError, command
from nofuss.evaluate.strangers import Strangers
from nofuss.files.folders import own_folder
from nofuss.files.lock import RunLock, check_in_place
from nofuss.model.encoder import Encoder, check_fits, load
from nofuss.run.directory import Run, open_run
from nofuss.search.gallery import (
    model_digest,
    open_items,
    plan,
    remove_source,
    source_of,
    sources,
    update,
)
from nofuss.search.index import MANIFEST, Index, Kind
from nofuss.search.ranking import STRANGERS, calibrated
from nofuss.terminal import console

_NAMED = 20  # unreadable pictures that are listed in the terminal


def index_run(
    path: Path,
    data: Path | None,
    *,
    remove: bool = False,
    kind: Kind | None = None,
    device: str = "auto",
) -> Index:
    """Run `nofuss index`: update RUN/index from a folder; items of other folders stay."""
    run = open_run(path)
    with RunLock() as lock:  # from before the index is read until it is written
        lock.take(path)
        encoder = load(path, device=device)
        return _update(run, encoder, data or run.config.data, remove=remove, kind=kind)


def open_index(run: Run, encoder: Encoder) -> Index:
    """Load the run's index; RunError where there is none, or one of another model."""
    folder = run.path / "index"
    index = load_index(folder)
    if index.extra.get("model") != model_digest(run.model):
        raise RunError(
            f"{folder} was made by another model than {run.model}; update it: "
            + "; ".join(command("nofuss", "index", run.path, of) for of in sources(index))
        )
    if index.dim != encoder.dim:
        raise RunError(
            f"{folder} holds vectors of {index.dim} dimensions, but the model gives {encoder.dim}; "
            f"delete the folder and make it again: {command('nofuss', 'index', run.path)} DIR"
        )
    return index


def load_index(folder: Path) -> Index:
    """Load an index that `update` made, and check what it notes of its items."""
    index = Index.load(folder)
    known = index.extra.get("items", {})
    fits = isinstance(known, dict) and all(name in index for name in known)
    if not fits or not all(_is_note(note) for note in known.values()):
        raise RunError(
            f"the index in {folder} is damaged (its notes do not match its items); delete the "
            "folder and make it again: nofuss index RUN DIR"
        )
    return index


def _is_note(note: Any) -> bool:
    """Return whether it is [source, size, mtime_ns, digest]."""
    return isinstance(note, list) and [type(value) for value in note] == [str, int, int, str]


def _update(
    run: Run,
    encoder: Encoder,
    data: Path | None,
    *,
    remove: bool = False,
    kind: Kind | None = None,
) -> Index:
    folder, model = run.path / "index", model_digest(run.model)
    nothing = torch.empty(0, encoder.dim)
    index = Index.build(nothing, names=(), kind=kind or "exact", extra={"model": model})
    if (folder / MANIFEST).is_file():
        before = load_index(folder)
        if before.extra.get("model") == model and before.dim == encoder.dim:
            index = before if kind is None else before.as_kind(kind)
        else:
            console.warn(f"{folder} was made by another model: everything is embedded again")
    if remove:
        count = remove_source(index, data)
        if not count:
            known = ", ".join(sources(index)) or "nothing"
            raise UsageError(f"the index holds nothing of {_shown(data)}; it holds: {known}")
        _calibrate(index, encoder)
        _save(index, folder)
        console.say(f"{count:,} items of {_shown(data)} removed, {len(index):,} remain")
        return index
    collection = open_items(data, labelling_of(run.config))
    if run.corrections is not None and source_of(data) == source_of(run.config.data):
        collection = corrected(collection, run.corrections, say=console.say)
    check_fits(collection, encoder.preprocessing, encoder.embedder.backbone.channels)
    console.say(collection.describe())
    for note in collection.notes:
        console.warn(note)
    todo = plan(index, collection, data)
    processes.check_same("pictures", lambda: json.dumps([todo.names, todo.stale]))
    total = len(todo.stale)
    index.extra.pop(STRANGERS, None)  # until all is embedded
    with console.progress("embedding", total, quiet=not total) as progress:
        changes = update(
            index, encoder, collection, todo, progress=progress, save=lambda: _save(index, folder)
        )
    found = _calibrate(index, encoder)
    _save(index, folder)
    _name(changes.unreadable)
    console.say(f"{changes.describe()}: {len(index):,} items in {folder}")
    if found is not None:
        console.say(found.describe())
    return index


def _calibrate(index: Index, encoder: Encoder) -> Strangers | None:
    """Keep with the index what strangers look like among its present classes."""
    with console.busy("calibrating on the items of the index"):
        found = calibrated(index, encoder)
    index.extra[STRANGERS] = found and found.as_dict()
    return found


def _save(index: Index, folder: Path) -> None:
    """Write the index in the first process only; all processes hold the same."""
    if processes.first():
        check_in_place(folder.parent)
        index.save(own_folder(folder))


def _shown(data: Path | None) -> str:
    return "built-in characters" if data is None else printable(data)


def _name(unreadable: Sequence[str]) -> None:
    for complaint in unreadable[:_NAMED]:
        console.warn(f"left out: {complaint}")
    if len(unreadable) > _NAMED:
        console.warn(f"and {len(unreadable) - _NAMED:,} more left out")
