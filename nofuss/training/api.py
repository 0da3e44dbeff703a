"""`nofuss.train`: the whole of `nofuss train` from Python."""

import inspect
import os
from contextlib import nullcontext
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args, get_type_hints

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from nofuss.config import Options, Preprocessing, fits
from nofuss.data.collection import Collection, from_dataset
from nofuss.data.readers.arrays import from_arrays
from nofuss.errors import DataError, NofussError, UsageError, in_python
from nofuss.model.backbones import OWN, left_as_given, own_backbone
from nofuss.training.callbacks import Callback
from nofuss.training.train import run_training


def train(
    data: Any = None,
    *,
    out: str | Path | None = None,
    resume: bool = False,
    preset: str | None = None,
    backbone: str | nn.Module | None = None,
    dim: int | None = None,
    head: str | None = None,
    loss: str | None = None,
    epochs: int | None = None,
    batch_size: int | None = None,
    test_fraction: float | None = None,
    seed: int | None = None,
    device: str | torch.device | None = None,
    preprocessing: Preprocessing | None = None,
    callback: Callback | None = None,
    **options: Any,
) -> Path:
    """Learn a distance and score it on classes never seen; return the run directory.

    data: a path to whatever `nofuss train` reads; `(X, y)` of vectors (N, D) or uint8 pictures
        (N, H, W) or (N, H, W, 3) with labels (N,); a torch `Dataset` of (input, label) pairs; a
        `Collection`; None for the built-in characters.
    backbone: a name, or a module of your own that maps pictures (B, 3, H, W) to features (B, F).
        It is trained in place with `preset="finetune"`, apart from parameters that you have frozen
        (`requires_grad=False`), and stays as it is with "frozen".
    preprocessing: how pictures become inputs of a module of your own; None is RGB of 224 pixels
        with ImageNet's mean and standard deviation.
    callback: a function that is called with an `Event` at the start, after every step and every
        epoch, at the end, and with the progress of slow work; an exception of it ends training,
        which can then be resumed.
    The other keywords are the flags of `nofuss train` with underscores; None is not asked.

    >>> run = nofuss.train("photos", epochs=10)  # doctest: +SKIP
    >>> nofuss.load(run).embed(["new.jpg"]).shape  # doctest: +SKIP
    torch.Size([1, 512])
    """
    module = backbone if isinstance(backbone, nn.Module) else None
    if backbone is not None and module is None and not isinstance(backbone, str):
        raise UsageError(f"backbone is {backbone!r:.60}; expected a name or a module")
    if module is None and preprocessing is not None:
        raise UsageError("preprocessing is for a backbone that is a module; leave it out")
    options |= {
        "out": out,
        "resume": resume,
        "preset": preset,
        "backbone": backbone if module is None else OWN,
        "dim": dim,
        "head": head,
        "loss": loss,
        "epochs": epochs,
        "batch_size": batch_size,
        "test_fraction": test_fraction,
        "seed": seed,
        "device": device,
    }
    try:
        with nullcontext() if module is None else left_as_given(module):
            own = None if module is None else own_backbone(module, preprocessing)
            found = {key: _setting(key, value) for key, value in options.items()}
            asked = Options(data=_path(data), **found)
            return run_training(asked, _collection(data), backbone=own, callback=callback)
    except NofussError as error:
        if "nofuss " not in str(error):  # a command to type has flags
            error.args = (in_python(str(error)), *error.args[1:])
        raise


def _whole_signature() -> inspect.Signature:
    """Return the signature of `train` with every field of `Options` as a keyword."""
    spelled = inspect.signature(train)
    known = {name: p for name, p in spelled.parameters.items() if name != "options"}
    kinds = get_type_hints(Options)  # without what the command line needs
    others = [
        inspect.Parameter(
            f.name, inspect.Parameter.KEYWORD_ONLY, default=f.default, annotation=kinds[f.name]
        )
        for f in fields(Options)
        if f.name not in known
    ]
    return spelled.replace(parameters=[*known.values(), *others])


train.__signature__ = _whole_signature()  # type: ignore[attr-defined]


def _setting(name: str, value: Any) -> Any:
    """Return an option in the type that the run's config.json has for it."""
    hints = get_type_hints(Options)
    if name not in hints:
        raise TypeError(f"train() got an unexpected keyword argument {name!r}")
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, torch.device) or (name == "unfreeze" and type(value) is int):
        value = str(value)
    kind = (get_args(hints[name]) or (hints[name],))[0]
    if kind is Path and value is not None:
        value = _path(value) or value
        kind = type(Path())
    # Words to choose from are left to check_limits.
    if value is not None and isinstance(kind, type) and not fits(value, kind):
        expected = "a path" if issubclass(kind, Path) else kind.__name__
        raise UsageError(f"--{name.replace('_', '-')} is {value!r:.60}; expected {expected}")
    return value


def _path(data: Any) -> Path | None:
    return Path(data).expanduser() if isinstance(data, str | os.PathLike) else None


def _collection(data: Any) -> Collection | None:
    """Return what is no path as a collection."""
    if data is None or isinstance(data, str | os.PathLike):
        return None
    if isinstance(data, Collection):
        return data
    kind, expected = type(data).__name__, "expected a path, (X, y), a torch Dataset or a Collection"
    if isinstance(data, tuple | list) and len(data) == 2:
        items, labels = _array(data[0]), _array(data[1])
        key = "vectors" if items.ndim == 2 else "images"
        return from_arrays({key: items, "labels": labels}, name="arrays")
    if isinstance(data, tuple | list | dict | np.ndarray | Tensor):
        raise DataError(f"data is a {kind}; {expected}")
    try:
        first = data[0][0]
    except (KeyError, IndexError, TypeError):
        raise DataError(
            f"{kind} does not give (input, label) pairs by number; {expected}"
        ) from None
    if getattr(first, "ndim", 3) < 2:
        raise DataError(f"{kind} gives vectors; give them and labels as (X, y)")
    return from_dataset(data)


def _array(values: Any) -> NDArray[Any]:
    """Return an array; words in objects, as pandas has them, as words."""
    found = np.asarray(values.detach().cpu() if isinstance(values, Tensor) else values)
    words = found.dtype == object and all(isinstance(value, str) for value in found.flat)
    return found.astype(np.str_) if words else found
