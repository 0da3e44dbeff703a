"""Teach a run by marks, and undo it: the head, the index and the kept embeddings change together.

What marks teach is a map (D, D) of embeddings (model/taught.py). The head is linear, so the map
becomes part of it, and the index needs no pictures: its vectors are mapped, which is what embedding
the pictures again would give, up to rounding.

    RUN/taught/0/         the model before the first lesson, with the identity as its map
    RUN/taught/1/ …       the model after each lesson: the model's files, map.safetensors
    RUN/taught/embeddings.safetensors   the kept embeddings before the first lesson

Every lesson starts from model 0 with all marks in force. A step counts once its model.json, which
is written last, is there; then the model is replaced. Which step is in force follows from the
model's own checksum. A kill in between leaves vectors of another step: `align` maps them, whenever
the run is opened to be taught.
"""

import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nofuss.errors import RunError
from nofuss.files import load_tensors, memory, read_bytes, tensor_bytes, write_file
from nofuss.model.encoder import load
from nofuss.model.saved import (
    DESCRIPTION,
    copy_model,
    load_model,
    model_digest,
    model_files,
    save_model,
)
from nofuss.model.taught import mapped
from nofuss.model.whitening import Affine
from nofuss.run.directory import Run
from nofuss.run.embeddings import FILE as EMBEDDINGS
from nofuss.run.embeddings import load_embeddings
from nofuss.search.folder import FolderIndex, holds_index
from nofuss.search.search import calibrated
from nofuss.search.searchable import NOTE, embeddings_fit

FOLDER, MAP = "taught", "map.safetensors"
NUMBER = re.compile("[0-9]{1,6}")
LARGEST_RATIO = 1e10
"""Of how much a map may lengthen one direction more than another: beyond, it can't be undone."""


@dataclass(frozen=True)
class Step:
    """A model on the way from model 0, and the map that led to it."""

    folder: Path
    number: int
    digest: str

    @property
    def matrix(self) -> Tensor:
        """The map from embeddings of model 0, (D, D), double."""
        try:
            matrix = load_tensors(self.folder / MAP)[0]["map"]
            head = load_tensors(model_files(self.folder)[1])[0].get("head.weight")
        except (OSError, ValueError, KeyError) as error:
            raise RunError(f"{self.folder / MAP} is damaged ({error}); restore it") from None
        dim = len(head) if head is not None and head.ndim == 2 else 0
        is_map = matrix.dtype == torch.float64 and matrix.shape == (dim, dim) and dim > 0
        if not (is_map and matrix.isfinite().all() and torch.linalg.cond(matrix) <= LARGEST_RATIO):
            raise RunError(f"{self.folder / MAP} is not a map of embeddings; restore it")
        return matrix


def steps_of(run: Run) -> list[Step]:
    """Return the steps up to the model in force; none if it was never taught, or trained since."""
    found, current = _all_steps(run), model_digest(run.model)
    at = [i for i, step in enumerate(found) if step.digest == current]
    return found[: at[-1] + 1] if at else []


def _all_steps(run: Run) -> list[Step]:
    home = run.path / FOLDER
    folders = [f for f in (home.iterdir() if home.is_dir() else ()) if NUMBER.fullmatch(f.name)]
    return [
        Step(folder, int(folder.name), model_digest(folder))
        for folder in sorted(folders, key=lambda folder: int(folder.name))
        if (folder / DESCRIPTION).is_file() and (folder / MAP).is_file()
    ]


def matrix_of(run: Run) -> Tensor | None:
    """Return the map from model 0 to the model in force; None if it was never taught."""
    steps = steps_of(run)
    return steps[-1].matrix if steps else None


