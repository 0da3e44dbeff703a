"""The fused losses against slow loops, the plain autograd form, and the corner cases."""

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from nofuss.geometry import normalize
from nofuss.losses.fast import nca as fused_nca
from nofuss.losses.fast import walk as fused_walk
from nofuss.losses.fast.fused import fused_loss, fused_proxy_anchor, fused_proxy_nca, pays
from nofuss.losses.fast.nca import WalkedNCA
from nofuss.losses.fast.small import small_is_faster


def slow_nca(x: Tensor, positive: Tensor, p: Tensor, scale: float, softmax: bool) -> float:
    total, x, p = 0.0, x.detach(), p.detach()
    for xi, y in zip(x, positive.tolist(), strict=True):
        logits = [scale * float(xi @ z / z.norm().clamp_min(1e-12)) for z in p]
        others = [v for j, v in enumerate(logits) if softmax or j != y]
        top = max(others)
        total += top + math.log(sum(math.exp(v - top) for v in others)) - logits[y]
    return total / len(x)


def walked_nca(
    x: Tensor,
    positive: Tensor,
    p: Tensor,
    *,
    scale: float,
    include_positive: bool = False,
    keep: bool | None = None,
) -> Tensor:
    """The walk, however few the proxies are."""
    return fused_loss(WalkedNCA(include_positive, keep), x * scale, positive, p)


def plain_nca(
    x: Tensor, positive: Tensor, p: Tensor, *, scale: float, include_positive: bool
) -> Tensor:
    logits = scale * x @ F.normalize(p).T
    own = positive[:, None]
    others = logits if include_positive else logits.scatter(1, own, -math.inf)
    return (others.logsumexp(1) - logits.gather(1, own)[:, 0]).mean()


