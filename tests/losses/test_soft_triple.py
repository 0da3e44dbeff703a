import pytest
import torch
from pytorch_metric_learning.losses import SoftTripleLoss
from torch import Tensor

from nofuss.losses.soft_triple import SoftTriple, soft_triple


def slow(x: Tensor, labels: Tensor, centers: Tensor, tau: float) -> Tensor:
    """Eq. 7 and 9 of SoftTriple with λ = 20, γ = 0.1, δ = 0.01; centers (C, K, D)."""
    w, total = centers / centers.norm(dim=2, keepdim=True), torch.zeros((), dtype=x.dtype)
    for x_i, y in zip(x / x.norm(dim=1, keepdim=True), labels, strict=True):
        s = []
        for w_c in w:
            weights = torch.stack([torch.exp(x_i @ w_k / 0.1) for w_k in w_c])
            s.append(
                sum(q * (x_i @ w_k) for q, w_k in zip(weights / weights.sum(), w_c, strict=True))
            )
        own = torch.exp(20 * (s[y] - 0.01))
        others = sum(torch.exp(20 * s[j]) for j in range(len(s)) if j != y)
        total = total - torch.log(own / (own + others)) / len(x)
    c, k, _ = w.shape
    apart = sum((w_c[s] - w_c[t]).norm() for w_c in w for t in range(k) for s in range(t + 1, k))
    return total + tau * apart / (c * k * (k - 1))


def test_worked_by_hand() -> None:
    x, labels = torch.tensor([[2.0, 0.0]]), torch.tensor([0])
    centers = torch.tensor([[[1.0, 0.0], [0.0, 1.0]], [[-1.0, 0.0], [-1.0, 0.0]]])
    # γ → ∞ makes S the plain mean: S₀ = ½, S₁ = −1. Centers of class 0 are √2 apart.
    loss = soft_triple(x, labels, centers, scale=2, gamma=1e9, margin=0.5, tau=4)
    softmax = torch.log1p(torch.exp(torch.tensor(2 * (-1.0) - 2 * (0.5 - 0.5))))
    assert loss.item() == pytest.approx(softmax.item() + 4 * 2**0.5 / (2 * 2 * 1), abs=1e-6)


@pytest.mark.parametrize("tau", [0.0, 0.2])
def test_slow_loop(batch: tuple[Tensor, Tensor], tau: float) -> None:
    criterion = SoftTriple(4, 5, proxies_per_class=3, tau=tau, seed=0).double()
    expected = slow(*batch, criterion.proxies.view(4, 3, 5), tau)
    torch.testing.assert_close(criterion(*batch), expected)


@pytest.mark.parametrize("centers", [1, 3])
def test_same_as_the_other_library(batch: tuple[Tensor, Tensor], centers: int) -> None:
    x, labels = batch[0].requires_grad_(), batch[1]
    ours = SoftTriple(4, 5, proxies_per_class=centers, tau=0, seed=0).double()
    theirs = SoftTripleLoss(4, 5, centers_per_class=centers).double()
    theirs.load_state_dict({"fc": ours.proxies.detach().T})
    losses = ours(x, labels), theirs(x, labels)
    torch.testing.assert_close(*losses)
    mine, other = (torch.autograd.grad(loss, x)[0] for loss in losses)
    torch.testing.assert_close(mine, other)


def test_refuses_uneven_centers_and_free_norms() -> None:
    with pytest.raises(ValueError, match="whole number"):
        SoftTriple(4, 5, proxies_per_class=2.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="expected a number"):
        SoftTriple(4, 5, scale=None)  # type: ignore[arg-type]
