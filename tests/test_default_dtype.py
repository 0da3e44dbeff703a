"""Other code may have changed torch's default type: numbers stay what they are."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import nofuss
from nofuss import ProxyEmbedding, ProxyNCA
from nofuss.evaluate import evaluate

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(60, 8)).astype(np.float32)
LABELS = np.repeat(np.arange(10), 6)


@pytest.fixture(params=[torch.float64, torch.bfloat16])
def default_dtype(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(request.param)
    yield
    torch.set_default_dtype(before)


def found() -> tuple[dict[str, Any], np.ndarray, np.ndarray]:
    """Scores, centroids and embeddings."""
    scores = evaluate(X, LABELS, extended=True).as_dict()
    centroids = nofuss.kmeans(X, 50, seed=0)[0]
    return scores, centroids.numpy(), ProxyEmbedding(epochs=1).fit(X, LABELS).transform(X)


@pytest.fixture(scope="module")
def usual() -> tuple[dict[str, Any], np.ndarray, np.ndarray]:
    return found()


@pytest.mark.slow
def test_scores_and_the_estimator(usual: tuple[Any, Any, Any], default_dtype: None) -> None:
    scores, centroids, embedded = found()
    assert scores == usual[0]
    assert np.array_equal(centroids, usual[1])
    assert embedded.dtype == np.float32
    assert np.abs(embedded - usual[2]).max() < 1e-3


@pytest.mark.usefixtures("default_dtype")
def test_proxies_are_single_precision() -> None:
    criterion = ProxyNCA(10, 8, seed=0)
    assert criterion.proxies.dtype == torch.float32
    assert torch.isfinite(criterion(torch.from_numpy(X), torch.from_numpy(LABELS)))
