"""A trained model as a folder, safetensors and JSON, no pickle.

    model.json                  what embedding needs: backbone, preprocessing of a picture, names of
                                the training classes, what else the caller stores; and the SHA-256
                                of the weights
    weights-SHA16.safetensors   the weights, named after the first 16 digits of their SHA-256

Weights are written first, under their own name; replacing model.json switches the model. A model is
known by the SHA-256 of model.json, which names all that its vectors depend on.
"""

import copy
import dataclasses
import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from nofuss.config import Precision, Preprocessing, from_json
from nofuss.errors import NofussError, RunError, UsageError, one_line
from nofuss.files import (
    JSON_LIMIT,
    json_bytes,
    json_object,
    load_tensors,
    read_bytes,
    sha256,
    tensor_bytes,
    write_by_content,
    write_file,
)
from nofuss.model.backbones import OWN, check_shapes, fill, own_backbone
from nofuss.model.embedder import Embedder, build_embedder

FORMAT = 4
DESCRIPTION = "model.json"
LARGEST_SIDE = 4096
"""Largest side of a model's input picture: 200 MB as a tensor."""
_WEIGHTS = re.compile(r"weights-[0-9a-f]{16}\.safetensors")


@dataclass(frozen=True)
class Description:
    """What model.json says, besides its format."""

    backbone: str
    channels: int
    dim: int
    root: bool
    mirror: bool
    precision: Precision
    preprocessing: tuple[Preprocessing, ...]
    """Of each network; empty for vectors."""
    class_names: tuple[str, ...]
    extra: dict[str, Any]
    """What the caller stored; who reads it checks it."""
    weights: str
    """SHA-256 of the weights."""

    def file(self, folder: Path) -> Path:
        """Return the file of the weights."""
        return folder / f"weights-{self.weights[:16]}.safetensors"


class Loaded(NamedTuple):
    """A model that was read."""

    embedder: Embedder
    """In eval mode."""
    class_names: list[str]
    extra: dict[str, Any]
    digest: str
    """The model's checksum."""


def save_model(
    folder: Path,
    embedder: Embedder,
    *,
    class_names: Sequence[str] = (),
    extra: Mapping[str, Any] | None = None,
) -> None:
    """Replace the model in a folder: an interrupted write leaves the previous one in place."""
    with new_model(folder, embedder, class_names=class_names, extra=extra):
        pass


@contextmanager
def new_model(
    folder: Path,
    embedder: Embedder,
    *,
    class_names: Sequence[str] = (),
    extra: Mapping[str, Any] | None = None,
) -> Iterator[str]:
    """Yield the checksum of a model that is in force once the block ends without an error.

    What belongs to the model is written in the block, under a name that holds the checksum.
    """
    backbone = embedder.backbone
    looks = (part.preprocessing for part in backbone.parts)
    folder.mkdir(parents=True, exist_ok=True)
    weights = tensor_bytes(embedder.state_dict())
    description = Description(
        backbone=backbone.name,
        channels=backbone.channels,
        dim=embedder.dim,
        root=embedder.root,
        mirror=backbone.mirror,
        precision=backbone.precision,
        preprocessing=tuple(look for look in looks if look is not None),
        class_names=tuple(class_names),
        extra=dict(extra or {}),
        weights=write_by_content(folder, "weights", "safetensors", weights),
    )
    content = json_bytes({"format": FORMAT, **dataclasses.asdict(description)})
    yield hashlib.sha256(content).hexdigest()
    write_file(folder / DESCRIPTION, content)  # the switch
    with suppress(OSError):  # what can't be deleted now is tried again next time
        for file in folder.iterdir():
            if _WEIGHTS.fullmatch(file.name) and file != description.file(folder):
                file.unlink(missing_ok=True)


def model_digest(folder: Path) -> str:
    """Return the checksum of a model: vectors of different models can't be compared."""
    return _describe(folder)[1]


