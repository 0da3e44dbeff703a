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


def test_slow_loop(batch: tuple[Tensor, Tensor]) -> None:
    x, labels = batch[0] / batch[0].norm(dim=1, keepdim=True), batch[1]
    n, wrong, all_of_them = range(len(x)), 0, 0
    for a, p in [(a, p) for a in n for p in n if a != p and labels[a] == labels[p]]:
        for z in (z for z in n if labels[z] != labels[a]):
            wrong += int((x[a] - x[p]).norm() > (x[a] - x[z]).norm())
            all_of_them += 1
    assert 0 < wrong < all_of_them
    torch.testing.assert_close(Ranking()(*batch).item(), wrong / all_of_them)


def test_a_tie_is_no_violation() -> None:
    assert ranking(torch.ones(3, 2), torch.tensor([0, 0, 1])) == 0


def test_it_has_no_gradient(batch: tuple[Tensor, Tensor]) -> None:
    assert not ranking(batch[0].requires_grad_(), batch[1]).requires_grad
