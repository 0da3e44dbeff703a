import pytest
import torch

from nofuss.losses.soft_triple import SoftTriple, soft_triple


def test_worked_by_hand() -> None:
    x, labels = torch.tensor([[2.0, 0.0]]), torch.tensor([0])
    centers = torch.tensor([[[1.0, 0.0], [0.0, 1.0]], [[-1.0, 0.0], [-1.0, 0.0]]])
    # γ → ∞ makes S the plain mean: S₀ = ½, S₁ = −1. Centers of class 0 are √2 apart.
    loss = soft_triple(x, labels, centers, scale=2, gamma=1e9, margin=0.5, tau=4)
    softmax = torch.log1p(torch.exp(torch.tensor(2 * (-1.0) - 2 * (0.5 - 0.5))))
    assert loss.item() == pytest.approx(softmax.item() + 4 * 2**0.5 / (2 * 2 * 1), abs=1e-6)


def test_refuses_uneven_centers_and_free_norms() -> None:
    with pytest.raises(ValueError, match="whole number"):
        SoftTriple(4, 5, proxies_per_class=2.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="scale is None"):
        SoftTriple(4, 5, scale=None)  # type: ignore[arg-type]
