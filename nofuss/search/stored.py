"""An index on disk: written as a whole, and read as if a stranger had made it.

    vectors-SHA.safetensors   vectors (N, D) float32, label codes (N,)
    items-SHA.json            names, class names, columns, what the caller stores with them
    manifest.json             format, the two files and their sha256

The files are named after their content and the manifest is replaced last and as a whole: a crash
leaves the previous index. Vectors are mapped into memory, so that opening copies nothing.
"""

import json
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import filelock
import torch
from torch import Tensor

from nofuss.data.columns import Column
from nofuss.errors import RunError
from nofuss.files import (
    JSON_LIMIT,
    LOCK,
    load_tensors,
    memory,
    parse_json,
    read_bytes,
    sha256,
    tensor_bytes,
    write_by_content,
    write_file,
)
from nofuss.search.columns import ColumnTable
from nofuss.search.filter import LABEL

FORMAT = 1
MANIFEST = "manifest.json"
PARSED = 24
"""How many times its size a JSON file may take in memory when it is parsed."""
Label = str | None
_TYPES: dict[str, tuple[type, ...]] = {
    "number": (float, int),
    "text": (str,),
    "date": (str,),
    "bool": (bool,),
}
_PARTS = {"vectors": "safetensors", "items": "json"}
_OURS = re.compile(r"vectors-[0-9a-f]{16}\.safetensors|items-[0-9a-f]{16}\.json")


class Stored(NamedTuple):
    """The content of the folder."""

    vectors: Tensor
    names: Sequence[str]
    labels: Sequence[Label]
    table: ColumnTable
    extra: Mapping[str, Any]


def write_stored(folder: Path, content: Stored) -> None:
    """Replace the index in a folder as a whole."""
    folder.mkdir(parents=True, exist_ok=True)
    classes = sorted({label for label in content.labels if label is not None})
    code = {label: i for i, label in enumerate(classes)}
    codes = [-1 if label is None else code[label] for label in content.labels]
    tensors = {"vectors": content.vectors.contiguous(), "labels": torch.tensor(codes).long()}
    columns = {name: [c.type, c.values] for name, c in content.table.columns.items()}
    items = {"names": content.names, "classes": classes, "columns": columns}
    items["extra"] = content.extra
    # json.dumps escapes: names may hold bytes that are no UTF-8
    parts = {"vectors": tensor_bytes(tensors), "items": json.dumps(items).encode()}
    with filelock.FileLock(folder / LOCK):  # of two writers one waits for the other
        checksums = {
            part: write_by_content(folder, part, _PARTS[part], each) for part, each in parts.items()
        }
        manifest = {"format": FORMAT, "sha256": checksums}
        write_file(folder / MANIFEST, json.dumps(manifest, indent=2) + "\n")  # the switch
        current = {_file(part, checksums) for part in _PARTS}
        with suppress(OSError):  # what can't be deleted now is tried again next time
            for file in folder.iterdir():
                if _OURS.fullmatch(file.name) and file.name not in current:
                    file.unlink(missing_ok=True)


def holds_parts(folder: Path) -> bool:
    """Return whether a folder holds an index, or what is left of one."""
    names = (file.name for file in folder.iterdir()) if folder.is_dir() else ()
    return any(name == MANIFEST or _OURS.fullmatch(name) for name in names)


def read_stored(folder: Path) -> Stored:
    """Read what `write_stored` wrote; RunError for anything else."""
    if not (folder / MANIFEST).is_file():
        raise RunError(f"no index in {folder}: no {MANIFEST}; make one: nofuss index RUN DIR")
    try:
        while True:
            manifest = read_bytes(folder / MANIFEST, limit=JSON_LIMIT)
            try:
                return _read(folder, parse_json(manifest))
            except FileNotFoundError:  # another process has just replaced it
                if read_bytes(folder / MANIFEST, limit=JSON_LIMIT) == manifest:
                    raise
    except RunError:
        raise
    except Exception as error:  # damaged bytes can make their readers raise anything
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise RunError(
            f"the index in {folder} is damaged ({reason}); delete the folder and make it again: "
            "nofuss index RUN DIR"
        ) from None


