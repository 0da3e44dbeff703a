"""A trained model as a folder: weights.safetensors, model.json and their checksums, no pickle.

The folder has all that embedding needs: the name of the backbone, its weights, the preprocessing of
a picture, the names of the training classes, and what else the caller stores.
"""

import copy
import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import torch
from safetensors.torch import save_file
from torch import nn

from nofuss.config import Precision, Preprocessing
from nofuss.errors import NofussError, RunError, UsageError
from nofuss.files.atomic import (
    DESCRIPTION_LIMIT,
    MANIFEST,
    check_seal,
    parse_json,
    read_regular,
    seal,
)
from nofuss.files.folders import read_folder, write_folder
from nofuss.files.lock import check_in_place
from nofuss.model.backbones import OWN, own_backbone
from nofuss.model.embedder import Embedder, build_embedder
from nofuss.model.tensors import check_shapes, fill, for_file, read_shapes, read_tensors

FORMAT = 2
LARGEST_SIDE = 4096
"""Largest side of a model's input picture: 200 MB as a tensor."""


def save_model(
    folder: Path,
    embedder: Embedder,
    *,
    class_names: Sequence[str] = (),
    extra: Mapping[str, Any] | None = None,
) -> None:
    """Write the folder as a whole: an interrupted write leaves the previous one in place."""
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
    check_in_place(folder.parent)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with write_folder(folder) as new:
        save_file(for_file(embedder.state_dict()), new / "weights.safetensors")
        text = json.dumps(description, indent=2) + "\n"
        (new / "model.json").write_text(text, encoding="utf-8")
        seal(new)


def load_model(
    folder: Path, *, backbone: nn.Module | None = None
) -> tuple[Embedder, list[str], dict[str, Any]]:
    """Open a folder that save_model wrote: the embedder in eval mode, class names, the extra.

    backbone: the module, where the model was trained on one from Python; its weights are replaced.
    """
    return read_folder(folder, lambda: _load_model(folder, backbone))


def _load_model(
    folder: Path, backbone: nn.Module | None
) -> tuple[Embedder, list[str], dict[str, Any]]:
    try:
        if (folder / MANIFEST).exists():  # a model made by other programs has none
            check_seal(folder)
    except (OSError, ValueError) as error:
        raise RunError(f"the model in {folder} is damaged ({error}); restore it") from None
    try:
        description = parse_json(read_regular(folder / "model.json", limit=DESCRIPTION_LIMIT))
    except FileNotFoundError:
        raise RunError(f"no model.json in {folder}; give a folder that training wrote") from None
    except (OSError, ValueError) as error:
        raise RunError(f"can't read {folder / 'model.json'}: {error}; restore it") from None
    file_format = description.get("format") if isinstance(description, dict) else None
    if file_format != FORMAT:
        raise RunError(
            f"{folder / 'model.json'} has format {file_format}, expected {FORMAT}; "
            "open it with the version of nofuss that wrote it, or train again"
        )
    file = folder / "weights.safetensors"
    if not file.is_file():
        raise RunError(f"no weights.safetensors in {folder}; restore it or train again")
    try:
        settings = _settings(description)
        if backbone is not None:
            return _with_module(folder, description, settings, backbone)
        with torch.device("meta"):  # take no memory before the file's shapes are checked
            planned = build_embedder(**settings, weights=None)
        check_shapes(planned, read_shapes(file), source=file)
        preprocessing = _preprocessing(description["preprocessing"], planned)
        if preprocessing is not None:  # the size may be too small for the network
            shape = (1, settings["channels"], preprocessing.size, preprocessing.size)
            planned.eval()(torch.empty(shape, device="meta"))
        class_names, extra = _words(description["class_names"]), _extra(description["extra"])
        precision = _precision(description.get("precision", "fp32"))
        embedder = build_embedder(**settings, weights=None)
    except RunError:
        raise
    except NofussError as error:
        raise RunError(f"can't rebuild the model of {folder}: {error}") from None
    except (AttributeError, KeyError, TypeError, ValueError, RuntimeError) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise RunError(f"{folder / 'model.json'} is damaged ({reason}); restore it") from None
    fill(embedder, read_tensors(file), source=file)
    embedder.backbone.preprocessing = preprocessing
    embedder.backbone.precision = precision
    return embedder.eval(), class_names, extra


