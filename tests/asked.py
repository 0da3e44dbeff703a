"""Settings as a run would have them, from options, for tests that train nothing."""

from typing import Any, Literal

import numpy as np

from nofuss.config import Options, Settings
from nofuss.data.open import TrainingData
from nofuss.data.readers.arrays import from_arrays
from nofuss.training.network import build_model
from nofuss.training.settings import preset_of, resolve

Kind = Literal["vectors", "pictures", "gray"]


def some_data(kind: Kind = "vectors", side: int = 128) -> TrainingData:
    """Return sixteen items of four classes: vectors of eight dimensions, or pictures."""
    labels = np.arange(16) % 4
    random = np.random.default_rng(0)
    if kind == "vectors":
        arrays = {"vectors": random.normal(size=(16, 8)).astype(np.float32)}
    else:
        arrays = {"images": random.integers(0, 256, (16, side, side, 3), dtype=np.uint8)}
        if kind == "gray":
            arrays = {"images": arrays["images"][..., 0]}
    return TrainingData(from_arrays(arrays | {"labels": labels}, name="set"), None, None, "f" * 32)


def settings_of(kind: Kind = "vectors", side: int = 128, **options: Any) -> Settings:
    """Return what `nofuss train` resolves these options to."""
    data, asked = some_data(kind, side), Options(**options)
    model = build_model(asked, preset_of(asked, data), data.collection, side=data.side)
    return resolve(asked, data, model.backbone)
