"""Teach a run by marks, and undo it: the head, the index and the kept embeddings change together.

What marks teach is a map (D, D) of embeddings (model/taught.py). The head is linear, so the map
becomes part of it, and the index needs no pictures: its vectors are mapped, which is what embedding
the pictures again would give, up to rounding.

    RUN/taught/0/         the model before the first lesson, with the identity as its map
    RUN/taught/1/ …       the model after each lesson: the model's files, map.safetensors
    RUN/taught/embeddings.safetensors   the kept embeddings before the first lesson

Every lesson starts from model 0 with all marks in force. A step is written whole before the model
is replaced; which step is in force follows from the model's own checksum. A kill in between leaves
vectors of another step: `align` maps them, whenever the run is opened to be taught.
"""

import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from nofuss.errors import RunError
from nofuss.files.atomic import check_regular, memory, read_regular, sha256, sync, write_file
from nofuss.files.folders import own_folder, refuse_link, remove, write_folder
from nofuss.files.lock import RunLock
from nofuss.model.saved import load_model, save_model
from nofuss.model.start import Affine
from nofuss.model.taught import mapped
from nofuss.model.tensors import read_shapes
from nofuss.run.directory import Run, open_run
from nofuss.run.embeddings import FILE as EMBEDDINGS
from nofuss.run.embeddings import load_embeddings
from nofuss.search.gallery import model_digest
from nofuss.search.indexing import load_index
from nofuss.search.searchable import NOTE, embeddings_fit
from nofuss.search.searcher import STRANGERS
from nofuss.search.stored import holds_parts

FOLDER, MAP = "taught", "map.safetensors"
NUMBER = re.compile("[0-9]{1,6}")
LARGEST_RATIO = 1e10
"""Of how much a map may lengthen one direction more than another: beyond, it can't be undone."""
MODEL_FILES = ("model.json", "weights.safetensors", "manifest.json")


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
            check_regular(self.folder / MAP)
            matrix = load_file(self.folder / MAP)["map"]
        except (OSError, SafetensorError, KeyError) as error:
            raise RunError(f"{self.folder / MAP} is damaged ({error}); restore it") from None
        shape = read_shapes(self.folder / "weights.safetensors").get("head.weight", ())
        dim = shape[0] if len(shape) == 2 else 0
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
    refuse_link(home)
    folders = [f for f in (home.iterdir() if home.is_dir() else ()) if NUMBER.fullmatch(f.name)]
    return [
        Step(folder, int(folder.name), model_digest(folder))
        for folder in sorted(folders, key=lambda folder: int(folder.name))
        if (folder / MAP).is_file() and not folder.is_symlink()
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
    home = own_folder(run.path / FOLDER)
    if not steps:
        for left in home.iterdir():  # of a model from before another training
            remove(left)
        if (run.path / EMBEDDINGS).is_file():
            write_file(home / EMBEDDINGS, read_regular(run.path / EMBEDDINGS, limit=memory()))
            write_file(home / NOTE, model_digest(run.model))
        steps = [_write_step(home / "0", run.model, torch.eye(len(matrix)).double())]
    embedder, class_names, stored = load_model(steps[0].folder)
    head = embedder.head
    weight, bias = matrix @ head.weight.detach().double(), matrix @ head.bias.detach().double()
    embedder.set_head(Affine(weight.float(), bias.float()), root=embedder.root)
    scratch = home / "next"
    remove(scratch)
    save_model(scratch, embedder, class_names=class_names, extra=stored | dict(extra))
    step = _write_step(home / str(steps[-1].number + 1), scratch, matrix)
    remove(scratch)
    _put_in_force(run, step)
    align(run)


def undo(run: Run) -> bool:
    """Return to the model before the last lesson, bit for bit; False if there is no lesson."""
    steps = steps_of(run)
    if len(steps) < 2:
        return False
    _put_in_force(run, steps[-2])
    align(run)
    remove(steps[-1].folder)
    return True


def finish_lesson(path: Path) -> None:
    """Finish a lesson that was killed; a run that is as it should be is only read."""
    if (path / FOLDER).is_dir() and not _is_aligned(open_run(path)):
        with RunLock() as lock:
            lock.take(path)
            align(open_run(path))


def _is_aligned(run: Run) -> bool:
    """Return whether index and kept embeddings are of the model in force."""
    if not steps_of(run):
        return True
    folder, digest = run.path / "index", model_digest(run.model)
    fits = not holds_parts(folder) or load_index(folder).extra.get("model") == digest
    return fits and embeddings_fit(run)


def align(run: Run) -> None:
    """Map the index and the kept embeddings to the model in force, wherever they are of another."""
    steps = steps_of(run)
    if not steps:
        return
    home, now = run.path / FOLDER, steps[-1]
    folder = run.path / "index"
    if holds_parts(folder):
        index = load_index(folder)
        if index.extra.get("model") != now.digest:
            known = {step.digest: step for step in _all_steps(run)}
            before = known.get(str(index.extra.get("model")))
            if before is not None:  # else it is of a model from before training: index it again
                to_now, to_before = now.matrix, before.matrix
                if not to_now.shape == to_before.shape == (index.dim, index.dim):
                    raise RunError(f"{folder} does not fit {home}; index the pictures again")
                index = index.mapped(to_now @ torch.linalg.inv(to_before))
                index.extra.pop(STRANGERS, None)  # of the former vectors
                index.extra["model"] = now.digest
                index.save(own_folder(folder))
    kept = home / EMBEDDINGS
    if kept.is_file() and not embeddings_fit(run):
        if now.number == 0:
            write_file(run.path / EMBEDDINGS, read_regular(kept, limit=memory()))
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


def _write_step(folder: Path, model: Path, matrix: Tensor) -> Step:
    """Copy a model's files into a step's folder, with its map."""
    with write_folder(folder) as new:
        _copy_model(model, new)
        save_file({"map": matrix.contiguous()}, new / MAP)
    return Step(folder, int(folder.name), model_digest(folder))


def _copy_model(source: Path, target: Path) -> None:
    """Copy the files of a model; a stranger's may be links to anything, which are refused."""
    for name in MODEL_FILES:
        refuse_link(source / name)
        if (source / name).is_file():
            check_regular(source / name, limit=memory())
            shutil.copyfile(source / name, target / name)


def _put_in_force(run: Run, step: Step) -> None:
    """Replace the run's model by that of a step, as a whole."""
    with write_folder(run.model) as new:
        _copy_model(step.folder, new)
    sync(run.path)
    assert sha256(run.model / "weights.safetensors") == step.digest
