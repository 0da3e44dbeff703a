import pytest
import torch
from pytorch_metric_learning.losses import NCALoss
from torch import Tensor

from nofuss import NCA, SemiHardTriplet, Triplet
from nofuss.losses.nca import nca


def slow(x: Tensor, labels: Tensor) -> Tensor:
    """Eq. 4 as printed, for every pair (x, y) of a label that has negatives."""
    n, terms = len(x), []
    for i in range(n):
        d = [(x[i] - x[j]).square().sum() for j in range(n)]
        below = sum(torch.exp(-d[z]) for z in range(n) if labels[z] != labels[i])
        pairs = [j for j in range(n) if labels[j] == labels[i] and j != i]
        terms += [-torch.log(torch.exp(-d[j]) / below) for j in pairs]
    return sum(terms) / len(terms)


def test_worked_by_hand() -> None:
    x = torch.tensor([[0.0], [1.0], [3.0]])  # d² from 0: 1, 9; from 1: 1, 4
    loss = nca(x, torch.tensor([7, 7, 2]), scale=None)
    assert loss.item() == pytest.approx(((1 - 9) + (1 - 4)) / 2)


def test_slow_loop_with_free_norms(batch: tuple[Tensor, Tensor]) -> None:
    torch.testing.assert_close(nca(*batch, scale=None), slow(*batch))


def test_other_library_is_the_softplus_where_there_is_one_positive() -> None:
    # Its denominator holds the positive: log(1 + e^ours). The negative is as far from both
    # anchors, so that the mean over the two is either's loss.
    x = torch.tensor([[1.0, 0.2, 0.0], [1.0, -0.2, 0.0], [0.5, 0.0, 1.0]], dtype=torch.double)
    labels = torch.tensor([0, 0, 1])
    theirs = NCALoss(softmax_scale=2)(x, labels)  # |x| = 1, so −2d is 4·cos − 4
    ours = nca(x, labels, scale=4)
    torch.testing.assert_close(theirs, torch.nn.functional.softplus(ours))


def test_it_goes_below_zero() -> None:
    x = torch.tensor([[1.0, 0.0], [1.0, 0.0], [-1.0, 0.0]])
    assert nca(x, torch.tensor([0, 0, 1])).item() == pytest.approx(-36)
    # The other way round: 36 for the first, 0 for the last, whose two are equally far.
    assert nca(x, torch.tensor([0, 1, 0])).item() == pytest.approx(18)


def test_anchors_without_negatives_leave_finite_gradients() -> None:
    x = torch.randn(6, 3, generator=torch.Generator().manual_seed(0), requires_grad=True)
    reference, others = x.detach()[:4] + 0.1, torch.tensor([0, 0, 0, 0])
    loss = NCA()(x, torch.tensor([0, 0, 1, 1, 2, 2]), None, reference, others)
    loss.backward()
    assert loss == 0  # no positive has a negative beside it
    assert x.grad is not None
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("criterion", [NCA(), Triplet(), SemiHardTriplet()])
def test_references_may_be_more_precise(criterion: torch.nn.Module) -> None:
    generator = torch.Generator().manual_seed(0)
    x, references = torch.randn(6, 3, generator=generator), torch.randn(8, 3, generator=generator)
    labels, others = torch.tensor([0, 0, 1, 1, 2, 2]), torch.arange(8) % 3
    expected = criterion(x, labels, None, references, others)
    found = criterion(x, labels, None, references.double(), others)
    assert found.dtype == torch.float64
    torch.testing.assert_close(found.float(), expected)