def batch(
    b: int, dim: int, num_proxies: int, *, dtype: torch.dtype = torch.float64, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    x = F.normalize(torch.randn(b, dim, generator=g, dtype=dtype))
    positive = torch.randint(num_proxies, (b,), generator=g)
    return x, positive, torch.randn(num_proxies, dim, generator=g, dtype=dtype)


def gradients(loss: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(loss, inputs)


SIZES = {
    "one anchor": (1, 5, 9),
    "two proxies": (4, 3, 2),
    "last chunk of one row": (3, 4, 9),
    "more anchors than proxies": (40, 6, 7),
    "whole chunks": (8, 8, 16),
}


@pytest.fixture(params=[2**3, 2**6, 2**18])
def chunk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_walk, "CHUNK", request.param)
    monkeypatch.setattr(fused_nca, "KEEP_BYTES", 2**8)  # keep=None: some chunks kept, some not


@pytest.mark.usefixtures("chunk")
@pytest.mark.parametrize("keep", [True, False, None])
@pytest.mark.parametrize("softmax", [True, False])
@pytest.mark.parametrize("scale", [1.0, 18.0, 2000.0])  # the last needs a running maximum
@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_equals_the_slow_loop_and_the_plain_gradients(
    size: tuple[int, int, int], scale: float, softmax: bool, keep: bool
) -> None:
    x, positive, p = (t.requires_grad_(t.is_floating_point()) for t in batch(*size))
    loss = walked_nca(x, positive, p, scale=scale, include_positive=softmax, keep=keep)
    assert loss.item() == pytest.approx(
        slow_nca(x, positive, p, scale, softmax), rel=1e-9, abs=1e-9
    )
    plain = plain_nca(x, positive, p, scale=scale, include_positive=softmax)
    for got, expected in zip(gradients(loss, x, p), gradients(plain, x, p), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("softmax", [True, False])
@pytest.mark.parametrize("scale", [18.0, 64.0, 300.0])
@pytest.mark.parametrize("size", [(32, 64, 5000), (64, 16, 999), (1, 128, 3001)])
def test_float32_gradients_match_the_plain_form(
    size: tuple[int, int, int], scale: float, softmax: bool, keep: bool
) -> None:
    x, positive, p = batch(*size, dtype=torch.float32)
    x, p = x.requires_grad_(), p.requires_grad_()
    got = walked_nca(x, positive, p, scale=scale, include_positive=softmax, keep=keep)
    exact_x, exact_p = (t.detach().double().requires_grad_() for t in (x, p))
    exact = plain_nca(exact_x, positive, exact_p, scale=scale, include_positive=softmax)
    assert got.item() == pytest.approx(exact.item(), rel=1e-5)
    for a, b in zip(gradients(got, x, p), gradients(exact, exact_x, exact_p), strict=True):
        assert (a.double() - b).norm() <= 1e-5 * b.norm()


def test_steps_that_share_kept_memory_do_not_disturb_each_other() -> None:
    """The buffer of one step serves the next; never while a backward may still read it."""
    batches = [
        [t.requires_grad_(t.is_floating_point()) for t in batch(4, 3, 9, seed=i)] for i in (1, 2)
    ]
    expected = [gradients(walked_nca(*b, scale=9.0, keep=False), b[0], b[2]) for b in batches]

    def check(loss: Tensor, i: int, *, retain: bool = False) -> None:
        x, _, p = batches[i]
        got = torch.autograd.grad(loss, (x, p), retain_graph=retain)
        torch.testing.assert_close(got, expected[i], rtol=1e-12, atol=1e-14)

    first, second = (walked_nca(*b, scale=9.0) for b in batches)  # two graphs at once
    check(first, 0, retain=True)
    third = walked_nca(*batches[1], scale=9.0)  # takes over what the first one left
    check(first, 0)  # and the first is read again
    check(second, 1)
    check(third, 1)


def test_memory_left_by_inference_mode_is_not_trained_with() -> None:
    x, positive, p = batch(6, 5, 11, dtype=torch.float32)
    fused_walk.release_workspaces()
    with torch.inference_mode():
        walked_nca(x, positive, p, scale=9.0)
    loss = walked_nca(x, positive, p.requires_grad_(), scale=9.0)
    assert gradients(loss, p)[0].isfinite().all()


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("scale", [1.0, 2000.0])
@pytest.mark.usefixtures("chunk")
def test_gradcheck_of_embeddings_and_proxies(scale: float, keep: bool) -> None:
    x, positive, p = batch(3, 4, 7)
    near = x + 0.01 * p[positive]  # not on the sphere: the kernel must not lean on it
    assert torch.autograd.gradcheck(
        lambda x, p: walked_nca(x, positive, p, scale=scale, keep=keep),
        (near.requires_grad_(), p.requires_grad_()),
        eps=1e-7 if scale > 1 else 1e-6,
        atol=1e-3 * scale**0.5,
        rtol=1e-3,
    )


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("scale", [64.0, 500.0])
def test_worst_placed_point_has_the_right_loss_and_a_gradient(scale: float, keep: bool) -> None:
    """A point opposite every negative (or its own proxy): in float32 naive exponentials vanish."""
    p = torch.tensor([[1.0, 0.0], [-1.0, 1e-3], [-1.0, 0.0]], requires_grad=True)
    x = torch.tensor([[1.0, 0.0], [-1.0, 0.0]], requires_grad=True)
    positive = torch.tensor([0, 0])
    loss = walked_nca(x, positive, p, scale=scale, keep=keep)
    # By hand: first 2·scale below zero, second as much above, each + log 2 for two negatives.
    assert loss.item() == pytest.approx(math.log(2), abs=2e-4)
    each = [walked_nca(x[i : i + 1], positive[:1], p, scale=scale, keep=keep) for i in (0, 1)]
    assert each[0].item() == pytest.approx(-2 * scale + math.log(2), rel=1e-4)
    assert each[1].item() == pytest.approx(2 * scale + math.log(2), rel=1e-4)
    for one in each:
        (grad,) = gradients(one, p)
        assert grad.isfinite().all()
        assert grad.abs().sum() > 0


def test_all_labels_equal_and_duplicate_points() -> None:
    x, _, p = batch(6, 4, 11)
    x = x[:1].repeat(6, 1).requires_grad_()
    p = p[[0, 0, 0, 3, 4, 5, 5, 7, 8, 9, 10]].requires_grad_()
    positive = torch.zeros(6, dtype=torch.long)
    got = walked_nca(x, positive, p, scale=9.0)
    plain = plain_nca(x, positive, p, scale=9.0, include_positive=False)
    torch.testing.assert_close(got, plain)
    torch.testing.assert_close(gradients(got, x, p), gradients(plain, x, p))


def test_zero_proxy_is_treated_as_normalize_does() -> None:
    x, positive, p = batch(5, 4, 6)
    p[2] = 0
    p.requires_grad_()
    got = walked_nca(x, positive, p, scale=9.0)
    logits = 9.0 * x @ normalize(p).T
    others = logits.scatter(1, positive[:, None], -math.inf)
    plain = (others.logsumexp(1) - logits.gather(1, positive[:, None])[:, 0]).mean()
    torch.testing.assert_close(got, plain)
    torch.testing.assert_close(gradients(got, p), gradients(plain, p))


def test_permuting_proxies_with_labels_changes_nothing() -> None:
    x, positive, p = batch(9, 8, 50)
    order = torch.randperm(50, generator=torch.Generator().manual_seed(1))
    loss = walked_nca(x, positive, p, scale=18.0)
    permuted = walked_nca(x, order.argsort()[positive], p[order], scale=18.0)
    torch.testing.assert_close(loss, permuted)


def test_gradients_add_up_over_calls_and_over_a_retained_graph() -> None:
    x, positive, p = batch(9, 8, 50)
    p = torch.nn.Parameter(p)
    walked_nca(x, positive, p, scale=18.0).backward()
    assert p.grad is not None
    once = p.grad.clone()
    loss = walked_nca(x, positive, p, scale=18.0)
    loss.backward(retain_graph=True)
    loss.backward()
    torch.testing.assert_close(p.grad, 3 * once)


def test_lower_precision_embeddings_meet_float32_proxies() -> None:
    x, positive, p = batch(9, 8, 50, dtype=torch.float32)
    half = x.bfloat16().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = fused_proxy_nca(half, positive, p.requires_grad_(), scale=18.0, keep=False)
    loss.backward()
    assert loss.dtype == torch.float32
    expected = fused_proxy_nca(half.float(), positive, p, scale=18.0, keep=False)
    torch.testing.assert_close(loss, expected)
    assert half.grad is not None
    assert half.grad.dtype == torch.bfloat16


@pytest.mark.parametrize("positive", [[0, -1], [0, 3], [0]])
def test_labels_without_a_proxy_are_refused(positive: list[int]) -> None:
    x, _, p = batch(2, 4, 3)
    with pytest.raises(ValueError, match="positive"):
        walked_nca(x, torch.tensor(positive), p, scale=1.0)


def test_one_proxy_has_no_negatives() -> None:
    x, _, p = batch(2, 4, 1)
    positive = torch.zeros(2, dtype=torch.long)
    with pytest.raises(ValueError, match="one proxy"):
        walked_nca(x, positive, p, scale=1.0)
    softmax = walked_nca(x, positive, p, scale=1.0, include_positive=True)
    assert softmax.item() == pytest.approx(0, abs=1e-12)


def test_pays_at_many_proxies_only() -> None:
    assert not pays(32, 100, 64)
    assert not pays(512, 100, 512)
    assert pays(32, 11_318, 64)
    assert small_is_faster(32, 4000)
    assert not small_is_faster(32, 11_318)
    assert not small_is_faster(100_000, 100)  # (B, P) twice would be 80 MB


@pytest.mark.parametrize("loss", [walked_nca, partial(fused_proxy_anchor, margin=0.1)])
def test_the_gradient_is_handed_over_not_copied(loss: Callable[..., Tensor]) -> None:
    x, positive, p = batch(9, 8, 50)
    p = torch.nn.Parameter(p)
    made: list[int] = []
    p.register_hook(lambda grad: made.append(grad.data_ptr()))
    loss(x, positive, p, scale=18.0).backward()
    assert p.grad is not None
    assert made == [p.grad.data_ptr()]
