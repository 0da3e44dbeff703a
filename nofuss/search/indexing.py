"""Update the index of a run from a folder, or open it."""

import json
import logging
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, get_args

import torch

from nofuss.data.collection import printable
from nofuss.data.columns import Type
from nofuss.data.corrections import corrected
from nofuss.data.readers.folder import labelling_of
from nofuss.distributed import processes
from nofuss.errors import RunError, UsageError, command
from nofuss.model.encoder import Encoder, check_fits, load
from nofuss.model.onnx import accelerate
from nofuss.model.saved import model_digest
from nofuss.progress import Progress, silent, working
from nofuss.ranking.open_set import OpenSet
from nofuss.run.directory import Run
from nofuss.search.gallery import Changes, plan, remove_source, update
from nofuss.search.index import MANIFEST, Index
from nofuss.search.items import open_items, source_of
from nofuss.search.searcher import OPEN_SET, calibrated
from nofuss.search.stores import open_store
from nofuss.search.stores.exactness import describe_recall
from nofuss.search.stores.local import Local
from nofuss.search.stores.store import About, Store, Target

log = logging.getLogger("nofuss")

_NAMED = 20  # unreadable pictures that are listed in the terminal


def index_run(
    path: Path,
    data: Path | None,
    *,
    remove: bool = False,
    device: str = "auto",
    progress: Progress = silent,
) -> Index:
    """Run `nofuss index`: update RUN/index from a folder; items of other folders stay."""
    with Run.open(path, write=True) as run:  # from before the index is read until it is written
        encoder = load(path, device=device)
        folder = run.path / "index"
        index = _former(run, encoder)
        target = Local(index, save=lambda: _save(index, folder))
        index.extra.pop(OPEN_SET, None)  # until all is embedded
        items = _items(run, data, remove)
        changes = change(target, run, encoder, items, remove=remove, progress=progress)
        found = _calibrate(index, encoder, progress)
        _save(index, folder)
        log.info(f"{changes.describe()}: {len(index):,} items in {folder}")
        if found is not None:
            log.info(found.describe())
        return index


def index_into(
    url: str,
    path: Path,
    data: Path | None,
    *,
    remove: bool = False,
    device: str = "auto",
    progress: Progress = silent,
) -> None:
    """Run `nofuss index --to URL`: the same in a database; each chunk is kept as it is written."""
    if processes.world() > 1:
        raise UsageError("nofuss index --to works in one process; leave torchrun out")
    with Run.open(path, write=True) as run, closing(open_store(url, flag="--to")) as store:
        encoder = load(path, device=device)
        check_store(store, run, encoder, create=not remove)
        items = _items(run, data, remove)
        changes = change(store, run, encoder, items, remove=remove, progress=progress)
        with working(progress, f"building the index of {store.shown}"):
            store.finish()
        log.info(f"{changes.describe()}: {len(store):,} items in {store.shown}")
        if changes.wrote and (recall := describe_recall(store)):
            log.info(recall)


def _items(run: Run, data: Path | None, remove: bool) -> Path | None:
    """Return what to index, or to remove, which need not be there: the run's own by default."""
    return data or (run.config.data if remove else run.own_data)


def check_store(store: Store, run: Run, encoder: Encoder, *, create: bool = False) -> None:
    """Refuse an index of another model, dimension, metric or format; make one if there is none."""
    wanted, found = About(model_digest(run.model), encoder.dim), store.about
    if found is None and not create:
        raise RunError(
            f"no index in {store.shown}; make one: "
            f"{command('nofuss', 'index', run.path)} DIR --to URL"
        )
    if found is None:
        store.create(wanted)
        return
    if found.format != wanted.format:
        reason = f"is of format {found.format!r:.20}, expected {wanted.format}"
    elif found.dim != wanted.dim:
        reason = f"holds vectors of {found.dim} dimensions, but the model gives {wanted.dim}"
    elif found.metric != wanted.metric:
        reason = f"is searched by another distance ({found.metric!r:.40}, not {wanted.metric})"
    elif found.model != wanted.model:
        reason = f"was made by another model than {run.model}"
    else:
        return
    raise RunError(f"the index in {store.shown} {reason}; choose another name for the index")


