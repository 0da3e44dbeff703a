"""What a model searches with, put in force by one rename: its index and what feedback changes.

    RUN/model/model.json                names the weights; replacing it switches the model
    RUN/index/MODEL16.json              the manifest, named after the model's checksum: a version,
                                        the files below with their SHA-256, what holds for the
                                        index, and how many lines of feedback are in force
    RUN/index/vectors-SHA16.safetensors    unit vectors by the trained head, and labels
    RUN/index/items-SHA16.json          names, classes, columns, where each item is from
    RUN/index/features-SHA16.safetensors   the backbone's features of a sample of the items
    RUN/index/map-SHA16.safetensors     (D, D): what feedback does to the vectors; absent without
    RUN/feedback.jsonl                  what people said, a line each, only ever appended

Files are written under the names of their contents and never change; then the manifest is replaced.
A kill or a full disk leaves the old manifest or the new one. Training writes the manifest of its
model first and replaces model.json last, so that model and index switch together. What no manifest
in force names is deleted by the next writer.
"""

import dataclasses
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nofuss.errors import RunError
from nofuss.files import load_tensors, read_json, sha256, write_by_content, write_json

FORMAT = 3
PARTS = {
    "vectors": "safetensors",
    "items": "json",
    "features": "safetensors",
    "map": "safetensors",
}
MAP = "map"
_TRIES = 5
_CONTENT = re.compile(r"(vectors|items|features|map)-[0-9a-f]{16}\.(safetensors|json)")
_MANIFEST = re.compile(r"([0-9a-f]{16}|index)\.json")


class WrongFormatError(ValueError):
    """A manifest of another version of nofuss."""


@dataclass(frozen=True)
class Manifest:
    """What is in force for a model."""

    model: str
    """Its checksum; empty for an index of arrays."""
    version: int = 0
    """Counts the changes."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Part → SHA-256 of its content."""
    about: Mapping[str, Any] = field(default_factory=dict)
    """What holds for the whole index, see search/index.py."""
    feedback: int = 0
    """Lines of feedback.jsonl that are in force."""
    history: tuple[int, ...] = ()
    """Lines that were in force before, the last one last: for undo."""

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> "Manifest":
        """Read what `write_manifest` wrote; ValueError, with what is wrong, for anything else."""
        if stored.get("format") != FORMAT:
            raise WrongFormatError(f"is of format {stored.get('format')!r:.20}, expected {FORMAT}")
        values = {f.name: stored.get(f.name) for f in dataclasses.fields(cls)}
        files, history = values["files"], values["history"]
        if type(values["model"]) is not str or not isinstance(values["about"], dict):
            raise ValueError("its model is not a checksum, or nothing is said about the index")
        if not isinstance(files, dict) or not files.keys() <= PARTS.keys():
            raise ValueError("its files are not those of an index")
        if not all(re.fullmatch("[0-9a-f]{64}", str(checksum)) for checksum in files.values()):
            raise ValueError("its files have no checksums")  # and names must stay in the folder
        counts = [values["version"], values["feedback"], *(history or ())]
        if not isinstance(history, list) or any(type(n) is not int or n < 0 for n in counts):
            raise ValueError("its version and lines of feedback are not counts")
        return cls(**values | {"history": tuple(history)})

    def file(self, folder: Path, part: str) -> Path:
        """Return the file of a part."""
        return folder / f"{part}-{self.files[part][:16]}.{PARTS[part]}"


def manifest_file(folder: Path, model: str) -> Path:
    """Return the manifest of a model in a folder."""
    return folder / f"{model[:16] or 'index'}.json"


def read_manifest(folder: Path, model: str) -> Manifest | None:
    """Return the manifest in force for a model; None if there is none, ValueError for damage."""
    try:
        stored = read_json(manifest_file(folder, model))
    except FileNotFoundError:
        return None
    found = Manifest.from_dict(stored)
    if found.model != model:
        raise ValueError("its manifest is of another model")
    return found


