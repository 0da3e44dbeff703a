"""What docs/losses.md says of agreement: each loss against something else, the largest difference.

python -m tests.losses.agreement

Twenty random batches of 16 items, 5 classes and 6 dimensions a row; differences are relative to
the larger of 1 and the loss, rounded up to a power of ten. A loss over proxies is asked in its
plain form and in its fused ones, for few proxies and for many, where there are any.
"""

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple
from unittest import mock

import torch
from pytorch_metric_learning import losses as pml
from pytorch_metric_learning.distances import DotProductSimilarity, LpDistance
from pytorch_metric_learning.reducers import MeanReducer
from torch import Tensor, nn
from torch.nn import functional as F

from nofuss import (
    NCA,
    LiftedStructure,
    NPairs,
    ProxyAnchor,
    ProxyNCA,
    ProxyNCAPlusPlus,
    ProxyTriplet,
    Ranking,
    SemiHardTriplet,
    SoftTriple,
    StructuredClustering,
    Triplet,
)
from nofuss.losses import proxy_nca
from nofuss.losses.proxy_loss import ProxyLoss
from nofuss.proxies.assignment import Balanced, Fractional, Several
from tests.losses import slow_losses as slow

CLASSES, DIM, ITEMS, BATCHES = 5, 6, 16, 20
LOOP = "loop in double"


# What a criterion should give: by the loops of slow_losses.py, or by a peer

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


# The rows


class Check(NamedTuple):
    """One row: a loss, what it is checked against, and how both are computed."""

    loss: str
    against: str
    make: Callable[[int], list[nn.Module]]
    expected: Expected


