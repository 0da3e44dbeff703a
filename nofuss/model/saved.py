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
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, get_args

import torch
from torch import nn

from nofuss.config import Precision, Preprocessing
from nofuss.errors import NofussError, RunError, UsageError
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

FORMAT = 3
DESCRIPTION = "model.json"
LARGEST_SIDE = 4096
"""Largest side of a model's input picture: 200 MB as a tensor."""
ANY_SIDE = 64
"""Networks take any picture from this side on; smaller ones are tried."""
_TRIES = 5
_WEIGHTS = re.compile(r"weights-[0-9a-f]{16}\.safetensors")


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
    preprocessing = embedder.backbone.preprocessing
    description = {
        "format": FORMAT,
        "backbone": embedder.backbone.name,
        "channels": embedder.backbone.channels,
        "dim": embedder.dim,
        "root": embedder.root,
        "mirror": embedder.backbone.mirror,
        "precision": embedder.backbone.precision,
        "preprocessing": dataclasses.asdict(preprocessing) if preprocessing else None,
        "class_names": list(class_names),
        "extra": dict(extra or {}),
    }
    folder.mkdir(parents=True, exist_ok=True)
    weights = tensor_bytes(embedder.state_dict())
    description["weights"] = write_by_content(folder, "weights", "safetensors", weights)
    content = json_bytes(description)
    yield hashlib.sha256(content).hexdigest()
    write_file(folder / DESCRIPTION, content)  # the switch
    with suppress(OSError):  # what can't be deleted now is tried again next time
        for file in folder.iterdir():
            if _WEIGHTS.fullmatch(file.name) and file != _weights(folder, description):
                file.unlink(missing_ok=True)


def model_digest(folder: Path) -> str:
    """Return the checksum of a model: vectors of different models can't be compared."""
    return _describe(folder)[1]


def model_files(folder: Path) -> list[Path]:
    """Return the files of a model, weights last."""
    return [folder / DESCRIPTION, _weights(folder, _describe(folder)[0])]


def load_model(folder: Path, *, backbone: nn.Module | None = None) -> Loaded:
    """Open a folder that save_model wrote.

    backbone: the module, where the model was trained on one from Python; its weights are replaced.
    """
    for _ in range(_TRIES):
        description, digest = _describe(folder)
        try:
            return Loaded(*_load_model(folder, description, backbone), digest)
        except (RunError, UsageError):  # has another process just replaced the model?
            if _describe(folder)[1] == digest:
                raise
    description, digest = _describe(folder)
    return Loaded(*_load_model(folder, description, backbone), digest)


def _describe(folder: Path) -> tuple[dict[str, Any], str]:
    """Read model.json and its SHA-256; RunError for anything that does not name its weights."""
    file = folder / DESCRIPTION
    try:
        content = read_bytes(file, limit=JSON_LIMIT)
        description = json_object(content)
    except FileNotFoundError:
        raise RunError(f"no model.json in {folder}; give a folder that training wrote") from None
    except (OSError, ValueError) as error:
        raise RunError(f"{file} is damaged ({error}); restore it") from None
    if description.get("format") != FORMAT:
        raise RunError(
            f"{file} has format {description.get('format')!r:.20}, expected {FORMAT}; open it with "
            "the version of nofuss that wrote it, or train again"
        )
    if not re.fullmatch("[0-9a-f]{64}", str(description.get("weights"))):
        raise RunError(f"{file} is damaged (it does not name its weights); restore it")
    return description, hashlib.sha256(content).hexdigest()


def _weights(folder: Path, description: Mapping[str, Any]) -> Path:
    return folder / f"weights-{description['weights'][:16]}.safetensors"