def open_index(run: Run, encoder: Encoder) -> Index:
    """Load the run's index; RunError where there is none, or one of another model."""
    folder = run.path / "index"
    index = load_index(folder)
    if index.extra.get("model") != model_digest(run.model):
        raise RunError(
            f"{folder} was made by another model than {run.model}; update it: "
            + "; ".join(command("nofuss", "index", run.path, of) for of in Local(index).sources())
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
    columns = index.extra.get("columns", {})
    fits = fits and isinstance(columns, dict) and all(map(_is_types, columns.values()))
    if not fits or not all(_is_note(note) for note in known.values()):
        raise RunError(
            f"the index in {folder} is damaged (its notes do not match its items); delete the "
            "folder and make it again: nofuss index RUN DIR"
        )
    return index


def _is_note(note: Any) -> bool:
    """Return whether it is [source, size, mtime_ns, digest]."""
    return isinstance(note, list) and [type(value) for value in note] == [str, int, int, str]


def _is_types(types: Any) -> bool:
    """Return whether it gives each column a type."""
    return isinstance(types, dict) and all(kind in get_args(Type) for kind in types.values())


def _former(run: Run, encoder: Encoder) -> Index:
    """Return the run's index as it is, or an empty one where there is none of this model."""
    folder, model = run.path / "index", model_digest(run.model)
    if (folder / MANIFEST).is_file():
        before = load_index(folder)
        if before.extra.get("model") == model and before.dim == encoder.dim:
            return before
        log.warning(f"{folder} was made by another model: everything is embedded again")
    nothing = torch.empty(0, encoder.dim)
    return Index.build(nothing, names=(), extra={"model": model})


def change(
    target: Target,
    run: Run,
    encoder: Encoder,
    data: Path | None,
    *,
    remove: bool,
    progress: Progress = silent,
) -> Changes:
    """Add the items at a path to an index, or update or remove them; return what was done."""
    if remove:
        count = remove_source(target, data)
        if not count:
            known = ", ".join(target.sources()) or "nothing"
            raise UsageError(f"the index holds nothing of {_shown(data)}; it holds: {known}")
        return Changes(removed=count)
    collection = open_items(data, labelling_of(run.config))
    if run.corrections is not None and source_of(data) == source_of(run.config.data):
        collection = corrected(collection, run.corrections)
    check_fits(collection, encoder.embedder.backbone)
    log.info(collection.describe())
    for note in collection.notes:
        log.warning(note)
    todo = plan(target, collection, data, progress=progress)
    processes.check_same("pictures", lambda: json.dumps([todo.names, todo.stale]))
    accelerate(encoder.embedder.backbone, len(todo.stale), progress=progress)
    changes = update(target, encoder, collection, todo, progress=progress)
    _name(changes.unreadable)
    return changes


def _calibrate(index: Index, encoder: Encoder, progress: Progress) -> OpenSet | None:
    """Keep with the index what unknown classes look like among its present classes."""
    with working(progress, "calibrating on the items of the index"):
        found = calibrated(index, encoder)
    index.extra[OPEN_SET] = found and found.as_dict()
    return found


def _save(index: Index, folder: Path) -> None:
    """Write the index in the first process only; all processes hold the same."""
    if processes.first():
        index.save(folder)


def _shown(data: Path | None) -> str:
    return "built-in characters" if data is None else printable(data)


def _name(unreadable: Sequence[str]) -> None:
    for complaint in unreadable[:_NAMED]:
        log.warning(f"left out: {complaint}")
    if len(unreadable) > _NAMED:
        log.warning(f"and {len(unreadable) - _NAMED:,} more left out")