def model_files(folder: Path) -> list[Path]:
    """Return the files of a model, weights last."""
    return [folder / DESCRIPTION, _describe(folder)[0].file(folder)]


def load_model(folder: Path, *, backbone: nn.Module | None = None) -> Loaded:
    """Open a folder that save_model wrote.

    backbone: the module, where the model was trained on one from Python; its weights are replaced.
    """
    description, digest = _describe(folder)
    try:
        embedder = _build(folder, description, backbone)
    except NofussError:
        if _describe(folder)[1] == digest:
            raise
        return load_model(folder, backbone=backbone)  # another process has just replaced the model
    return Loaded(embedder, list(description.class_names), description.extra, digest)


def _describe(folder: Path) -> tuple[Description, str]:
    """Read model.json and its SHA-256."""
    file = folder / DESCRIPTION
    try:
        content = read_bytes(file, limit=JSON_LIMIT)
        values = json_object(content)
    except FileNotFoundError:
        raise RunError(f"no model.json in {folder}; give a folder that training wrote") from None
    except (OSError, ValueError) as error:
        raise RunError(f"{file} is damaged ({error}); restore it") from None
    if (found := values.pop("format", None)) != FORMAT:
        raise RunError(
            f"{file} has format {found!r:.20}, expected {FORMAT}; open it with the version of "
            "nofuss that wrote it, or train again"
        )
    description = from_json(Description, values, where=file)
    if not re.fullmatch("[0-9a-f]{64}", description.weights):
        raise RunError(f"{file} is damaged (it does not name its weights); restore it")
    return description, hashlib.sha256(content).hexdigest()


def _build(folder: Path, description: Description, module: nn.Module | None) -> Embedder:
    """Return the embedder of a description, with the weights in the folder."""
    file = description.file(folder)
    try:
        if sha256(file) != description.weights:
            raise ValueError("its checksum differs")
        tensors, _ = load_tensors(file)
    except FileNotFoundError:
        raise RunError(f"no {file.name} in {folder}; restore it or train again") from None
    except (OSError, ValueError) as error:
        raise RunError(f"{file} is damaged ({error}); restore it") from None
    _check_preprocessing(description, where=folder / DESCRIPTION)
    looks = description.preprocessing
    settings: dict[str, Any] = {
        name: getattr(description, name)
        for name in ("backbone", "dim", "channels", "root", "mirror")
    }
    # Several networks have their sides in their names.
    settings |= {"weights": None, "size": looks[0].size if len(looks) == 1 else None}
    try:
        if module is None:
            with torch.device("meta"):  # take no memory before the file's shapes are checked
                check_shapes(build_embedder(**settings), tensors, source=file)
        elif description.backbone != OWN:
            raise UsageError(f"it was trained on {description.backbone}; leave backbone out")
        else:
            settings["backbone"] = own_backbone(copy.deepcopy(module), *looks)
        embedder = build_embedder(**settings)
        parts = [part for part in embedder.backbone.parts if part.preprocessing is not None]
        if len(looks) != len(parts):
            raise ValueError(f"its preprocessing does not fit {description.backbone}")
        fill(embedder, tensors, source=file)
    except NofussError:
        raise
    except (TypeError, ValueError, RuntimeError) as error:
        reason = one_line(f"{type(error).__name__}: {error}")
        raise RunError(f"{folder / DESCRIPTION} is damaged ({reason}); restore it") from None
    for part, look in zip(parts, looks, strict=True):
        part.preprocessing = look
    embedder.backbone.precision = description.precision
    return embedder.eval()


def _check_preprocessing(description: Description, *, where: Path) -> None:
    """Raise RunError for values that no backbone of pictures can have."""
    for p in description.preprocessing:
        channels = {"RGB": 3, "L": 1}.get(p.mode)
        if not (
            1 <= p.size <= p.resize <= LARGEST_SIDE
            and channels == description.channels == len(p.mean) == len(p.std)
            and 0 not in p.std
        ):
            raise RunError(f"{where} has preprocessing that no backbone has; restore it")