def _load_model(
    folder: Path, description: dict[str, Any], module: nn.Module | None
) -> tuple[Embedder, list[str], dict[str, Any]]:
    file = _weights(folder, description)
    try:
        if sha256(file) != description["weights"]:
            raise ValueError("its checksum differs")
        tensors, _ = load_tensors(file)
    except FileNotFoundError:
        raise RunError(f"no {file.name} in {folder}; restore it or train again") from None
    except (OSError, ValueError) as error:
        raise RunError(f"{file} is damaged ({error}); restore it") from None
    try:
        settings = _settings(description)
        if module is None:
            with torch.device("meta"):  # take no memory before the file's shapes are checked
                planned = build_embedder(**settings, weights=None)
            check_shapes(planned, tensors, source=file)
        elif settings["backbone"] != OWN:
            raise UsageError(f"it was trained on {settings['backbone']}; leave backbone out")
        preprocessing = _preprocessing(description)
        class_names, extra = _class_names(description), _extra(description)
        if module is not None:
            settings["backbone"] = own_backbone(copy.deepcopy(module), preprocessing)
        embedder = build_embedder(**settings, weights=None)
        if (preprocessing is None) != (embedder.backbone.preprocessing is None):
            takes = "vectors" if preprocessing else "pictures"
            raise ValueError(f"preprocessing does not fit {embedder.backbone.name}, for {takes}")
        fill(embedder, tensors, source=file)
        embedder.backbone.preprocessing = preprocessing
        embedder.backbone.precision = description["precision"]
        if preprocessing is not None and preprocessing.size < ANY_SIDE:
            side = preprocessing.size
            embedder.eval()(torch.zeros(1, embedder.backbone.channels, side, side))
    except RunError:
        raise
    except NofussError as error:
        raise RunError(f"can't rebuild the model of {folder}: {error}") from None
    except (AttributeError, KeyError, TypeError, ValueError, RuntimeError) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise RunError(f"{folder / DESCRIPTION} is damaged ({reason}); restore it") from None
    return embedder.eval(), class_names, extra


def _settings(description: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments that the embedder is built with."""
    kinds = {"backbone": str, "dim": int, "channels": int, "root": bool, "mirror": bool}
    for name, kind in kinds.items():
        if type(description[name]) is not kind:
            raise ValueError(f"{name} is {description[name]!r:.40}; expected {kind.__name__}")
    if description["precision"] not in get_args(Precision):
        raise ValueError(f"precision is {description['precision']!r:.40}")
    stored = description["preprocessing"]
    size = stored["size"] if stored else None
    return {name: description[name] for name in kinds} | {"size": size}


def _preprocessing(description: dict[str, Any]) -> Preprocessing | None:
    """Return the preprocessing; ValueError for values that no backbone of pictures can have."""
    stored = description["preprocessing"]
    if stored is None:
        return None
    p = Preprocessing(**stored | {name: tuple(stored[name]) for name in ("mean", "std")})
    channels = {"RGB": 3, "L": 1}.get(p.mode)
    numbers = (*p.mean, *p.std, p.affine, p.zoom, p.light)
    valid = {
        "mode": channels == description["channels"],
        "size": type(p.size) is int and 1 <= p.size <= LARGEST_SIDE,
        "resize": type(p.resize) is int and p.size <= p.resize <= LARGEST_SIDE,
        "squash": type(p.squash) is bool,
        "flip": type(p.flip) is bool,
        "mean": len(p.mean) == channels,
        "std": len(p.std) == channels and all(value != 0 for value in p.std),
        "affine": 0 <= p.affine <= 1,
        "zoom": 0 < p.zoom <= 1,
        "light": 0 <= p.light <= 1,
        "train_size": p.train_size is None
        or (type(p.train_size) is int and 1 <= p.train_size <= LARGEST_SIDE),
        "numbers": all(type(x) in (int, float) and math.isfinite(x) for x in numbers),
    }
    if wrong := [name for name, is_valid in valid.items() if not is_valid]:
        raise ValueError(f"preprocessing has an invalid {', '.join(wrong)}")
    return p


def _class_names(description: dict[str, Any]) -> list[str]:
    names = description["class_names"]
    if not isinstance(names, list) or not all(type(name) is str for name in names):
        raise ValueError("class_names is not a list of strings")
    return names


def _extra(description: dict[str, Any]) -> dict[str, Any]:
    """Return what the caller stored; who reads it checks it."""
    extra = description["extra"]
    if not isinstance(extra, dict):
        raise ValueError("extra is not a JSON object")
    return extra
