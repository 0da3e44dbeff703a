"""What `nofuss index` and `nofuss search` do."""

import io
import json
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nofuss import console, processes
from nofuss.data import open_data
from nofuss.data.collection import printable
from nofuss.encoder import Encoder, check_fits, load
from nofuss.errors import DataError, RunError, UsageError, command
from nofuss.files import write_file
from nofuss.folders import own_folder
from nofuss.lock import RunLock, check_in_place
from nofuss.run import Run, open_run
from nofuss.search.gallery import (
    Pictures,
    forget,
    model_digest,
    open_gallery,
    plan,
    sources,
    update,
)
from nofuss.search.grid import Cell, draw_grid
from nofuss.search.index import MANIFEST, Index, Kind

METRIC = "Euclidean distance on the unit sphere: 0 equal, 2 opposite"
_NAMED = 20  # unreadable pictures that are named on the screen


def index_run(
    path: Path,
    data: Path | None,
    *,
    remove: bool = False,
    kind: Kind | None = None,
    device: str = "auto",
) -> Index:
    """`nofuss index`: bring RUN/index up to date with a folder; other folders' items stay."""
    run = open_run(path)
    with RunLock() as lock:  # from before the index is read until it is written
        lock.take(path)
        encoder = load(path, device=device)
        return _update(run, encoder, data or run.config.data, remove=remove, kind=kind)


def open_index(run: Run, encoder: Encoder, *, quiet: bool = False) -> Index:
    """The run's index. Where there is none, one of the run's own data is made first."""
    folder = run.path / "index"
    if not (folder / MANIFEST).is_file():
        own = run.config.data
        if not quiet:
            console.say(f"no index yet: making one of the run's own data ({_shown(own)})")
        with RunLock() as lock:
            lock.take(run.path)
            return _update(run, encoder, own, quiet=quiet)
    index = load_index(folder)
    if index.extra.get("model") != model_digest(run.model):
        raise RunError(
            f"{folder} was made by another model than {run.model}; bring it up to date: "
            + "; ".join(command("nofuss", "index", run.path, of) for of in sources(index))
        )
    if index.dim != encoder.dim:
        raise RunError(
            f"{folder} holds vectors of {index.dim} dimensions, but the model gives {encoder.dim}; "
            f"delete the folder and make it again: {command('nofuss', 'index', run.path)} DIR"
        )
    return index


def load_index(folder: Path) -> Index:
    """An index that `update` made; what it notes of its items is checked like the rest."""
    index = Index.load(folder)
    known = index.extra.get("items", {})
    fits = isinstance(known, dict) and all(name in index for name in known)
    if not fits or not all(_is_note(note) for note in known.values()):
        raise RunError(
            f"the index in {folder} is damaged (its notes do not fit its items); delete the folder "
            "and make it again: nofuss index RUN DIR"
        )
    return index


def _is_note(note: Any) -> bool:
    """[source, size, mtime_ns, digest]"""
    return isinstance(note, list) and [type(value) for value in note] == [str, int, int, str]


def _update(
    run: Run,
    encoder: Encoder,
    data: Path | None,
    *,
    remove: bool = False,
    kind: Kind | None = None,
    quiet: bool = False,
) -> Index:
    folder, model = run.path / "index", model_digest(run.model)
    nothing = torch.empty(0, encoder.dim)
    index = Index.build(nothing, names=(), kind=kind or "exact", extra={"model": model})
    if (folder / MANIFEST).is_file():
        before = load_index(folder)
        if before.extra.get("model") == model and before.dim == encoder.dim:
            index = before if kind is None else before.as_kind(kind)
        elif not quiet:
            console.warn(f"the model is another than that of {folder}: everything is made anew")
    if remove:
        count = forget(index, data)
        if not count:
            known = ", ".join(sources(index)) or "nothing"
            raise UsageError(f"the index holds nothing of {_shown(data)}; it holds {known}")
        _save(index, folder)
        console.say(f"{count:,} items of {_shown(data)} taken out, {len(index):,} remain")
        return index
    collection = open_gallery(data)
    check_fits(collection, encoder.preprocessing, encoder.embedder.backbone.channels)
    if not quiet:
        console.say(collection.describe())
        for note in collection.notes:
            console.warn(note)
    todo = plan(index, collection, data)
    processes.check_same("pictures", lambda: json.dumps([todo.names, todo.stale]))
    total = len(todo.stale)
    bar = console.progress("embedding", total) if total and not quiet else nullcontext()
    with bar as progress:
        changes = update(
            index, encoder, collection, todo, progress=progress, save=lambda: _save(index, folder)
        )
    _save(index, folder)
    if not quiet:
        _name(changes.unreadable)
        console.say(f"{changes.describe()}: {len(index):,} items in {folder}")
    return index