def _read(folder: Path, manifest: Any) -> Stored:
    version, checksums = manifest["format"], manifest["sha256"]
    if version != FORMAT:
        raise RunError(
            f"{folder} holds an index of format {version!r:.20}, expected {FORMAT}; "
            "open it with the version of nofuss that wrote it, or make it again"
        )
    files = {part: folder / _file(part, checksums) for part in _PARTS}
    for part, file in files.items():
        if sha256(file) != checksums[part]:
            raise ValueError(f"{file.name} does not match its checksum")
    items = parse_json(read_bytes(files["items"], limit=memory() // PARSED))
    names, classes, extra = items["names"], items["classes"], items["extra"]
    tensors, _ = load_tensors(files["vectors"])
    vectors, codes = tensors["vectors"], tensors["labels"]
    _check_numbers(vectors, codes, len(_unique_strings(classes, "classes")))
    if len(_unique_strings(names, "names")) != len(vectors):
        raise ValueError(f"{len(names)} names for {len(vectors)} vectors")
    if not isinstance(extra, dict):
        raise ValueError("extra is not a JSON object")
    labels = [None if c < 0 else classes[c] for c in codes.tolist()]
    table = _table(items.get("columns", {}), len(vectors))
    return Stored(vectors, names, labels, table, extra)


def _table(columns: Any, length: int) -> ColumnTable:
    """Return the columns, after a look at each value."""
    if not isinstance(columns, dict):
        raise ValueError("columns is not a JSON object")
    read = {}
    for name, column in columns.items():
        kind, values = column
        if kind not in _TYPES or name == LABEL or not isinstance(values, list):
            raise ValueError(f"{name!r:.40} is not a column")
        if not all(value is None or _is_value(value, kind) for value in values):
            raise ValueError(f"column {name!r:.40} holds a value that is not {kind}")
        read[name] = Column(kind, values)
    return ColumnTable(length, read)


def _is_value(value: Any, kind: str) -> bool:
    """Return whether a value is of its column's type; a number must be one that a float holds."""
    if type(value) not in _TYPES[kind]:
        return False
    return kind != "number" or abs(value) <= sys.float_info.max  # not NaN either


def _check_numbers(vectors: Tensor, codes: Tensor, classes: int) -> None:
    """Refuse anything but unit vectors with a class or −1 for each."""
    if vectors.dtype != torch.float32 or vectors.ndim != 2 or not vectors.shape[1]:
        got = f"{vectors.dtype} {tuple(vectors.shape)}"
        raise ValueError(f"vectors are {got}; expected float32 (N, D)")
    norms = torch.linalg.vector_norm(vectors, dim=1)
    if not (((norms - 1).abs() < 1e-3) | (norms == 0)).all():  # NaN is neither
        raise ValueError("vectors are not of unit length")
    if codes.dtype != torch.int64 or codes.shape != vectors.shape[:1]:
        got = f"{codes.dtype} {tuple(codes.shape)}"
        raise ValueError(f"labels are {got} for {len(vectors)} vectors; expected int64 (N,)")
    if len(codes) and not (codes.min() >= -1 and codes.max() < classes):
        raise ValueError(f"labels reach beyond the {classes} classes")


def _unique_strings(values: Any, what: str) -> list[str]:
    if not isinstance(values, list) or not all(type(value) is str for value in values):
        raise ValueError(f"{what} is not a list of strings")
    if len(set(values)) < len(values):
        raise ValueError(f"{what} holds a string twice")
    return values


def _file(part: str, checksums: Mapping[str, str]) -> str:
    if not re.fullmatch("[0-9a-f]{64}", checksums[part]):  # a path must not lead out of the folder
        raise ValueError(f"{checksums[part]!r:.40} is not a checksum")
    return f"{part}-{checksums[part][:16]}.{_PARTS[part]}"