def apply_lesson(run: Run, matrix: Tensor, *, extra: Mapping[str, Any]) -> None:
    """Replace the model by model 0 followed by a map (D, D); the caller holds the run's lock.

    extra: stored with the model, beside what training stored.
    """
    align(run)
    steps = steps_of(run)
    home = run.path / FOLDER
    if not steps:
        shutil.rmtree(home, ignore_errors=True)  # of a model from before another training
        home.mkdir(exist_ok=True)
        if (run.path / EMBEDDINGS).is_file():
            write_file(home / EMBEDDINGS, read_bytes(run.path / EMBEDDINGS, limit=memory()))
            write_file(home / NOTE, model_digest(run.model))
        _write_map(home / "0", torch.eye(len(matrix)).double())
        copy_model(run.model, home / "0")
        steps = steps_of(run)
    embedder, class_names, stored = load_model(steps[0].folder)
    head = embedder.head
    weight, bias = matrix @ head.weight.detach().double(), matrix @ head.bias.detach().double()
    embedder.set_head(Affine(weight.float(), bias.float()), root=embedder.root)
    step = home / str(steps[-1].number + 1)
    _remove(step)  # of a lesson that was killed, or undone
    _write_map(step, matrix)
    save_model(step, embedder, class_names=class_names, extra=stored | dict(extra))
    copy_model(step, run.model)
    align(run)


def undo(run: Run) -> bool:
    """Return to the model before the last lesson, bit for bit; False if there is no lesson."""
    steps = steps_of(run)
    if len(steps) < 2:
        return False
    copy_model(steps[-2].folder, run.model)
    align(run)
    _remove(steps[-1].folder)
    return True


def finish_lesson(path: Path) -> None:
    """Finish a lesson that was killed; a run that is as it should be is only read."""
    if (path / FOLDER).is_dir() and not _is_aligned(Run.open(path)):
        with Run.open(path, write=True) as run:
            align(run)


def _is_aligned(run: Run) -> bool:
    """Return whether index and kept embeddings are of the model in force."""
    if not steps_of(run):
        return True
    folder, digest = run.path / "index", model_digest(run.model)
    fits = not holds_index(folder) or FolderIndex.load(folder).about.model == digest
    return fits and embeddings_fit(run)


def align(run: Run) -> None:
    """Map the index and the kept embeddings to the model in force, wherever they are of another."""
    steps = steps_of(run)
    if not steps:
        return
    home, now = run.path / FOLDER, steps[-1]
    folder = run.path / "index"
    if holds_index(folder):
        index = FolderIndex.load(folder)
        if index.about.model != now.digest:
            known = {step.digest: step for step in _all_steps(run)}
            before = known.get(index.about.model)
            if before is not None:  # else it is of a model from before training: index it again
                to_now, to_before = now.matrix, before.matrix
                if not to_now.shape == to_before.shape == (index.about.dim, index.about.dim):
                    raise RunError(f"{folder} does not fit {home}; index the pictures again")
                change = to_now @ torch.linalg.inv(to_before)
                index = index.with_vectors(mapped(index.vectors, change))
                index.commit(calibrated(index, load(run.path))._replace(model=now.digest))
    kept = home / EMBEDDINGS
    if kept.is_file() and not embeddings_fit(run):
        if now.number == 0:
            write_file(run.path / EMBEDDINGS, read_bytes(kept, limit=memory()))
        else:
            _write_embeddings(run, home, now.matrix)
        write_file(home / NOTE, now.digest)


def _write_embeddings(run: Run, home: Path, matrix: Tensor) -> None:
    before = load_embeddings(home)
    assert before is not None
    test, sample, proxies = (
        mapped(torch.from_numpy(x), matrix).numpy()
        for x in (before.test, before.sample, before.proxies)
    )
    replace(before, test=test, sample=sample, proxies=proxies).save(run.path)


def _write_map(step: Path, matrix: Tensor) -> None:
    step.mkdir(exist_ok=True)
    write_file(step / MAP, tensor_bytes({"map": matrix}))


def _remove(step: Path) -> None:
    """Delete a step; without model.json it is none, wherever a kill stops this."""
    (step / DESCRIPTION).unlink(missing_ok=True)
    shutil.rmtree(step, ignore_errors=True)
