"""Seeds of k-means: in every far cluster, and never the same twice."""

import torch

from nofuss.evaluate.seeding import plus_plus


def test_seeds_fall_into_every_far_cluster():
    # Greedy k-means++ finds 30 tight clusters far apart: one seed in each.
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(30).repeat(20)
    x = 100 * torch.randn(30, 6, generator=generator)[labels]
    x += torch.randn(600, 6, generator=generator)
    seeds = plus_plus(x, 30, generator)
    assert labels[seeds].unique().tolist() == list(range(30))


def test_distinct_seeds(scene):
    x, _ = scene(300, 20)
    assert len(plus_plus(x, 300, torch.Generator().manual_seed(0)).unique()) == 300
