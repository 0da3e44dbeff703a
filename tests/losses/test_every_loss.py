"""What holds of every loss: gradients, and no change under rotation, renaming or reordering."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from nofuss.losses import INSTANCE_LOSSES, PROXY_LOSSES
from nofuss.losses.nca import NCA
from nofuss.losses.proxy_loss import ProxyLoss
from nofuss.losses.proxy_nca import ProxyNCA
from nofuss.losses.proxy_triplet import ProxyTriplet
from nofuss.losses.ranking import Ranking
from nofuss.losses.triplet import Triplet
from nofuss.proxies.assignment import Assignment, Dynamic, Fractional, Several, Static

Loss = Callable[[Tensor, Tensor], Tensor]
OVER_PROXIES: dict[str, Callable[[], ProxyLoss]] = {
    **{name: lambda loss=loss: loss(4, 5, seed=0) for name, loss in PROXY_LOSSES.items()},
    "fractional": lambda: ProxyNCA(4, 5, proxies_per_class=0.75, seed=0),
    "several": lambda: ProxyNCA(4, 5, proxies_per_class=2.5, seed=0),
    "dynamic": lambda: ProxyNCA(4, 5, proxies_per_class=1.5, assignment="dynamic", seed=0),
    "matched": lambda: ProxyNCA(4, 5, proxies_per_class=1.5, assignment="matched", seed=0),
    "free norms": lambda: ProxyNCA(4, 5, scale=None, seed=0),
    "free norms, triplet": lambda: ProxyTriplet(4, 5, scale=None, margin=1, seed=0),
    "anchor, fractional": lambda: PROXY_LOSSES["proxy-anchor"](4, 5, proxies_per_class=0.5, seed=0),
    "triplet, dynamic": lambda: ProxyTriplet(
        4, 5, margin=1, proxies_per_class=1.5, assignment="dynamic", seed=0
    ),
}
OVER_INSTANCES: dict[str, Callable[[], nn.Module]] = {
    **INSTANCE_LOSSES,
    "nca, free norms": lambda: NCA(scale=None),
    "triplet, free norms": lambda: Triplet(unit_norm=False, margin=2),
}
EVERY: dict[str, Callable[[], nn.Module]] = {**OVER_PROXIES, **OVER_INSTANCES}


@pytest.mark.parametrize("name", EVERY)
def test_gradients_in_double(batch: tuple[Tensor, Tensor], name: str) -> None:
    criterion = EVERY[name]().double()
    inputs = [batch[0].requires_grad_(), *criterion.parameters()]
    assert criterion(*batch) != 0
    assert torch.autograd.gradcheck(lambda x, *_: criterion(x, batch[1]), inputs)


@pytest.mark.parametrize("name", [*EVERY, "ranking"])
def test_rotating_points_and_proxies_together_changes_nothing(
    batch: tuple[Tensor, Tensor], name: str
) -> None:
    x, labels = batch
    criterion = (EVERY[name]() if name in EVERY else Ranking()).double()
    before = criterion(x, labels)
    generator = torch.Generator().manual_seed(2)
    turn = torch.linalg.qr(torch.randn(5, 5, dtype=torch.double, generator=generator)).Q
    if isinstance(criterion, ProxyLoss):
        criterion.proxies.data @= turn
    torch.testing.assert_close(criterion(x @ turn, labels), before)


@pytest.mark.parametrize("name", [*OVER_INSTANCES, "ranking"])
def test_names_of_the_labels_do_not_matter(batch: tuple[Tensor, Tensor], name: str) -> None:
    x, labels = batch
    criterion = OVER_INSTANCES[name]() if name in OVER_INSTANCES else Ranking()
    renamed = torch.tensor([40, -7, 3, 10**12])[labels]
    torch.testing.assert_close(criterion(x, renamed), criterion(x, labels))


@pytest.mark.parametrize("name", OVER_PROXIES)
def test_permuting_labels_with_their_proxies_changes_nothing(
    batch: tuple[Tensor, Tensor], name: str
) -> None:
    x, labels = batch
    criterion = OVER_PROXIES[name]().double()
    before = criterion(x, labels)
    new_name = torch.tensor([2, 0, 3, 1])
    _rename(criterion.assignment, criterion.proxies, new_name)
    torch.testing.assert_close(criterion(x, new_name[labels]), before)


def _rename(assignment: Assignment, proxies: nn.Parameter, new_name: Tensor) -> None:
    """Let label c be called new_name[c]."""
    match assignment:
        case Static():
            proxies.data[new_name] = proxies.data.clone()
        case Fractional():
            assignment.proxy_of_label[new_name] = assignment.proxy_of_label.clone()
        case Several():
            assignment.label_of_proxy.copy_(new_name[assignment.label_of_proxy])
            order = assignment.label_of_proxy.argsort(stable=True)  # a label's own stay together
            assignment.label_of_proxy.copy_(assignment.label_of_proxy[order])
            proxies.data.copy_(proxies.data[order])
        case Dynamic():
            pass  # proxies belong to no label


# N-pairs takes the first item of a class for the anchor, so there the order is part of the loss.
@pytest.mark.parametrize("name", [n for n in [*EVERY, "ranking"] if n != "n-pairs"])
def test_order_of_the_batch_does_not_matter(batch: tuple[Tensor, Tensor], name: str) -> None:
    x, labels = batch
    criterion = (EVERY[name]() if name in EVERY else Ranking()).double()
    order = torch.randperm(12, generator=torch.Generator().manual_seed(3))
    torch.testing.assert_close(criterion(x[order], labels[order]), criterion(x, labels))


@pytest.mark.parametrize("name", EVERY)
def test_a_few_steps_downhill_lower_it(batch: tuple[Tensor, Tensor], name: str) -> None:
    criterion = EVERY[name]().double()
    x = batch[0].requires_grad_()
    optimizer = torch.optim.SGD([x, *criterion.parameters()], lr=1e-3)
    before = criterion(x, batch[1])
    for _ in range(5):
        optimizer.zero_grad()
        criterion(x, batch[1]).backward()
        optimizer.step()
    assert criterion(x, batch[1]) < before


@pytest.mark.parametrize("name", ["proxy-nca", "proxy-nca++", "proxy-triplet"])
def test_only_directions_count_with_fixed_norms(batch: tuple[Tensor, Tensor], name: str) -> None:
    x, labels = batch
    criterion = EVERY[name]().double()
    lengths = torch.linspace(0.1, 9, 12, dtype=torch.double)[:, None]
    torch.testing.assert_close(criterion(lengths * x, labels), criterion(x, labels))
