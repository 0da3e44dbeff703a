import torch
from torch import Tensor

from nofuss.losses.ranking import Ranking, ranking


def test_worked_by_hand() -> None:
    # Angles 0°, 40° (class 0) and 10° (class 1): from 0° the negative is closer, from 40° too;
    # moved to 90° it is farther from both.
    def at(*degrees: float) -> Tensor:
        angle = torch.deg2rad(torch.tensor(degrees))
        return torch.stack([angle.cos(), angle.sin()], 1)

    labels = torch.tensor([0, 0, 1])
    assert ranking(at(0, 40, 10), labels) == 1
    assert ranking(at(0, 40, 70), labels) == 0.5
    assert ranking(at(0, 40, 90), labels) == 0


def test_a_tie_is_no_violation() -> None:
    assert ranking(torch.ones(3, 2), torch.tensor([0, 0, 1])) == 0


def test_it_has_no_gradient(batch: tuple[Tensor, Tensor]) -> None:
    assert not ranking(batch[0].requires_grad_(), batch[1]).requires_grad


def test_it_can_leave_the_norms() -> None:
    x = torch.tensor([[1.0, 0.0], [9.0, 1.0], [1.0, 1.0]])
    labels = torch.tensor([0, 0, 1])
    assert Ranking()(x, labels) == 0
    assert Ranking(unit_norm=False)(x, labels) == 1  # as they lie, 2 is the closest to both
