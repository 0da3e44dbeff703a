"""Other code may have changed torch's default type: numbers stay what they are."""

from collections.abc import Iterator

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


SCORES = evaluate(X, LABELS, extended=True).as_dict()
EMBEDDED = ProxyEmbedding(epochs=1).fit(X, LABELS).transform(X)
CENTROIDS = nofuss.kmeans(X, 50, seed=0)[0]


@pytest.mark.usefixtures("default_dtype")
def test_scores() -> None:
    assert evaluate(X, LABELS, extended=True).as_dict() == SCORES
    assert np.array_equal(nofuss.kmeans(X, 50, seed=0)[0], CENTROIDS)


@pytest.mark.usefixtures("default_dtype")
def test_the_estimator() -> None:
    found = ProxyEmbedding(epochs=1).fit(X, LABELS).transform(X)
    assert found.dtype == np.float32
    assert np.abs(found - EMBEDDED).max() < 1e-3


@pytest.mark.usefixtures("default_dtype")
def test_proxies_are_single_precision() -> None:
    criterion = ProxyNCA(10, 8, seed=0)
    assert criterion.proxies.dtype == torch.float32
    assert torch.isfinite(criterion(torch.from_numpy(X), torch.from_numpy(LABELS)))
