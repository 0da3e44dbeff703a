import math

import pytest
import torch
from pytorch_metric_learning.distances import DotProductSimilarity
from pytorch_metric_learning.losses import NPairsLoss
from torch import Tensor

from nofuss.losses.npairs import first_pairs, npairs


def test_worked_by_hand() -> None:
    x = torch.tensor([[1.0, 0.0], [0.0, 1.0], [2.0, 0.0], [0.0, 3.0]])
    # Pairs (0, 2) and (1, 3): inner products 2 and 3 with the own positive, 0 with the other.
    softmax = (math.log(1 + math.exp(-2)) + math.log(1 + math.exp(-3))) / 2
    loss = npairs(x, torch.tensor([4, 9, 4, 9]), l2=0.1)
    assert loss.item() == pytest.approx(softmax + 0.1 * (1 + 4 + 1 + 9) / 8)


def test_slow_loop(batch: tuple[Tensor, Tensor]) -> None:
    x, labels = batch
    pairs = [(labels == c).nonzero().squeeze(1)[:2].tolist() for c in range(4)]
    terms = []
    for a, p in pairs:
        others = [q for b, q in pairs if b != a]
        terms.append(torch.log(1 + sum(torch.exp(x[a] @ x[q] - x[a] @ x[p]) for q in others)))
    norms = sum(x[i].square().sum() for pair in pairs for i in pair) / 16
    torch.testing.assert_close(npairs(x, labels), sum(terms) / 4 + 0.002 * norms)


def test_a_class_with_one_item_takes_no_part() -> None:
    anchors, positives = first_pairs(torch.tensor([5, 3, 5, 8, 3, 5]))
    assert anchors.tolist() == [1, 0]
    assert positives.tolist() == [4, 2]


def test_same_as_the_other_library(batch: tuple[Tensor, Tensor]) -> None:
    x, labels = batch[0].requires_grad_(), batch[1]
    theirs = NPairsLoss(distance=DotProductSimilarity(normalize_embeddings=False))
    losses = npairs(x, labels, l2=0), theirs(x, labels)
    torch.testing.assert_close(*losses)
    mine, other = (torch.autograd.grad(loss, x)[0] for loss in losses)
    torch.testing.assert_close(mine, other)