def _save(index: Index, folder: Path) -> None:
    """Of several processes the first one writes; all hold the same."""
    if processes.first():
        check_in_place(folder.parent)
        index.save(own_folder(folder))


def search_run(
    path: Path, queries: Sequence[Path], *, k: int, as_json: bool, show: Path | None
) -> None:
    """`nofuss search`: paths, labels and distances of what is nearest to each query."""
    if not queries:
        raise UsageError("search for what? give one or more pictures")
    if k < 1:
        raise UsageError(f"-k is {k}; expected 1 or more")
    if show is not None and (show.suffix.lower() != ".png" or show.exists()):
        reason = "exists and is never overwritten" if show.exists() else "does not end in .png"
        raise UsageError(f"--show {show} {reason}; give another name")
    run = open_run(path)
    encoder = load(path)
    names, vectors = _embed_queries(encoder, queries)
    index = open_index(run, encoder, quiet=as_json)
    if not len(index):
        raise DataError(
            f"{run.path / 'index'} is empty; add pictures: {command('nofuss', 'index', path)} DIR"
        )
    distances, rows = index.search(vectors, k)
    threshold = encoder.extra.get("threshold")
    results = [
        answer(name, d, r, index, threshold=threshold)
        for name, d, r in zip(names, distances.tolist(), rows.tolist(), strict=True)
    ]
    if as_json:
        content = {"run": str(path), "metric": METRIC, "threshold": threshold, "queries": results}
        console.answer(content)
    else:
        for result in results:
            _print(result, threshold)
        if threshold is None:
            console.say("no threshold for what is alike: too few classes were held out in training")
    if show is not None:
        _write_grid(show, results)
        if not as_json:
            console.say(f"results as a picture: {show}")


def answer(
    query: str,
    distances: Sequence[float],
    rows: Sequence[int],
    index: Index,
    *,
    threshold: float | None,
) -> dict[str, Any]:
    """One query's neighbours, ready for JSON; `found` is None where no threshold is known."""
    neighbours = [
        {"path": index.names[row], "label": index.labels[row], "distance": distance, "row": row}
        for distance, row in zip(distances, rows, strict=True)
        if row >= 0
    ]
    nearest = min(distances, default=float("inf"))
    found = None if threshold is None else nearest <= threshold
    return {"query": query, "found": found, "neighbours": neighbours}


def _embed_queries(encoder: Encoder, queries: Sequence[Path]) -> tuple[list[str], Tensor]:
    """Pictures; or every row of files of arrays. All are read before anything is answered."""
    names, vectors = list[str](), list[Tensor]()
    for query in queries:
        if query.suffix.lower() in (".npz", ".safetensors"):
            collection = open_data(query)
            names += [f"{query}#{row}" for row in range(len(collection))]
            vectors.append(encoder.embed_collection(collection))
        elif encoder.preprocessing is None:
            raise DataError(f"{printable(query)}: the model takes vectors; give an .npz of them")
        else:
            names.append(str(query))
            vectors.append(encoder.embed([query]))
    return names, torch.cat(vectors)


def _print(result: dict[str, Any], threshold: float | None) -> None:
    """A heading and a line a neighbour."""
    console.say(printable(result["query"]))
    if result["found"] is False:
        console.say(f"  nothing like this here: all are further than {threshold:.3f}; nearest:")
    for neighbour in result["neighbours"]:
        label = neighbour["label"] if neighbour["label"] is not None else "–"
        console.say(
            f"  {neighbour['distance']:.3f}  {printable(label)}  {printable(neighbour['path'])}"
        )


def _write_grid(file: Path, results: Sequence[dict[str, Any]]) -> None:
    pictures = Pictures()
    rows: list[list[Cell]] = []
    for result in results:
        query = result["query"]
        verdict = "nothing like this here" if result["found"] is False else "query"
        row: list[Cell] = [(pictures[query], printable(Path(query).name), verdict)]
        for neighbour in result["neighbours"]:
            label, distance = neighbour["label"], f"{neighbour['distance']:.3f}"
            shown = "no label" if label is None else printable(label)
            row.append((pictures[neighbour["path"]], shown, distance))
        rows.append(row)
    buffer = io.BytesIO()
    draw_grid(rows).save(buffer, "PNG")
    file.parent.mkdir(parents=True, exist_ok=True)
    write_file(file, buffer.getvalue())


def _shown(data: Path | None) -> str:
    return "built-in characters" if data is None else printable(data)


def _name(unreadable: Sequence[str]) -> None:
    for complaint in unreadable[:_NAMED]:
        console.warn(f"left out: {complaint}")
    if len(unreadable) > _NAMED:
        console.warn(f"and {len(unreadable) - _NAMED:,} more left out")
