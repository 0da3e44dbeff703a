from itertools import combinations

import pytest
import torch
from sklearn.metrics import normalized_mutual_info_score
from torch import Tensor

from nofuss.losses.clustering import (
    _augmented_scores,
    _nmi,
    loss_augmented_medoids,
    structured_clustering,
)


def problem(seed: int, *, items: int = 9, classes: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    """Points on the sphere, labels of every class, and all distances."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(items, 3, dtype=torch.double, generator=generator)
    x = x / x.norm(dim=1, keepdim=True)
    labels = torch.arange(items) % classes
    return x, labels, torch.cdist(x, x)


def slow_score(d: Tensor, medoids: tuple[int, ...], labels: Tensor, gamma: float) -> float:
    """F(X, S) + γΔ: minus the distances to the closest medoid, plus γ(1 − NMI)."""
    closest = [min(medoids, key=lambda m: d[i, m]) for i in range(len(d))]
    far = sum(float(d[i, m]) for i, m in enumerate(closest))
    return gamma * (1 - normalized_mutual_info_score(labels.tolist(), closest)) - far


def slow_truth(d: Tensor, labels: Tensor) -> float:
    """F̃(X, y*): every class with its best medoid."""
    classes = [(labels == c).nonzero().squeeze(1).tolist() for c in labels.unique()]
    return -sum(min(sum(float(d[i, m]) for i in own) for m in own) for own in classes)


def best_of_all(d: Tensor, labels: Tensor, gamma: float) -> float:
    """The maximum over all sets of medoids; the score itself is checked below."""
    sets = torch.tensor(list(combinations(range(len(d)), len(labels.unique()))))
    return float(_augmented_scores(d, sets, labels, gamma).max())


def test_worked_by_hand() -> None:
    # Two points at the east, two at the north, labels across: the best clustering has
    # F = 0 and NMI 0 with the truth, Δ = 1; the true one pays √2 in each class.
    x = torch.tensor([[1.0, 0.0], [2.0, 0.0], [0.0, 1.0], [0.0, 2.0]])
    loss = structured_clustering(x, torch.tensor([0, 1, 0, 1]), gamma=3)
    assert loss.item() == pytest.approx(3 + 2 * 2**0.5)
    # Labelled as they lie, the truth is the best and nothing is asked for.
    assert structured_clustering(x, torch.tensor([0, 0, 1, 1])).item() == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("gamma", [0.5, 5.0])
def test_search_against_every_set_of_medoids(gamma: float) -> None:
    reached = 0
    for seed in range(10):
        x, labels, d = problem(seed)
        best = best_of_all(d, labels, gamma)
        medoids = loss_augmented_medoids(d, labels, gamma=gamma, refinements=5)
        found = slow_score(d, tuple(medoids.tolist()), labels, gamma)
        assert len(set(medoids.tolist())) == 3
        assert found <= best + 1e-9
        reached += found > best - 1e-9
        # The loss is that of the set found, so never above the exact one.
        loss = structured_clustering(x, labels, gamma=gamma).item()
        assert loss == pytest.approx(max(0, found - slow_truth(d, labels)), abs=1e-6)
        assert loss <= max(0, best - slow_truth(d, labels)) + 1e-6
    assert reached >= 7  # a local search, but a good one on sets this small


def test_refinement_never_lowers_the_score_and_sometimes_raises_it() -> None:
    raised = 0
    for seed in range(20):
        _, labels, d = problem(seed, items=16, classes=4)
        scores = [
            _augmented_scores(
                d, loss_augmented_medoids(d, labels, gamma=1, refinements=r)[None], labels, 1
            )
            for r in (0, 1, 5)
        ]
        assert scores[0] <= scores[1] <= scores[2]
        raised += bool(scores[2] > scores[0])
    assert raised > 0


def test_augmented_score_is_the_slow_one() -> None:
    _, labels, d = problem(3)
    sets = list(combinations(range(9), 3))[::4]
    fast = _augmented_scores(d, torch.tensor(sets), labels, 2.0)
    slow = torch.tensor([slow_score(d, s, labels, 2.0) for s in sets], dtype=torch.double)
    torch.testing.assert_close(fast, slow)


def test_nmi_is_scikit_learn_s() -> None:
    generator = torch.Generator().manual_seed(0)
    truth = torch.arange(30) % 4
    guesses = torch.randint(4, (20, 30), generator=generator)
    guesses[0], guesses[1] = truth, 0
    expected = [normalized_mutual_info_score(truth.numpy(), g.numpy()) for g in guesses]
    torch.testing.assert_close(_nmi(guesses, truth, 4), torch.tensor(expected).double())


def test_loss_keeps_the_precision_of_its_input(batch: tuple[Tensor, Tensor]) -> None:
    for dtype in (torch.float32, torch.float64):
        assert structured_clustering(batch[0].to(dtype), batch[1]).dtype is dtype
