import pytest
import torch
from pytorch_metric_learning.losses import NCALoss

from nofuss.losses.nca import nca


def test_worked_by_hand() -> None:
    x = torch.tensor([[0.0], [1.0], [3.0]])  # d² from 0: 1, 9; from 1: 1, 4
    loss = nca(x, torch.tensor([7, 7, 2]), scale=None)
    assert loss.item() == pytest.approx(((1 - 9) + (1 - 4)) / 2)


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
