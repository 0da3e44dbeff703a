"""NMI and AMI of two labelings, against the formula, scikit-learn, and by hand."""

import sys
from collections import Counter
from math import log

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import adjusted_mutual_info_score, normalized_mutual_info_score

from nofuss.evaluate import (
    adjusted_mutual_information,
    ami,
    kmeans,
    nmi,
    normalized_mutual_information,
)

labelings = st.integers(1, 50).flatmap(
    lambda n: st.tuples(*[st.lists(st.integers(-3, 9), min_size=n, max_size=n)] * 2)
)


@settings(deadline=None, max_examples=50)
@given(labelings)
def test_equals_the_papers_formula_and_scikit_learn(pair):
    a, b = (torch.tensor(side) for side in pair)
    n, first, second = len(pair[0]), Counter(pair[0]), Counter(pair[1])
    both = Counter(zip(*pair, strict=True))
    information = sum(c / n * log(n * c / (first[u] * second[v])) for (u, v), c in both.items())
    entropies = -sum(c / n * log(c / n) for c in (*first.values(), *second.values()))
    expected = 2 * information / entropies if entropies else 1.0
    assert normalized_mutual_information(a, b) == pytest.approx(expected, abs=1e-12)
    same = len(both) == len(first) == len(second)  # where scikit-learn may have 0 or −1
    expected = 1.0 if same else adjusted_mutual_info_score(pair[0], pair[1])
    assert adjusted_mutual_information(a, b) == pytest.approx(expected, abs=1e-12)


def test_chance_is_that_of_scikit_learn_for_parts_of_many_sizes(monkeypatch):
    random = np.random.default_rng(0)
    a = random.integers(0, 60, 3000) ** 2 % 97  # parts of very different sizes
    b = np.where(random.random(3000) < 0.5, a, random.integers(0, 40, 3000))
    expected = adjusted_mutual_info_score(a, b)
    assert adjusted_mutual_information(a, b) == pytest.approx(expected, abs=1e-10)
    monkeypatch.setattr(sys.modules["nofuss.evaluate.nmi"], "PAIRS", 50)  # many steps give the same
    assert adjusted_mutual_information(a, b) == pytest.approx(expected, abs=1e-10)


def test_by_hand():
    # H = log 2 and log 4, I = log 2: NMI = 2·log 2 / (log 2 + log 4) = 2/3.
    a, b = torch.tensor([0, 0, 1, 1]), torch.tensor([0, 1, 2, 3])
    assert normalized_mutual_information(a, b) == pytest.approx(2 * log(2) / (log(2) + log(4)))
    assert normalized_mutual_information(a, np.array(["u", "u", "v", "v"])) == 1.0
    assert normalized_mutual_information(a, torch.tensor([0, 1, 0, 1])) == pytest.approx(0)
    alone = torch.arange(5)  # of which rounding once made −1
    assert adjusted_mutual_information(alone, alone.flip(0)) == 1.0


def test_of_embeddings_is_that_of_their_clusters(scene):
    x, labels = scene(600, 60)
    unit = x / x.norm(dim=1, keepdim=True)
    clusters = kmeans(unit, len(labels.unique()), seed=4)[1].numpy()
    expected = normalized_mutual_info_score(labels, clusters)
    assert nmi(x, labels, seed=4) == pytest.approx(expected, abs=1e-12)
    expected = adjusted_mutual_info_score(labels, clusters)
    assert ami(x.numpy(), labels.numpy(), seed=4) == pytest.approx(expected, abs=1e-12)


def test_separate_classes_score_one():
    labels = torch.arange(10).repeat(8)
    x = torch.eye(10)[labels] + 0.01 * torch.randn(
        80, 10, generator=torch.Generator().manual_seed(0)
    )
    assert nmi(x, labels, seed=0) == pytest.approx(1)
    assert ami(x, labels, seed=0) == pytest.approx(1)


def test_misuse_is_one_line():
    with pytest.raises(ValueError, match="empty"):
        normalized_mutual_information(torch.tensor([]), torch.tensor([]))
    with pytest.raises(ValueError, match="expected \\(3,\\)"):
        normalized_mutual_information(torch.zeros(3), torch.zeros(4))
