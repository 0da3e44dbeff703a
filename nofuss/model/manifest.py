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
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from nofuss.config import read_as
from nofuss.errors import RunError, one_line
from nofuss.files import load_tensors, read_json, sha256, write_by_content, write_json
from nofuss.geometry import normalize

FORMAT = 3
PARTS = {"vectors": "safetensors", "items": "json", "features": "safetensors", "map": "safetensors"}
_TRIES = 5
_OURS = re.compile(rf"({'|'.join(PARTS)})-[0-9a-f]{{16}}\.\w+|([0-9a-f]{{16}}|index)\.json")
_Read = TypeVar("_Read")


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
        """Read what `write_manifest` wrote; ValueError for anything else."""
        found = dict(stored)
        if (version := found.pop("format", None)) != FORMAT:
            raise ValueError(f"is of format {version!r:.20}, expected {FORMAT}")
        made = read_as(cls, found)
        # Names of files must stay in the folder.
        are_sums = all(re.fullmatch("[0-9a-f]{64}", checksum) for checksum in made.files.values())
        if not are_sums or not made.files.keys() <= PARTS.keys():
            raise ValueError("nofuss did not write its manifest")
        return made

    def file(self, folder: Path, part: str) -> Path:
        """Return the file of a part."""
        return folder / f"{part}-{self.files[part][:16]}.{PARTS[part]}"

    def checked(self, folder: Path, part: str) -> Path:
        """Return the file of a part; ValueError if its checksum differs."""
        file = self.file(folder, part)
        if sha256(file) != self.files[part]:
            raise ValueError(f"{file.name} does not match its checksum")
        return file

    def read_map(self, folder: Path, dim: int) -> Tensor | None:
        """Return what feedback does to vectors (D, D); None without; ValueError for damage."""
        if "map" not in self.files:
            return None
        matrix = load_tensors(self.checked(folder, "map"))[0]["map"]
        if matrix.shape != (dim, dim) or not matrix.isfinite().all():
            raise ValueError(f"its map is not of {dim} dimensions")
        return matrix.double()


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


def read_in_force(folder: Path, model: str, read: Callable[[Manifest], _Read]) -> _Read | None:
    """Return what `read` makes of the manifest in force; None without one, RunError for damage."""
    for left in reversed(range(_TRIES)):
        try:
            manifest = read_manifest(folder, model)
            return None if manifest is None else read(manifest)
        except Exception as error:  # damaged bytes can make their readers raise anything
            is_gone = isinstance(error, FileNotFoundError)
            if left and is_gone:
                continue  # a writer has just replaced it
            if isinstance(error, MemoryError | OSError) and not is_gone:
                raise  # of this machine, not of the content
            reason = one_line(f"{type(error).__name__}: {error}")
            raise RunError(
                f"the index in {folder} can't be read ({reason}); delete the folder and make it "
                "again: nofuss index RUN DIR"
            ) from None
    return None


def write_manifest(folder: Path, manifest: Manifest, parts: Mapping[str, bytes | None]) -> Manifest:
    """Put contents in force and return the manifest that says so; the caller has the lock.

    parts: contents of those that change; None removes one. The others stay as they are.
    """
    folder.mkdir(parents=True, exist_ok=True)
    sums = {part: checksum for part, checksum in manifest.files.items() if part not in parts}
    for part, content in parts.items():
        if content is not None:
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
        files = {path.name: path for path in folder.iterdir() if _OURS.fullmatch(path.name)}
        manifests = {name for name in files if "-" not in name}
        if model is not None:
            manifests &= {manifest_file(folder, model).name}
        kept = set(manifests)
        for name in manifests:
            stored = Manifest.from_dict(read_json(files[name]))
            kept |= {stored.file(folder, part).name for part in stored.files}
        for name in files.keys() - kept:
            files[name].unlink(missing_ok=True)


def map_in_force(run: Path, model: str, dim: int) -> Tensor | None:
    """Return what feedback does to the vectors of a run's model; None without feedback."""
    folder = run / "index"
    return read_in_force(folder, model, lambda manifest: manifest.read_map(folder, dim))


def mapped(vectors: Tensor, matrix: Tensor | None) -> Tensor:
    """Return unit vectors (N, D) after a map (D, D), if any; rows that are zero stay zero."""
    return vectors if matrix is None else normalize(vectors.double() @ matrix.T).to(vectors.dtype)