def check_files(folder: Path, manifest: Manifest) -> None:
    """Raise ValueError for a file that is not what the manifest says."""
    for part, expected in manifest.files.items():
        if sha256(manifest.file(folder, part)) != expected:
            raise ValueError(f"{manifest.file(folder, part).name} does not match its checksum")


def write_manifest(folder: Path, manifest: Manifest, parts: Mapping[str, bytes | None]) -> Manifest:
    """Put contents in force and return the manifest that says so; the caller has the lock.

    parts: contents of those that change; None removes one. The others stay as they are.
    """
    folder.mkdir(parents=True, exist_ok=True)
    sums = dict(manifest.files)
    for part, content in parts.items():
        if content is None:
            sums.pop(part, None)
        else:
            sums[part] = write_by_content(folder, part, PARTS[part], content)
    made = dataclasses.replace(manifest, version=manifest.version + 1, files=sums)
    stored = {"format": FORMAT, **dataclasses.asdict(made)}
    write_json(manifest_file(folder, made.model), stored)  # the switch
    return made


def clear(folder: Path, model: str | None = None) -> None:
    """Delete what no manifest names, and with `model` the manifests of others.

    The caller has the lock, and the model is in force.
    """
    with suppress(OSError, ValueError):  # what can't be deleted now is tried again
        files = {path.name: path for path in folder.iterdir()}
        manifests = [found[1] for name in files if (found := _MANIFEST.fullmatch(name))]
        kept = set[str]()
        for name in manifests:
            if model is None or name == manifest_file(folder, model).stem:
                stored = Manifest.from_dict(read_json(files[f"{name}.json"]))
                kept |= {f"{name}.json", *(stored.file(folder, part).name for part in stored.files)}
        for name, path in files.items():
            if name not in kept and (_CONTENT.fullmatch(name) or _MANIFEST.fullmatch(name)):
                path.unlink(missing_ok=True)


def read_map(folder: Path, manifest: Manifest) -> Tensor | None:
    """Return what feedback does to vectors (D, D); None without feedback; ValueError for damage."""
    if MAP not in manifest.files:
        return None
    file = manifest.file(folder, MAP)
    if sha256(file) != manifest.files[MAP]:
        raise ValueError(f"{file.name} does not match its checksum")
    matrix = load_tensors(file)[0]["map"]
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1] or not matrix.isfinite().all():
        raise ValueError(f"{file.name} is not a map of vectors")
    return matrix.double()


def map_in_force(run: Path, model: str, dim: int) -> Tensor | None:
    """Return what feedback does to the vectors of a run's model; None without feedback."""
    folder = run / "index"
    for last in range(_TRIES):
        try:
            manifest = read_manifest(folder, model)
            matrix = None if manifest is None else read_map(folder, manifest)
            if matrix is not None and len(matrix) != dim:
                raise ValueError(f"its map is of {len(matrix)} dimensions, the model of {dim}")
            return matrix
        except FileNotFoundError as error:  # a writer has just replaced it
            if last == _TRIES - 1:
                raise damaged(folder, error) from None
        except Exception as error:  # damaged bytes can make their readers raise anything
            raise damaged(folder, error) from None
    return None


def damaged(folder: Path, error: Exception) -> RunError:
    """Return the error for an index that can't be read."""
    if isinstance(error, WrongFormatError):
        return RunError(
            f"the index in {folder} {error}; open it with the version of nofuss that wrote it, "
            "or delete the folder and make it again: nofuss index RUN DIR"
        )
    reason = " ".join(f"{type(error).__name__}: {error}".split())
    return RunError(
        f"the index in {folder} is damaged ({reason}); delete the folder and make it again: "
        "nofuss index RUN DIR"
    )


def mapped(vectors: Tensor, matrix: Tensor | None) -> Tensor:
    """Return unit vectors (N, D) after a map (D, D), if any; rows that are zero stay zero."""
    if matrix is None:
        return vectors
    images = vectors.double() @ matrix.T
    lengths = torch.linalg.vector_norm(images, dim=1, keepdim=True)
    return (images / torch.where(lengths > 0, lengths, 1.0)).to(vectors.dtype)
