import math

import pytest
import torch

from nofuss.losses.npairs import first_pairs, npairs


def test_worked_by_hand() -> None:
    x = torch.tensor([[1.0, 0.0], [0.0, 1.0], [2.0, 0.0], [0.0, 3.0]])
    # Pairs (0, 2) and (1, 3): inner products 2 and 3 with the own positive, 0 with the other.
    softmax = (math.log(1 + math.exp(-2)) + math.log(1 + math.exp(-3))) / 2
    loss = npairs(x, torch.tensor([4, 9, 4, 9]), l2=0.1)
    assert loss.item() == pytest.approx(softmax + 0.1 * (1 + 4 + 1 + 9) / 8)


def test_a_class_with_one_item_takes_no_part() -> None:
    anchors, positives = first_pairs(torch.tensor([5, 3, 5, 8, 3, 5]))
    assert anchors.tolist() == [1, 0]
    assert positives.tolist() == [4, 2]
