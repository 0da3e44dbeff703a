"""Derivatives of every loss, once and twice, and what torch.func and torch.compile make of them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from nofuss import NCA, ProxyAnchor, ProxyNCA, ProxyNCAPlusPlus, ProxyTriplet, SoftTriple, Triplet
from nofuss.losses import INSTANCE_LOSSES
from nofuss.losses.proxy_loss import ProxyLoss
from nofuss.proxies.assignment import Sampled
from tests.losses.test_chunked_forms import FORMS, in_chunks

pytestmark = [
    pytest.mark.slow,
    # torch.func scripts some of torch's own formulas when it is first used.
    pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated"),
]
CLASSES, DIM = 4, 3
LABELS = torch.tensor([0, 1, 2, 0, 1, 3])
FUSIBLE = (ProxyNCA, ProxyNCAPlusPlus, ProxyTriplet, ProxyAnchor)
ASSIGNMENTS: dict[str, dict[str, Any]] = {
    "static": {},
    "static, summed": {"reduction": "sum"},
    "fractional": {"proxies_per_class": 0.75},
    "several": {"proxies_per_class": 1.5},
    "dynamic": {"proxies_per_class": 1.5, "assignment": "dynamic"},
    "matched": {"proxies_per_class": 1.5, "assignment": "matched"},
    "sampled": {"assignment": Sampled(CLASSES)},
    "balanced": {"proxies_per_class": 0.75, "assignment": "balanced"},
    "free norms": {"scale": None},
    "each": {"reduction": "none"},
}


BY_VALUES = ("dynamic", "matched", "sampled")  # how many triplets there are depends on the values


def settled(criterion: ProxyLoss) -> ProxyLoss:
    """Let all labels choose, where they do: torch.func and torch.compile show no values."""
    p = criterion.proxies.detach()
    criterion.assignment.settle(p[LABELS % len(p)], LABELS, p)
    return criterion


def cases() -> dict[str, Callable[[], ProxyLoss]]:
    """Every loss over proxies, plain and fused; every assignment with two of them."""
    found: dict[str, Callable[[], ProxyLoss]] = {
        "SoftTriple": lambda: SoftTriple(CLASSES, DIM, proxies_per_class=2, seed=0),
        "SoftTriple, smoothed": lambda: SoftTriple(
            CLASSES, DIM, proxies_per_class=2, label_smoothing=0.1, seed=0
        ),
        "smoothed": lambda: ProxyNCAPlusPlus(CLASSES, DIM, label_smoothing=0.1, seed=0),
    }
    for loss in FUSIBLE:
        for name, options in ASSIGNMENTS.items():
            if loss not in (ProxyNCA, ProxyAnchor) and name != "static":
                continue
            for fused in (True, False):
                try:
                    loss(CLASSES, DIM, fused=fused, **options)
                except (TypeError, ValueError):
                    continue
                found[f"{loss.__name__}, {name}, {'fused' if fused else 'plain'}"] = (
                    lambda loss=loss, options=options, fused=fused: settled(
                        loss(CLASSES, DIM, seed=0, fused=fused, **options)
                    )
                )
    return found


CASES = cases()


def points() -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(6, DIM, dtype=torch.float64, generator=generator)


def as_function(criterion: nn.Module) -> Callable[..., Tensor]:
    """The criterion as a function of embeddings, proxies and labels."""

    def loss(x: Tensor, p: Tensor, labels: Tensor = LABELS) -> Tensor:
        found: Tensor = functional_call(criterion, {"proxies": p}, (x, labels))
        return found

    return loss


@pytest.mark.parametrize("name", CASES)
def test_first_and_second_derivatives_over_proxies(name: str) -> None:
    criterion = CASES[name]().double()
    inputs = points().requires_grad_(), criterion.proxies

    def loss(x: Tensor, p: Tensor) -> Tensor:
        return criterion(x, LABELS)

    assert torch.autograd.gradcheck(loss, inputs)
    assert torch.autograd.gradgradcheck(loss, inputs)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("name", FORMS)
def test_first_and_second_derivatives_of_the_walks(name: str) -> None:
    p = torch.randn(5, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    inputs = points().requires_grad_(), p.requires_grad_()
    shares = None if name == "anchor" else torch.linspace(0.1, 1, 6).double()

    def loss(x: Tensor, p: Tensor) -> Tensor:
        return in_chunks(name, x, LABELS, p, scale=2.0, shares=shares)

    assert torch.autograd.gradcheck(loss, inputs)
    assert torch.autograd.gradgradcheck(loss, inputs)
    assert torch.autograd.gradcheck(loss, inputs, check_forward_ad=True, check_backward_ad=False)


INSTANCES: dict[str, Callable[[], nn.Module]] = {
    **INSTANCE_LOSSES,
    "nca, free norms": lambda: NCA(scale=None),
    "triplet, free norms": lambda: Triplet(unit_norm=False, margin=2),
}


@pytest.mark.parametrize("name", INSTANCES)
def test_first_and_second_derivatives_over_instances(name: str) -> None:
    criterion = INSTANCES[name]()
    x = points().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: criterion(x, LABELS), x)
    assert torch.autograd.gradgradcheck(lambda x: criterion(x, LABELS), x)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("name", CASES)
def test_torch_func_sees_the_plain_form(name: str) -> None:
    criterion = CASES[name]().double()
    if criterion.reduction == "none" or any(word in name for word in BY_VALUES):
        pytest.skip("a Hessian is of one number; vmap has no shapes that depend on values")
    loss, x, p = as_function(criterion), points(), criterion.proxies.detach()
    exact = torch.autograd.functional.hessian(loss, (x, p))
    found = torch.func.hessian(loss, argnums=(0, 1))(x, p)
    for ours, right in zip(sum(found, ()), sum(exact, ()), strict=True):
        torch.testing.assert_close(ours, right)
    gradient = torch.func.grad(loss)(x, p)
    direction = torch.ones_like(x)
    value, along = torch.func.jvp(lambda x: loss(x, p), (x,), (direction,))
    torch.testing.assert_close(value, loss(x, p))
    torch.testing.assert_close(along, (gradient * direction).sum())
    # Batches of batches, and of their labels.
    turned = torch.stack([x, -x]), torch.stack([LABELS, LABELS.flip(0)])
    each = torch.func.vmap(torch.func.grad(loss), in_dims=(0, None, 0))(turned[0], p, turned[1])
    torch.testing.assert_close(each[0], gradient)
    torch.testing.assert_close(each[1], torch.func.grad(loss)(-x, p, LABELS.flip(0)))


@pytest.mark.parametrize("name", INSTANCE_LOSSES)
def test_torch_func_over_instances(name: str) -> None:
    criterion, x = INSTANCE_LOSSES[name](), points()
    exact = torch.autograd.functional.hessian(lambda x: criterion(x, LABELS), x)
    torch.testing.assert_close(torch.func.hessian(lambda x: criterion(x, LABELS))(x), exact)


COMPILED = [name for name in CASES if "fused" in name and "summed" not in name]
COMPILED += ["SoftTriple", "ProxyNCA, several, plain", "ProxyNCA, free norms, plain"]


@pytest.mark.parametrize("name", COMPILED)
def test_compiles_as_one_graph(name: str) -> None:
    torch.compiler.reset()
    criterion, same = CASES[name]().double(), CASES[name]().double()
    x = points().requires_grad_()
    compiled = torch.compile(criterion, fullgraph=True, backend="aot_eager")
    losses = compiled(x, LABELS), same(x, LABELS)
    torch.testing.assert_close(*losses)
    found = torch.autograd.grad(losses[0], (x, criterion.proxies))
    torch.testing.assert_close(found, torch.autograd.grad(losses[1], (x, same.proxies)))


@pytest.mark.usefixtures("threads")
def test_batched_gradients_of_a_fused_loss() -> None:
    x, criterion = points().requires_grad_(), ProxyNCA(4, 3, seed=0).double()
    loss = criterion(x, LABELS)
    (once,) = torch.autograd.grad(loss, x, retain_graph=True)
    scales = torch.tensor([1.0, 2.0]).double()
    (both,) = torch.autograd.grad(loss, x, scales, is_grads_batched=True)
    torch.testing.assert_close(both, torch.stack([once, 2 * once]))


@pytest.mark.parametrize("name", ["triplet", "semi-hard", "lifted", "nca"])
def test_points_that_coincide_have_finite_second_derivatives(name: str) -> None:
    x = points()
    x[3] = x[0]
    criterion = INSTANCE_LOSSES[name]()
    hessian = torch.autograd.functional.hessian(lambda x: criterion(x, LABELS), x)
    assert hessian.isfinite().all()


@pytest.mark.parametrize("fused", [True, None])
@pytest.mark.parametrize("loss", FUSIBLE)
def test_a_sharded_loss_refuses_what_it_can_not_do(
    loss: type[ProxyLoss], fused: bool | None
) -> None:
    criterion = loss(4, 3, seed=0, fused=fused, sharded=True).double()
    x = points().requires_grad_()
    with pytest.raises(RuntimeError, match="twice"):
        torch.autograd.grad(criterion(x, LABELS), x, create_graph=True)
    with pytest.raises(RuntimeError, match=r"twice or by torch\.func"):
        torch.func.grad(lambda x: criterion(x, LABELS))(x.detach())
