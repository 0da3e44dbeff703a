"""`nofuss.train`: the whole of `nofuss train` from Python."""

import os
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from nofuss.config import Preprocessing, TrainConfig
from nofuss.data.arrays import from_arrays
from nofuss.data.collection import Collection, from_dataset
from nofuss.errors import UsageError, in_python
from nofuss.model.backbones import OWN, own_backbone
from nofuss.run.events import Callback
from nofuss.training.pipeline import run_training


def train(
    data: Any = None,
    *,
    backbone: str | nn.Module | None = None,
    preprocessing: Preprocessing | None = None,
    callback: Callback | None = None,
    **settings: Any,
) -> Path:
    """Learn a distance and score it on classes never seen; return the run directory.

    data: a path to whatever `nofuss train` reads; `(X, y)` of vectors (N, D) or uint8 pictures
        (N, H, W) or (N, H, W, 3) with labels (N,); a torch `Dataset` of (input, label) pairs; a
        `Collection`; None for the built-in characters.
    backbone: a name, or a module of your own that maps pictures (B, 3, H, W) to features (B, F).
        It is trained in place with `preset="finetune"`, and stays as it is with "frozen".
    preprocessing: how pictures become inputs of a module of your own; None is RGB of 224 pixels
        with ImageNet's mean and standard deviation.
    callback: a function that is called with an `Event` at the start, after every step and every
        epoch, and at the end; an exception of it ends training, which can then be resumed.
    settings: the flags of `nofuss train` with underscores: `out`, `epochs`, `dim`, `loss`, …

    >>> run = nofuss.train("photos", epochs=10)  # doctest: +SKIP
    >>> nofuss.load(run).embed(["new.jpg"]).shape  # doctest: +SKIP
    torch.Size([1, 512])
    """
    module = backbone if isinstance(backbone, nn.Module) else None
    if module is None and preprocessing is not None:
        raise UsageError("preprocessing is for a backbone that is a module; leave it out")
    try:
        known = None if module is None else own_backbone(module, preprocessing)
        for path in ("out", "tensorboard", "corrections", "weights"):
            if settings.get(path) is not None:
                settings[path] = _path(settings[path])
        name = backbone if isinstance(backbone, str) else OWN if known is not None else None
        config = TrainConfig(data=_path(data), backbone=name, **settings)
        return run_training(
            config,
            _collection(data),
            backbone=known,
            callback=callback,
            given=settings.keys(),
        )
    except UsageError as error:
        raise UsageError(in_python(str(error))) from None


def _path(data: Any) -> Path | None:
    return Path(os.path.expanduser(data)) if isinstance(data, str | Path) else None


def _collection(data: Any) -> Collection | None:
    """What is no path as a collection."""
    if data is None or isinstance(data, str | Path):
        return None
    if isinstance(data, Collection):
        return data
    if isinstance(data, tuple) and len(data) == 2:
        items, labels = (np.asarray(each) for each in data)
        key = "vectors" if items.ndim == 2 else "images"
        return from_arrays({key: items, "labels": labels}, name="arrays")
    return from_dataset(data)
