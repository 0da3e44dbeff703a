"""A trained model as a folder: weights.safetensors, model.json and their checksums, no pickle.

The folder holds all that embedding needs: which backbone, its weights, how to prepare a
picture, the names of the training classes, and what else the caller wants kept.
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from nofuss.config import Preprocessing
from nofuss.errors import NofussError, RunError
from nofuss.files import MANIFEST, check_seal, parse_json, read_regular, seal
from nofuss.folders import write_folder
from nofuss.model.embedder import Embedder, build_embedder
from nofuss.model.tensors import fill, read_tensors

FORMAT = 1


@dataclass(frozen=True)
class SavedModel:
    """What a model folder holds."""

    embedder: Embedder
    preprocessing: Preprocessing | None
    class_names: list[str]
    extra: dict[str, Any] = field(default_factory=dict)


def save_model(
    folder: Path,
    embedder: Embedder,
    preprocessing: Preprocessing | None,
    *,
    class_names: Sequence[str] = (),
    extra: Mapping[str, Any] | None = None,
) -> None:
    """Write the folder as a whole: an interrupted write leaves the former one in place."""
    description = {
        "format": FORMAT,
        "backbone": embedder.backbone.name,
        "channels": embedder.backbone.channels,
        "dim": embedder.dim,
        "root": embedder.root,
        "preprocessing": dataclasses.asdict(preprocessing) if preprocessing else None,
        "class_names": list(class_names),
        "extra": dict(extra or {}),
    }
    tensors = {name: t.detach().cpu().contiguous() for name, t in embedder.state_dict().items()}
    with write_folder(folder) as new:
        save_file(tensors, new / "weights.safetensors")
        text = json.dumps(description, indent=2, ensure_ascii=False) + "\n"
        (new / "model.json").write_text(text, encoding="utf-8")
        seal(new)


def load_model(folder: Path) -> SavedModel:
    """Open a folder that save_model wrote; the embedder comes in eval mode."""
    try:
        if (folder / MANIFEST).exists():  # a model put together by hand has none
            check_seal(folder)
    except (OSError, ValueError) as error:
        raise RunError(f"the model in {folder} is damaged ({error}); restore it") from None
    try:
        description = parse_json(read_regular(folder / "model.json"))
    except FileNotFoundError:
        raise RunError(f"no model.json in {folder}; give a folder that training wrote") from None
    except (OSError, ValueError) as error:
        raise RunError(f"can't read {folder / 'model.json'}: {error}; restore it") from None
    found = description.get("format") if isinstance(description, dict) else None
    if found != FORMAT:
        raise RunError(
            f"{folder / 'model.json'} has format {found}, expected {FORMAT}; "
            "open it with the version of nofuss that wrote it, or train again"
        )
    try:
        embedder = build_embedder(
            description["backbone"],
            dim=description["dim"],
            channels=description["channels"],
            root=description["root"],
            weights=None,
        )
        preprocessing = _preprocessing(description["preprocessing"])
        class_names, extra = list(description["class_names"]), dict(description["extra"])
    except NofussError as error:
        raise RunError(f"can't rebuild the model of {folder}: {error}") from None
    except (AttributeError, KeyError, TypeError, ValueError, RuntimeError) as error:
        raise RunError(
            f"{folder / 'model.json'} is damaged ({type(error).__name__}: {error}); restore it"
        ) from None
    file = folder / "weights.safetensors"
    if not file.is_file():
        raise RunError(f"no weights.safetensors in {folder}; restore it or train again")
    fill(embedder, read_tensors(file), source=file)
    return SavedModel(embedder.eval(), preprocessing, class_names, extra)


def _preprocessing(stored: dict[str, Any] | None) -> Preprocessing | None:
    if stored is None:
        return None
    return Preprocessing(**{**stored, "mean": tuple(stored["mean"]), "std": tuple(stored["std"])})
