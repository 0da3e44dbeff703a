"""What needs no training, to stand beside every score: the features as they are, and their PCA."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from nofuss.data.collection import Collection
from nofuss.model.start import pca_head


def untrained(
    collection: Collection, features: Tensor | None, *, fit: Any, rows: Any, dim: int
) -> dict[str, Tensor]:
    """Embeddings of `rows` that nothing was learned for: features as they are, and their PCA.

    The PCA is fitted on the rows `fit`, as the head's start is. Without features (a backbone
    that starts at random) the pixels are the baseline.
    """
    if features is not None:
        raw, name = features, f"untrained features, {features.shape[1]}-d"
    elif collection.kind == "images" and collection.array is not None:
        pixels = np.asarray(collection.array).reshape(len(collection), -1)
        raw, name = torch.from_numpy(pixels).float() / 255, "raw pixels"
    else:
        return {}
    baselines = {name: raw[rows]}
    if features is not None and dim < features.shape[1] and dim < len(fit):
        baselines[f"their PCA, {dim}-d"] = pca_head(features[fit], dim)(raw[rows])
    return baselines
