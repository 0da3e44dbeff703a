"""What a criterion should give for a batch, by the loops of `slow_losses.py` or by a peer."""

from collections.abc import Callable

from torch import Tensor, nn
from torch.nn import functional as F

from nofuss import ProxyAnchor, ProxyNCAPlusPlus, SoftTriple
from nofuss.losses.proxy_loss import ProxyLoss
from nofuss.proxies.assignment import Fractional, Several
from nofuss.proxies.balanced import Balanced
from tests.losses import slow_losses as slow

Expected = Callable[[nn.Module, Tensor, Tensor], float]


def triplets(
    criterion: ProxyLoss, x: slow.Vectors, labels: list[int], p: slow.Vectors
) -> list[slow.Triplet]:
    match criterion.assignment:
        case Fractional() | Balanced():
            return slow.by_label(labels, criterion.assignment.proxy_of_label.tolist(), len(p))
        case Several():
            return slow.of_several(x, labels, p, criterion.assignment.label_of_proxy.tolist())
    if criterion.assignment.name == "dynamic":
        return slow.of_dynamic(x, labels, p)
    return slow.by_label(labels, range(len(p)), len(p))


def placed(criterion: ProxyLoss, x: Tensor) -> tuple[slow.Vectors, slow.Vectors]:
    vectors = slow.rows(x), slow.rows(criterion.proxies)
    if criterion.scale is None:
        return vectors
    points, proxies = ([slow.unit(v) for v in group] for group in vectors)
    return points, proxies


def over_proxies(of: slow.OfTriplet) -> Expected:
    def expected(criterion: nn.Module, x: Tensor, labels: Tensor) -> float:
        assert isinstance(criterion, ProxyLoss)
        points, p = placed(criterion, x)
        found = triplets(criterion, points, labels.tolist(), p)
        return slow.over_triplets(points, p, found, criterion.scale, of)

    return expected


def anchor(criterion: nn.Module, x: Tensor, labels: Tensor) -> float:
    assert isinstance(criterion, ProxyAnchor)
    points, p = placed(criterion, x)
    found = triplets(criterion, points, labels.tolist(), p)
    return slow.proxy_anchor(points, p, found, 32.0, 0.1)


def soft_triple(criterion: nn.Module, x: Tensor, labels: Tensor) -> float:
    assert isinstance(criterion, SoftTriple)
    points, p = placed(criterion, x)
    return slow.soft_triple(points, labels.tolist(), p, 10, 0.2)


def over_units(loss: Callable[..., float], *options: float) -> Expected:
    return lambda _, x, labels: loss(
        [slow.unit(v) for v in slow.rows(x)], labels.tolist(), *options
    )


def as_it_is(loss: Callable[..., float], *options: float) -> Expected:
    return lambda _, x, labels: loss(slow.rows(x), labels.tolist(), *options)


def peer(theirs: nn.Module, parameter: str = "") -> Expected:
    """Their loss, given our proxies."""

    def expected(criterion: nn.Module, x: Tensor, labels: Tensor) -> float:
        if parameter:
            values = criterion.get_parameter("proxies").detach()
            values = values.T if parameter == "fc" else values
            theirs.load_state_dict({parameter: values})
        return float(theirs.double()(x, labels).detach())

    return expected


def cross_entropy(criterion: nn.Module, x: Tensor, labels: Tensor) -> float:
    assert isinstance(criterion, ProxyNCAPlusPlus)
    return float(
        F.cross_entropy(
            criterion.logits(x).detach(), labels, label_smoothing=criterion.label_smoothing
        )
    )
