from itertools import combinations

import pytest
import torch
from sklearn.metrics import normalized_mutual_info_score
from torch import Tensor

from nofuss import StructuredClustering
from nofuss.losses.clustering import _nmi, loss_augmented_medoids, structured_clustering


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
    """The maximum over all sets of medoids."""
    sets = combinations(range(len(d)), len(labels.unique()))
    return max(slow_score(d, medoids, labels, gamma) for medoids in sets)


def test_worked_by_hand() -> None:
    # Two points at the east, two at the north, labels across: the best clustering has
    # F = 0 and NMI 0 with the truth, Δ = 1; the true one pays √2 in each class.
    x = torch.tensor([[1.0, 0.0], [2.0, 0.0], [0.0, 1.0], [0.0, 2.0]])
    loss = structured_clustering(x, torch.tensor([0, 1, 0, 1]), gamma=3)
    assert loss.item() == pytest.approx(3 + 2 * 2**0.5)
    # Labelled as they lie, the truth is the best and nothing is asked for.
    assert structured_clustering(x, torch.tensor([0, 0, 1, 1])).item() == pytest.approx(0, abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("gamma", [0.5, 5.0])
def test_search_against_every_set_of_medoids(gamma: float) -> None:
    reached = 0
    for seed in range(5):
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
    assert reached >= 2  # a local search, whose swaps may lower the objective


def test_gamma_decays_by_epochs(batch: tuple[Tensor, Tensor]) -> None:
    criterion = StructuredClustering(gamma=2.0, gamma_decay=0.94)
    for epoch in (0, 1, 7.5):
        criterion.set_epoch(epoch)
        fixed = StructuredClustering(gamma=2.0 * 0.94**epoch)
        assert criterion(*batch) == fixed(*batch)
    assert criterion(*batch) < StructuredClustering(gamma=2.0)(*batch)


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
