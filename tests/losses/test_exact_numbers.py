"""What independent implementations once found wrong, each as the lines that showed it."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from nofuss import (
    NCA,
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
from nofuss.losses import INSTANCE_LOSSES, PROXY_LOSSES
from nofuss.losses.proxy_loss import ProxyLoss
from tests.losses import slow_losses as slow
from tests.losses.agreement import batch as random_batch
from tests.losses.test_chunked_forms import in_chunks

LABELS = torch.tensor([0, 1, 2, 0, 1, 2])
FUSIBLE = (ProxyNCA, ProxyNCAPlusPlus, ProxyTriplet, ProxyAnchor)


def points(*, seed: int = 0, dim: int = 8) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(6, dim, dtype=torch.float64, generator=generator)


# 1. Second derivatives


def test_a_gradient_has_a_graph_of_its_own() -> None:
    x = points()[:3].requires_grad_()
    loss = ProxyNCA(3, 8).double()(x, torch.arange(3))
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    assert gradient.requires_grad


@pytest.mark.parametrize("loss", FUSIBLE)
def test_a_gradient_penalty_trains_with_the_right_gradients(loss: type[ProxyLoss]) -> None:
    found = []
    for fused in (True, False):
        criterion = loss(3, 8, seed=0, fused=fused).double()
        x = points().requires_grad_()
        value = criterion(x, LABELS)
        (gradient,) = torch.autograd.grad(value, x, create_graph=True)
        total = value + gradient.square().sum()
        found.append(torch.autograd.grad(total, (x, criterion.proxies)))
    torch.testing.assert_close(*found)


def test_an_outer_step_of_maml_sees_through_the_inner_one() -> None:
    found = []
    for fused in (None, False):
        criterion = ProxyNCA(3, 8, seed=0, fused=fused).double()
        torch.manual_seed(0)
        model = nn.Linear(8, 8).double()
        weights = dict(model.named_parameters())
        inner = criterion(functional_call(model, weights, (points(),)), LABELS)
        steps = torch.autograd.grad(inner, tuple(weights.values()), create_graph=True)
        moved = {k: w - 0.1 * g for (k, w), g in zip(weights.items(), steps, strict=True)}
        outer = criterion(functional_call(model, moved, (points(seed=1),)), LABELS)
        found.append(torch.autograd.grad(outer, tuple(weights.values())))
    torch.testing.assert_close(*found)


# 3. NaN


@pytest.mark.parametrize(
    "name", [*PROXY_LOSSES, *INSTANCE_LOSSES, "ranking", "dynamic", "matched", "several"]
)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("row", [0, 5])  # of a class with others, and alone in its class
def test_nan_in_gives_nan_out(name: str, bad: float, row: int) -> None:
    made: dict[str, Callable[[], nn.Module]] = {
        **{n: lambda loss=loss: loss(4, 8, seed=0) for n, loss in PROXY_LOSSES.items()},
        **INSTANCE_LOSSES,
        "ranking": Ranking,
        "dynamic": lambda: ProxyTriplet(4, 8, assignment="dynamic", seed=0),
        "matched": lambda: ProxyNCA(4, 8, assignment="matched", seed=0),
        "several": lambda: ProxyNCA(4, 8, proxies_per_class=2.5, seed=0),
    }
    x = points().float()
    x[row, 3] = bad
    assert made[name]()(x, torch.tensor([0, 1, 2, 0, 1, 3])).isnan()


@pytest.mark.parametrize("which", ["anchors", "positives", "negatives"])
def test_nan_among_bare_triplets_gives_nan(which: str) -> None:
    given = {
        name: points(seed=i).float() for i, name in enumerate(("anchors", "positives", "negatives"))
    }
    given[which][2, 1] = math.nan
    criterion = ProxyNCA(4, 8, assignment="dynamic", seed=0)
    assert criterion(given.pop("anchors"), **given).isnan()


@pytest.mark.parametrize("loss", FUSIBLE)
@pytest.mark.parametrize("fused", [True, False])
def test_nan_in_a_proxy_gives_nan(loss: type[ProxyLoss], fused: bool) -> None:
    criterion = loss(4, 8, seed=0, fused=fused)
    criterion.proxies.data[3, 0] = math.nan
    assert criterion(points().float(), LABELS).isnan()


# 4. Sums over many proxies


@pytest.mark.parametrize("name", ["nca", "softmax", "triplet", "anchor"])
@pytest.mark.parametrize("count", [300_000, 1_000_000])
def test_a_million_equal_logits_add_up(name: str, count: int) -> None:
    """The loss of equal logits is a number known exactly; Z is off by as much as its logarithm."""
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


@pytest.mark.parametrize("dim", [8, 64])
def test_the_gradient_over_a_million_proxies_adds_up_too(dim: int) -> None:
    """All proxies in one place: they pull as one, so the gradient by x is zero."""
    p = F.normalize(points(dim=dim)[:1].float()).repeat(1_000_000, 1)
    x = F.normalize(points(dim=dim).float()).requires_grad_()
    in_chunks("nca", x, LABELS, p, scale=1.0).backward()
    assert x.grad is not None
    assert 6 * x.grad.norm(dim=1).max() < 1e-5  # of unit vectors


# 5. Extreme inputs


def step(criterion: ProxyLoss, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    x = x.clone().requires_grad_()
    loss = criterion(x, LABELS)
    return loss, *torch.autograd.grad(loss, (x, criterion.proxies))


@pytest.mark.parametrize("classes", [3, 8000])  # 8,000 are walked
@pytest.mark.parametrize("loss", FUSIBLE)
def test_a_proxy_at_zero_has_the_plain_form_s_gradient(loss: type[ProxyLoss], classes: int) -> None:
    found = []
    for fused in (True, False):
        criterion = loss(classes, 8, seed=0, fused=fused)
        criterion.proxies.data[1] = 0
        criterion.proxies.data[2] = 1e-30
        found.append(step(criterion, points().float()))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)
    assert found[0][2][1].norm() < 20


@pytest.mark.parametrize("name", [*PROXY_LOSSES, "nca", "triplet", "semi-hard", "clustering"])
@pytest.mark.parametrize("size", [1e-8, 1e8])
def test_only_directions_count(name: str, size: float) -> None:
    x = points().float()
    made = PROXY_LOSSES[name](3, 8, seed=0) if name in PROXY_LOSSES else INSTANCE_LOSSES[name]()
    torch.testing.assert_close(made(x * size, LABELS), made(x, LABELS))
    assert made(x * 1e30, LABELS).isnan()  # |x|² overflows: no silent zero


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


@pytest.mark.parametrize("name", ["triplet", "semi-hard", "clustering"])
def test_gradients_of_concentrated_embeddings(name: str) -> None:
    """A fresh network points nearly the same way for all: the digits that differ must be kept."""
    x = (torch.ones(8) + 2e-3 * points(seed=3)).float()
    found = []
    for dtype in (torch.float32, torch.float64):
        own = x.to(dtype).requires_grad_()
        found.append(torch.autograd.grad(INSTANCE_LOSSES[name]()(own, LABELS), own)[0].double())
    assert (found[0] - found[1]).norm() < 2e-3 * found[1].norm()


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


def test_two_hundred_thousand_equal_logits_in_half() -> None:
    criterion = ProxyNCAPlusPlus(200_000, 2, seed=0).half()
    criterion.proxies.data[:] = torch.tensor([1.0, 0.0])
    loss = criterion(torch.tensor([[1.0, 0.0]]).half(), torch.tensor([7]))
    assert loss.item() == pytest.approx(math.log(200_000), abs=1e-5)


# 7. Small


def test_dynamic_proxy_triplet_is_a_mean_per_anchor() -> None:
    """Anchors with few proxies in Z count as much as those with many."""
    x, labels = random_batch(0)
    criterion = ProxyTriplet(5, 6, proxies_per_class=2, assignment="dynamic", seed=0).double()
    units, p = ([slow.unit(v) for v in slow.rows(t)] for t in (x, criterion.proxies))
    triplets = slow.of_dynamic(units, labels.tolist(), p)
    assert len({len(z) for _, _, z in triplets}) > 1
    expected = slow.over_triplets(units, p, triplets, 2.0, slow.margin_of)
    assert criterion(x, labels).item() == pytest.approx(expected, rel=1e-12)


def test_n_pairs_weighs_norms_as_tf_does() -> None:
    x, labels = random_batch(1)
    loss = NPairs(l2=3.0)(x, labels) - NPairs(l2=0)(x, labels)
    items = [(labels == c).nonzero().flatten()[:2] for c in range(5)]
    anchors, positives = (torch.stack([i[k] for i in items]) for k in (0, 1))
    reg = [x[rows].square().sum(1).mean() for rows in (anchors, positives)]
    assert loss.item() == pytest.approx(0.25 * 3.0 * float(sum(reg)))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SoftTriple(4, 5, gamma=0), "gamma is 0; expected above 0"),
        (lambda: SoftTriple(4, 5, gamma=-1), "gamma is -1; expected above 0"),
        (lambda: SoftTriple(4, 5, gamma=math.nan), "gamma is nan; expected above 0"),
        (lambda: SoftTriple(4, 5, tau=-1), "tau is -1; expected from 0 up"),
        (lambda: SoftTriple(4, 5, scale=-1), "scale is -1; expected above 0"),
        (lambda: SoftTriple(4, 5, label_smoothing=1), "label_smoothing is 1; expected from 0 up"),
        (lambda: NPairs(l2=-1), "l2 is -1; expected from 0 up"),
        (lambda: NCA(scale=-1), "scale is -1; expected above 0"),
        (lambda: NCA(scale=0), "scale is 0; expected above 0"),
        (lambda: ProxyNCAPlusPlus(4, 5, temperature=-1), "temperature is -1; expected above 0"),
        (lambda: ProxyNCAPlusPlus(4, 5, label_smoothing=-0.1), "label_smoothing is -0.1"),
        (lambda: StructuredClustering(gamma=-1), "gamma is -1; expected from 0 up"),
        (lambda: StructuredClustering(refinements=-1), "refinements is -1; expected from 0 up"),
        (lambda: ProxyTriplet(4, 5, margin=math.nan), "margin is nan; expected from 0 up"),
        (lambda: ProxyAnchor(4, 5, margin=-1), "margin is -1; expected from 0 up"),
        (lambda: SoftTriple(4, 5, margin=-1), "margin is -1; expected from 0 up"),
        (lambda: INSTANCE_LOSSES["triplet"](margin=-1), "margin is -1; expected from 0 up"),
        (lambda: INSTANCE_LOSSES["semi-hard"](margin=math.nan), "margin is nan; expected"),
        (lambda: INSTANCE_LOSSES["lifted"](margin=math.inf), "margin is inf; expected from 0"),
    ],
)
def test_options_that_make_no_sense_are_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_ranking_says_whether_it_normalises() -> None:
    x = torch.tensor([[1.0, 0.0], [9.0, 1.0], [1.0, 1.0]])
    labels = torch.tensor([0, 0, 1])
    assert Ranking()(x, labels) == 0
    assert Ranking(unit_norm=False)(x, labels) == 1  # as they lie, 2 is the closest to both


@pytest.mark.parametrize("name", [*PROXY_LOSSES, *INSTANCE_LOSSES])
def test_numpy_arrays_do_as_well(name: str) -> None:
    x = points().float()
    made = PROXY_LOSSES[name](3, 8, seed=0) if name in PROXY_LOSSES else INSTANCE_LOSSES[name]()
    assert made(x.numpy(), LABELS.numpy()) == made(x, LABELS)


def test_whole_weights_of_dynamic_assignment_weigh_anchors() -> None:
    """They are no repetitions there: a repeated item would be a positive of itself."""
    x, labels = random_batch(2)
    weights = torch.arange(len(x)) % 3
    options: dict[str, Any] = {"proxies_per_class": 2, "assignment": "dynamic", "seed": 0}
    each = ProxyNCA(5, 6, reduction="none", **options).double()(x, labels)
    total = ProxyNCA(5, 6, reduction="sum", **options).double()(x, labels, weights=weights)
    torch.testing.assert_close(total, (each * weights).sum())
    criterion = ProxyNCA(5, 6, **options).double()
    same = criterion(x, labels, weights=weights.double())
    assert criterion(x, labels, weights=weights) == same


@pytest.mark.parametrize("options", [{}, {"assignment": "dynamic"}, {"proxies_per_class": 2}])
def test_several_forwards_before_one_backward(options: dict[str, object]) -> None:
    criterion = ProxyNCA(3, 8, seed=0, **options).double()  # type: ignore[arg-type]
    x = points().requires_grad_()
    total = criterion(x, LABELS) + criterion(-x, LABELS) + criterion(2 * x, LABELS)
    total.backward()
    assert x.grad is not None
    assert x.grad.isfinite().all()