def _with_module(
    folder: Path, description: dict[str, Any], settings: dict[str, Any], module: nn.Module
) -> tuple[Embedder, list[str], dict[str, Any]]:
    """Build the model around a module that the caller has built."""
    if settings["backbone"] != OWN:
        raise UsageError(f"{folder} was trained on {settings['backbone']}; leave backbone out")
    stored = description["preprocessing"]
    lists = {name: tuple(stored[name]) for name in ("mean", "std")}
    network = own_backbone(copy.deepcopy(module), Preprocessing(**{**stored, **lists}))
    embedder = build_embedder(**settings | {"backbone": network})
    _preprocessing(stored, embedder)  # refuses what it can't be
    file = folder / "weights.safetensors"
    fill(embedder, read_tensors(file), source=file)
    network.precision = _precision(description.get("precision", "fp32"))
    names, extra = _words(description["class_names"]), _extra(description["extra"])
    return embedder.eval(), names, extra


def _settings(description: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments that the embedder is built with."""
    kinds = {"backbone": str, "dim": int, "channels": int, "root": bool, "mirror": bool}
    for name, kind in kinds.items():
        if type(description[name]) is not kind:
            raise ValueError(f"{name} is {description[name]!r:.40}; expected {kind.__name__}")
    stored = description["preprocessing"]
    size = stored["size"] if stored else None  # checked with the rest of the preprocessing
    return {name: description[name] for name in kinds} | {"size": size}


def _preprocessing(stored: dict[str, Any] | None, embedder: Embedder) -> Preprocessing | None:
    """Return the preprocessing; ValueError for values that no backbone of pictures can have."""
    if (stored is None) != (embedder.backbone.preprocessing is None):
        takes = "vectors" if stored else "pictures"
        raise ValueError(f"preprocessing does not fit {embedder.backbone.name}, for {takes}")
    if stored is None:
        return None
    preprocessing = Preprocessing(
        **{**stored, "mean": tuple(stored["mean"]), "std": tuple(stored["std"])}
    )
    channels = {"RGB": 3, "L": 1}.get(preprocessing.mode)
    numbers = (*preprocessing.mean, *preprocessing.std, preprocessing.affine)
    numbers = (*numbers, preprocessing.zoom, preprocessing.light)
    valid = {
        "mode": channels == embedder.backbone.channels,
        "size": type(preprocessing.size) is int and 1 <= preprocessing.size <= LARGEST_SIDE,
        "resize": type(preprocessing.resize) is int
        and preprocessing.size <= preprocessing.resize <= LARGEST_SIDE,
        "squash": type(preprocessing.squash) is bool,
        "flip": type(preprocessing.flip) is bool,
        "mean": len(preprocessing.mean) == channels,
        "std": len(preprocessing.std) == channels
        and all(value != 0 for value in preprocessing.std),
        "affine": 0 <= preprocessing.affine <= 1,
        "zoom": 0 < preprocessing.zoom <= 1,
        "light": 0 <= preprocessing.light <= 1,
        "train_size": preprocessing.train_size is None
        or (
            type(preprocessing.train_size) is int and 1 <= preprocessing.train_size <= LARGEST_SIDE
        ),
        "numbers": all(type(x) in (int, float) and math.isfinite(x) for x in numbers),
    }
    if wrong := [name for name, is_valid in valid.items() if not is_valid]:
        raise ValueError(f"preprocessing has an invalid {', '.join(wrong)}")
    return preprocessing


def _precision(value: Any) -> Precision:
    """Return the precision; models that were saved before there was a choice have none."""
    if value not in get_args(Precision):
        raise ValueError(f"precision is {value!r:.40}")
    found: Precision = value
    return found


def _words(values: Any) -> list[str]:
    if not isinstance(values, list) or not all(type(value) is str for value in values):
        raise ValueError("class_names is not a list of strings")
    return values


def _extra(values: Any) -> dict[str, Any]:
    """Return what the caller stored; who reads it checks it."""
    if not isinstance(values, dict):
        raise ValueError("extra is not a JSON object")
    return values
