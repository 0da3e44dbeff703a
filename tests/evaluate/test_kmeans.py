"""K-means: what it must satisfy, and how it compares with scikit-learn."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.cluster import KMeans
from torch import Tensor

from nofuss.evaluate import kmeans
from nofuss.evaluate.kmeans import SAMPLE, _lloyd, _nearest_of_few


def inertia(x: Tensor, centroids: Tensor, assignment: Tensor) -> float:
    """The sum of squared distances to the centroids of the clusters."""
    return float((x - centroids[assignment]).double().square().sum())


def slow_lloyd(x: Tensor, centroids: Tensor) -> Tensor:
    """Lloyd's algorithm as in the books; no cluster may run empty."""
    before = None
    while True:
        assignment = torch.cdist(x, centroids).argmin(1)
        if before is not None and torch.equal(assignment, before):
            return assignment
        centroids = torch.stack([x[assignment == c].mean(0) for c in range(len(centroids))])
        before = assignment


@pytest.mark.parametrize(("items", "k"), [(500, 2), (500, 5), (500, 40), (3000, 400)])
def test_lean_lloyd_equals_plain_lloyd(scene, items, k):
    x, _ = scene(items, 20, noise=1.0, seed=k)
    x = x.double()
    seeds = x[torch.randperm(items, generator=torch.Generator().manual_seed(3))[:k]]
    assert torch.equal(_lloyd(x, seeds, 100), slow_lloyd(x, seeds))


@pytest.mark.parametrize("k", [1, 7, 150, 700])
def test_centroids_are_the_means_of_their_members_and_none_is_empty(scene, k):
    x, _ = scene(700, 120)
    centroids, assignment = kmeans(x, k, seed=0)
    assert centroids.shape == (k, 8)
    assert torch.bincount(assignment, minlength=k).min() >= 1
    means = torch.stack([x[assignment == c].mean(0) for c in range(k)])
    torch.testing.assert_close(centroids, means, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("clusters", "each", "dim", "noise"),
    [(100, 20, 8, 0.2), (100, 20, 64, 0.2), (100, 20, 16, 0.9), (300, 4, 32, 0.2)],
    ids=["separate", "separate, 64-d", "overlapping", "tiny"],
)
def test_seeds_no_worse_than_scikit_learn(clusters, each, dim, noise):
    labels = torch.arange(clusters).repeat_interleave(each)
    ours, peers = [], []
    for seed in range(5):
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(clusters, dim, generator=generator)[labels]
        x += noise * torch.randn(x.shape, generator=generator)
        ours.append(inertia(x, *kmeans(x, clusters, seed=seed)))
        peers.append(KMeans(clusters, n_init=1, random_state=seed).fit(x.numpy()).inertia_)
    assert min(ours) <= 1.01 * min(peers)


@pytest.mark.parametrize("scale", [1e30, 1e-30, 1e-40])
def test_any_length_of_vectors(scene, scale):
    x, _ = scene(300, 20)
    # A power of two: the vectors then have the same digits, but for those that 1e-40 has not.
    size = 2.0 ** round(torch.tensor(scale).double().log2().item())
    centroids, assignment = kmeans((x.double() * size).float(), 20, seed=0)
    expected = kmeans(x, 20, seed=0)
    assert torch.isfinite(centroids).all()
    assert (assignment == expected[1]).double().mean() > (0.9 if scale == 1e-40 else 0.9999)


def test_seeds_and_inputs(scene):
    x, _ = scene(400, 40)
    first, again = kmeans(x, 40, seed=5), kmeans(x.numpy(), 40, seed=5)
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[1], again[1])
    state = torch.random.get_rng_state()
    kmeans(x, 40, seed=6)
    assert torch.equal(state, torch.random.get_rng_state())


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 1000), st.integers(1, 30), st.data())
def test_duplicates_and_empty_clusters(seed, items, data):
    k = data.draw(st.integers(1, items))
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(3, (items, 1), generator=generator).float()  # three distinct points at most
    centroids, assignment = kmeans(x, k, seed=seed)
    assert torch.isfinite(centroids).all()
    assert torch.bincount(assignment, minlength=k).min() >= 1
    if k >= len(x.unique()):
        assert inertia(x, centroids, assignment) < 1e-8


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"k": 0}, "k is 0"),
        ({"k": 21}, "expected 1 to 20"),
        ({"iterations": 0}, "iterations"),
    ],
)
def test_misuse_is_one_line(scene, options, message):
    x, _ = scene(20, 3)
    with pytest.raises(ValueError, match=message):
        kmeans(x, **({"k": 3, "seed": 0} | options))


@pytest.mark.parametrize("k", [1, 3, 100])
def test_columns_of_the_maxima_are_those_of_the_product(k):
    generator = torch.Generator().manual_seed(k)
    left, right = (torch.randn(n, 9, generator=generator) for n in (5000, k))
    product = left @ right.T
    before = torch.randint(k, (5000,), generator=generator)
    assert torch.equal(_nearest_of_few(left, right, before), product.argmax(1))


def test_of_equal_maxima_the_one_of_before_is_kept():
    left, right = torch.ones(4, 2), torch.ones(3, 2)
    before = torch.tensor([2, 0, 1, 2])
    assert torch.equal(_nearest_of_few(left, right, before), before)


def test_a_start_from_a_sample_is_no_worse(scene):
    """With hundreds of vectors a cluster; scikit-learn starts from all of them."""
    x, _ = scene(6000, 12, 16, noise=1.0)
    k = 12
    assert len(x) > 2 * SAMPLE * k
    peers = [KMeans(k, n_init=1, random_state=s).fit(x.numpy()).inertia_ for s in range(5)]
    ours = [inertia(x, *kmeans(x, k, seed=s)) for s in range(5)]
    assert sum(ours) <= 1.01 * sum(peers)
    assert kmeans(x, k, seed=3)[1].equal(kmeans(x, k, seed=3)[1])
