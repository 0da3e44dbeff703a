"""Embeddings on a plane: t-SNE that starts at the PCA, so that a map is the same every time."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]


def project(vectors: NDArray[Any], *, seed: int = 0) -> Floats:
    """Map (N, D) → (N, 2) between 0 and 1; neighbours stay neighbours, distances mean little."""
    x = np.asarray(vectors, dtype=np.float64)
    centred = x - x.mean(0) if len(x) else x
    if len(x) > 3:
        left, values, _ = np.linalg.svd(centred, full_matrices=False)
        centred = left[:, :2] * values[:2]  # the first two principal components
    places = np.zeros((len(x), 2))
    places[:, : centred.shape[1]] = centred[:, :2]
    if len(x) >= 10 and places.std() > 1e-9:  # fewer or equal points have no structure to show
        from sklearn.manifold import TSNE

        start = 1e-4 * places / places[:, 0].std()  # the spread of scikit-learn's init="pca"
        perplexity = min(30.0, (len(x) - 1) / 3)
        places = TSNE(
            perplexity=perplexity, init=start, max_iter=500, random_state=seed
        ).fit_transform(x)
    low, high = (places.min(0), places.max(0)) if len(x) else (0.0, 1.0)
    return np.asarray((places - low) / np.maximum(high - low, 1e-12), dtype=np.float32)
