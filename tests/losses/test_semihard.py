import pytest
import torch
from torch import Tensor

from nofuss.losses.semihard import semi_hard_triplet


def circle(*degrees: float) -> Tensor:
    angle = torch.deg2rad(torch.tensor(degrees, dtype=torch.double))
    return torch.stack([angle.cos(), angle.sin()], 1)


def chord(degrees: float) -> float:
    """Squared distance between two points of the unit circle."""
    return float(2 - 2 * torch.deg2rad(torch.tensor(degrees, dtype=torch.double)).cos())


def test_worked_by_hand() -> None:
    # Anchor 0° has its positive at 60°; negatives at 20° (closer: too hard), 70° and 150°
    # (farther: 70° is the closest of them). From 60° the negatives are 40°, 10° and 90° away,
    # so the semi-hard one is at 90°.
    x, labels = circle(0, 60, 20, 70, 150), torch.tensor([0, 0, 1, 2, 3])
    expected = (chord(60) + 1 - chord(70)) + (chord(60) + 1 - chord(90))
    assert semi_hard_triplet(x, labels, margin=1).item() == pytest.approx(expected / 2)


def test_where_no_negative_is_farther_the_farthest_is_taken() -> None:
    x, labels = circle(0, 90, 30, 50), torch.tensor([0, 0, 1, 2])
    expected = (chord(90) + 0.2 - chord(50)) + (chord(90) + 0.2 - chord(60))
    assert semi_hard_triplet(x, labels).item() == pytest.approx(expected / 2)
