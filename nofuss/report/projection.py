"""Embeddings on a plane: t-SNE started at the PCA, so that a map is the same every time."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]


def project(vectors: NDArray[Any], *, seed: int = 0) -> Floats:
    """(N, D) → (N, 2) between 0 and 1; neighbours stay neighbours, distances mean little."""
    x = np.asarray(vectors, dtype=np.float64)
    flat = x - x.mean(0) if len(x) else x
    if len(x) > 3:
        left, values, _ = np.linalg.svd(flat, full_matrices=False)
        flat = left[:, :2] * values[:2]
    start = np.zeros((len(x), 2))
    start[:, : flat.shape[1]] = flat[:, :2]
    if len(x) >= 10 and start.std() > 1e-9:
        from sklearn.manifold import TSNE

        small = 1e-4 * start / start[:, 0].std()
        perplexity = min(30.0, (len(x) - 1) / 3)
        start = TSNE(
            perplexity=perplexity, init=small, max_iter=500, random_state=seed
        ).fit_transform(x)
    low, high = (start.min(0), start.max(0)) if len(x) else (0.0, 1.0)
    flat = (start - low) / np.maximum(high - low, 1e-12)
    return np.asarray(flat, dtype=np.float32)
