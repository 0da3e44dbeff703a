"""What holds of every loss: symmetries, precision, odd batches, NaN, extreme inputs."""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from nofuss import (
    NCA,
    ProxyAnchor,
    ProxyNCA,
    ProxyNCAPlusPlus,
    ProxyTriplet,
    Ranking,
    SemiHardTriplet,
    SoftTriple,
    Triplet,
)
from nofuss.losses import INSTANCE_LOSSES, PROXY_LOSSES
from nofuss.losses.proxy_loss import ProxyLoss
from nofuss.proxies.assignment import Assignment, Dynamic, Fractional, Several, Static
from tests.losses.test_chunked_forms import in_chunks

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
FUSIBLE = (ProxyNCA, ProxyNCAPlusPlus, ProxyTriplet, ProxyAnchor)
LABELS = torch.tensor([0, 1, 2, 0, 1, 2])


def points(*, seed: int = 0, dim: int = 8) -> Tensor:
    """Six points for `LABELS`."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(6, dim, dtype=torch.float64, generator=generator)


# Symmetries


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


@pytest.mark.parametrize("name", [*PROXY_LOSSES, "nca", "triplet", "semi-hard", "clustering"])
@pytest.mark.parametrize("size", [1e-8, 1e8])
def test_only_directions_count(name: str, size: float) -> None:
    x = points().float()
    made = PROXY_LOSSES[name](3, 8, seed=0) if name in PROXY_LOSSES else INSTANCE_LOSSES[name]()
    torch.testing.assert_close(made(x * size, LABELS), made(x, LABELS))
    assert made(x * 1e30, LABELS).isnan()  # |x|² overflows: no silent zero


# Precision


SHARP: dict[str, Callable[[], nn.Module]] = {
    "proxy-nca": lambda: ProxyNCA(4, 5, scale=64, seed=0),
    "proxy-nca++": lambda: ProxyNCAPlusPlus(4, 5, temperature=2 / 64, seed=0),
    "proxy-triplet": lambda: ProxyTriplet(4, 5, scale=64, seed=0),
    "proxy-anchor": lambda: ProxyAnchor(4, 5, scale=64, seed=0),
    "soft-triple": lambda: SoftTriple(4, 5, scale=64, gamma=1 / 64, proxies_per_class=2, seed=0),
}


def gradients(loss: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(loss, inputs)


@pytest.mark.parametrize("name", SHARP)
def test_worst_placed_point_at_scale_64(name: str) -> None:
    criterion = SHARP[name]()
    own = criterion.proxies.detach()[:1]  # class 0, or its first center
    x = -own + 0.01 * torch.randn(1, 5, generator=torch.Generator().manual_seed(0))
    label = torch.tensor([0])
    loss = criterion(x.requires_grad_(), label)
    grads = gradients(loss, x, criterion.proxies)
    exact = SHARP[name]().double()
    exact.load_state_dict(criterion.state_dict())
    x64 = x.detach().double().requires_grad_()
    loss64 = exact(x64, label)
    assert loss > 20
    torch.testing.assert_close(loss.double(), loss64, rtol=1e-5, atol=0)
    for ours, right in zip(grads, gradients(loss64, x64, exact.proxies), strict=True):
        assert right.norm() > 1e-2
        assert (ours - right).norm() < 1e-4 * right.norm()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", EVERY)
def test_half_precision_is_read_exactly_and_computed_in_float32(
    batch: tuple[Tensor, Tensor], name: str, dtype: torch.dtype
) -> None:
    x = batch[0].to(dtype).requires_grad_()
    criterion, same = EVERY[name](), EVERY[name]()
    loss = criterion(x, batch[1])
    assert loss.dtype is torch.float32
    torch.testing.assert_close(loss, same(x.detach().float(), batch[1]), rtol=0, atol=0)
    loss.backward()
    assert x.grad is not None
    assert x.grad.dtype is dtype
    assert x.grad.isfinite().all()
    for parameter in criterion.parameters():
        assert parameter.dtype is torch.float32
        assert parameter.grad is not None
        assert parameter.grad.dtype is torch.float32


@pytest.mark.parametrize("name", EVERY)
def test_autocast_does_not_reach_into_the_loss(batch: tuple[Tensor, Tensor], name: str) -> None:
    layer = nn.Linear(5, 5)
    criterion, same = EVERY[name](), EVERY[name]()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        x = layer(batch[0].float())
        loss = criterion(x, batch[1])
    assert x.dtype is torch.bfloat16
    torch.testing.assert_close(loss, same(x.detach().float(), batch[1]), rtol=0, atol=0)
    loss.backward()
    assert layer.weight.grad is not None
    assert layer.weight.grad.isfinite().all()


@pytest.mark.parametrize("loss", FUSIBLE)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_criterion_in_half_computes_in_float32(loss: type[ProxyLoss], dtype: torch.dtype) -> None:
    half = loss(7000, 8, seed=0).to(dtype)
    single = loss(7000, 8, seed=0)
    single.proxies.data.copy_(half.proxies.data)
    x = points().to(dtype)
    value = half(x, LABELS)
    assert value.dtype is torch.float32
    torch.testing.assert_close(value, single(x.float(), LABELS))
    value.backward()
    assert half.proxies.grad is not None
    assert half.proxies.grad.dtype is dtype


@pytest.mark.parametrize("name", ["triplet", "semi-hard", "clustering"])
def test_gradients_of_concentrated_embeddings(name: str) -> None:
    """A fresh network points nearly the same way for all: the digits that differ must be kept."""
    x = (torch.ones(8) + 2e-3 * points(seed=3)).float()
    found = []
    for dtype in (torch.float32, torch.float64):
        own = x.to(dtype).requires_grad_()
        found.append(torch.autograd.grad(INSTANCE_LOSSES[name]()(own, LABELS), own)[0].double())
    assert (found[0] - found[1]).norm() < 2e-3 * found[1].norm()


@pytest.mark.parametrize("name", ["nca", "softmax", "triplet", "anchor"])
def test_a_million_equal_logits_add_up(name: str) -> None:
    """The loss of equal logits is a number known exactly; Z is off by as much as its logarithm."""
    count = 1_000_000
    p = F.normalize(points()[:1].float()).repeat(count, 1)
    x = points().float()[:1]
    logit = 3 * float(F.normalize(x[0].double(), dim=0) @ p[0].double())
    found = in_chunks(name, x, LABELS[:1], p, scale=3.0).double().item()
    exact = {
        "softmax": math.log(count),
        "triplet": 0.1,
        "anchor": math.log1p(math.exp(0.3 - logit))
        + (count - 1) / count * math.log1p(math.exp(0.3 + logit)),
    }.get(name, math.log(count - 1))
    assert found == pytest.approx(exact, abs=2e-6)


# Batches


@pytest.mark.parametrize("name", [*OVER_INSTANCES, "dynamic", "triplet, dynamic"])
@pytest.mark.parametrize(
    "labels", [[2, 2, 2, 2], [0, 1, 2, 3], [1]], ids=["one class", "no positive", "one item"]
)
def test_a_batch_with_nothing_to_say_is_zero_with_a_graph(
    batch: tuple[Tensor, Tensor], name: str, labels: list[int]
) -> None:
    x = batch[0][: len(labels)].float().requires_grad_()
    criterion = EVERY[name]()
    loss = criterion(x, torch.tensor(labels))
    assert loss == 0
    loss.backward()
    for leaf in (x, *criterion.parameters()):
        assert leaf.grad is not None
        assert not leaf.grad.any()


# NaN and extreme inputs


@pytest.mark.parametrize("name", [*EVERY, "ranking"])
def test_nan_in_gives_nan_out(batch: tuple[Tensor, Tensor], name: str) -> None:
    for bad in (math.nan, math.inf):
        for row in (0, 5):  # of a class with others, and alone in its class
            x, labels = batch[0][:6].float(), torch.tensor([0, 1, 2, 0, 1, 3])
            x[row, 3] = bad
            criterion = EVERY[name]() if name in EVERY else Ranking()
            assert criterion(x, labels).isnan()


@pytest.mark.parametrize("loss", FUSIBLE)
@pytest.mark.parametrize("fused", [True, False])
def test_nan_in_a_proxy_gives_nan(loss: type[ProxyLoss], fused: bool) -> None:
    criterion = loss(4, 8, seed=0, fused=fused)
    criterion.proxies.data[3, 0] = math.nan
    assert criterion(points().float(), LABELS).isnan()


COORDINATES = st.sampled_from([0.0, 0.0, 1.0, -1.0, 0.5, 1e-20, 1e-4, 3e3, -3e3])


@settings(max_examples=100, derandomize=True)
@given(
    name=st.sampled_from(sorted(EVERY)),
    labels=st.lists(st.integers(0, 3), min_size=1, max_size=7),
    data=st.data(),
)
def test_never_nan(name: str, labels: list[int], data: st.DataObject) -> None:
    rows = st.lists(COORDINATES, min_size=5, max_size=5)
    x = torch.tensor(data.draw(st.lists(rows, min_size=len(labels), max_size=len(labels))))
    criterion = EVERY[name]()
    loss = criterion(x.requires_grad_(), torch.tensor(labels))
    assert loss.isfinite()
    loss.backward()
    for leaf in (x, *criterion.parameters()):
        assert leaf.grad is not None
        assert leaf.grad.isfinite().all()


@pytest.mark.parametrize("classes", [3, 8000])  # 8,000 are walked
@pytest.mark.parametrize("loss", FUSIBLE)
def test_a_proxy_at_zero_has_the_plain_form_s_gradient(loss: type[ProxyLoss], classes: int) -> None:
    found = []
    for fused in (True, False):
        criterion = loss(classes, 8, seed=0, fused=fused)
        criterion.proxies.data[1] = 0
        criterion.proxies.data[2] = 1e-30
        x = points().float().requires_grad_()
        loss_of = criterion(x, LABELS)
        found.append((loss_of, *torch.autograd.grad(loss_of, (x, criterion.proxies))))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)
    assert found[0][2][1].norm() < 20


def test_a_zero_vector_is_at_two_from_everything_in_every_loss() -> None:
    """Its cosine is 0, so |x̂ − ŷ|² = 2, also where distances are computed."""
    x = points()[:3]
    x[0] = 0
    labels = torch.tensor([0, 0, 1])
    far = float(2 - 2 * F.cosine_similarity(x[1], x[2], dim=0))
    anchors = [0.0, 2 - far]  # d(x, y) − d(x, z) of the zero vector, and of its positive
    assert NCA(scale=2.0)(x, labels).item() == pytest.approx(sum(anchors) / 2)
    hinges = [max(0, 3 + each) for each in anchors]
    assert Triplet(margin=3)(x, labels).item() == pytest.approx(sum(hinges) / 2)
    assert SemiHardTriplet(margin=3)(x, labels).item() == pytest.approx(sum(hinges) / 2)
    assert (ProxyNCA(3, 8, scale=2.0).double().logits(x)[0] == 0).all()


# Others
