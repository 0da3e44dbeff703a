"""The nearest items of some items, against a slow loop."""

import numpy as np
import pytest

from nofuss.ranking.neighbours import neighbours


@pytest.mark.parametrize("count", [2, 7, 700])
def test_neighbours_are_those_of_a_slow_loop(count: int) -> None:
    x = np.random.default_rng(0).normal(size=(count, 5)).astype(np.float32)
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    found = neighbours(x, k=4, queries=50)
    assert len(found.queries) == min(count, 50)
    for query, items, distances in zip(*found, strict=True):
        slow = sorted((np.linalg.norm(x[i] - x[query]), i) for i in range(count) if i != query)
        assert items.tolist() == [i for _, i in slow[:4]]
        np.testing.assert_allclose(distances, [d for d, _ in slow[:4]], atol=1e-3)