def batch(seed: int) -> tuple[Tensor, Tensor]:
    """Points in general position, at least two of every class."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(ITEMS, DIM, dtype=torch.float64, generator=generator)
    labels = torch.cat(
        [torch.arange(CLASSES).repeat(2), torch.randint(CLASSES, (6,), generator=generator)]
    )
    return x, labels[torch.randperm(ITEMS, generator=generator)]


ASSIGNMENTS: dict[str, dict[str, object]] = {
    "static": {},
    "fractional": {"proxies_per_class": 0.6},
    "several": {"proxies_per_class": 2.4},
    "dynamic": {"proxies_per_class": 2.0, "assignment": "dynamic"},
    "balanced": {"proxies_per_class": 0.6, "assignment": "balanced"},
    "free norms": {"scale": None},
}


class Walked(nn.Module):
    """The walk that a Proxy-NCA takes over many proxies, of few."""

    def __init__(self, criterion: ProxyLoss) -> None:
        super().__init__()
        self.criterion = criterion

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        with mock.patch.object(proxy_nca, "at_once_is_faster", return_value=False):
            found: Tensor = self.criterion(x, labels)
        return found


def forms(loss: type[ProxyLoss], **options: object) -> Callable[[int], list[nn.Module]]:
    """The plain form, and the fused ones where there are any."""

    def make(seed: int) -> list[nn.Module]:
        made: list[nn.Module] = []
        default = loss(CLASSES, DIM, seed=seed, **options)  # type: ignore[arg-type]
        for fused in (False,) if default.fused is False else (False, True):
            one = loss(CLASSES, DIM, seed=seed, fused=fused, **options)  # type: ignore[arg-type]
            one.assignment.settle(*batch(seed), one.proxies.double())
            made.append(one.double())
            if fused and loss in (ProxyNCA, ProxyNCAPlusPlus):
                made.append(Walked(one))
        return made

    return make


def checks() -> Iterator[Check]:
    """Every row of the table."""
    yield from checks_over_proxies()
    yield from checks_over_instances()


def checks_over_proxies() -> Iterator[Check]:
    formulas: dict[type[ProxyLoss], Expected] = {
        ProxyNCA: over_proxies(slow.nca_of),
        ProxyTriplet: over_proxies(slow.margin_of),
        ProxyNCAPlusPlus: over_proxies(slow.softmax_of),
        ProxyAnchor: anchor,
    }
    for loss, expected in formulas.items():
        for name, options in ASSIGNMENTS.items():
            if name in loss.takes or (name == "free norms" and loss in (ProxyNCA, ProxyTriplet)):
                yield Check(f"`{loss.__name__}`, {name}", LOOP, forms(loss, **options), expected)

    def smooth(seed: int) -> list[nn.Module]:
        return [ProxyNCAPlusPlus(CLASSES, DIM, seed=seed, label_smoothing=0.1).double()]

    yield Check("`ProxyNCAPlusPlus`, label smoothing", LOOP, smooth, over_proxies(slow.smoothed_of))
    yield Check(
        "`ProxyNCAPlusPlus`, label smoothing",
        "`torch.nn.functional.cross_entropy`",
        smooth,
        cross_entropy,
    )
    yield Check(
        "`ProxyNCAPlusPlus`",
        "PML `ProxyNCALoss`",
        forms(ProxyNCAPlusPlus),
        peer(pml.ProxyNCALoss(CLASSES, DIM, softmax_scale=9), "proxies"),
    )
    yield Check(
        "`ProxyAnchor`",
        "PML `ProxyAnchorLoss`",
        forms(ProxyAnchor),
        peer(pml.ProxyAnchorLoss(CLASSES, DIM), "proxies"),
    )
    yield Check(
        "`SoftTriple`", LOOP, lambda s: [SoftTriple(CLASSES, DIM, seed=s).double()], soft_triple
    )
    yield Check(
        "`SoftTriple`",
        "PML `SoftTripleLoss` (τ 0)",
        lambda s: [SoftTriple(CLASSES, DIM, seed=s, tau=0).double()],
        peer(pml.SoftTripleLoss(CLASSES, DIM), "fc"),
    )


def checks_over_instances() -> Iterator[Check]:
    yield Check("`NCA`", LOOP, lambda _: [NCA()], over_units(slow.nca, 18.0))
    yield Check("`Triplet`", LOOP, lambda _: [Triplet()], over_units(slow.triplet, 0.1))
    yield Check(
        "`Triplet`",
        "PML `TripletMarginLoss`",
        lambda _: [Triplet()],
        peer(
            pml.TripletMarginLoss(margin=0.1, distance=LpDistance(power=2), reducer=MeanReducer())
        ),
    )
    yield Check(
        "`SemiHardTriplet`",
        f"tf.contrib's formula, {LOOP}",
        lambda _: [SemiHardTriplet()],
        over_units(slow.semi_hard, 0.2),
    )
    yield Check(
        "`LiftedStructure`", LOOP, lambda _: [LiftedStructure()], as_it_is(slow.lifted, 1.0)
    )
    yield Check(
        "`LiftedStructure`",
        "PML `LiftedStructureLoss`",
        lambda _: [LiftedStructure()],
        peer(pml.LiftedStructureLoss(distance=LpDistance(normalize_embeddings=False))),
    )
    yield Check(
        "`NPairs`",
        f"tf.contrib's formula, {LOOP}",
        lambda _: [NPairs()],
        as_it_is(slow.n_pairs, 0.002),
    )
    yield Check(
        "`NPairs`",
        "PML `NPairsLoss` (l2 0)",
        lambda _: [NPairs(l2=0)],
        peer(pml.NPairsLoss(distance=DotProductSimilarity(normalize_embeddings=False))),
    )
    yield Check(
        "`StructuredClustering`",
        f"tf.contrib's search, {LOOP}",
        lambda _: [StructuredClustering()],
        over_units(slow.clustering, 1.0),
    )
    yield Check("`Ranking`", LOOP, lambda _: [Ranking()], over_units(slow.ranking))


def largest_differences(check: Check, batches: int = BATCHES) -> tuple[float, float]:
    """In double, and in float32."""
    worst = [0.0, 0.0]
    for seed in range(batches):
        x, labels = batch(seed)
        for criterion in check.make(seed):
            own = criterion.criterion if isinstance(criterion, Walked) else criterion
            expected = check.expected(own.double(), x, labels)
            for i, dtype in enumerate((torch.float64, torch.float32)):
                found = criterion.to(dtype)(x.to(dtype), labels).item()
                worst[i] = max(worst[i], abs(found - expected) / max(1.0, abs(expected)))
    return worst[0], worst[1]


def power_of_ten(value: float) -> str:
    """The next power of ten: what another machine finds too."""
    return "0" if value == 0 else f"1e{math.ceil(math.log10(value)):d}"


def table() -> str:
    """All of it."""
    lines = ["| loss | against | double | float32 |", "|---|---|---|---|"]
    for check in checks():
        double, single = map(power_of_ten, largest_differences(check))
        lines.append(f"| {check.loss} | {check.against} | {double} | {single} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
