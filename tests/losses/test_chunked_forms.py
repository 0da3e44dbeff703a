"""The chunked forms against slow loops and the plain forms, at the corners of chunks."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from nofuss.losses import chunked, chunked_forms
from nofuss.losses.chunked import Chunked, Form, Workspace
from nofuss.losses.proxy_anchor import anchor_of_cosines
from nofuss.losses.proxy_loss import proxy_logits
from nofuss.losses.proxy_nca import nca_of_logits
from nofuss.losses.proxy_triplet import triplet_of_logits
from nofuss.proxies.assignment import ProxyTriplets

MARGIN = 0.1
SIZES = (
    (1, 5, 9),  # one anchor
    (4, 3, 2),  # two proxies
    (3, 4, 9),  # a last chunk of one row
    (40, 6, 7),  # more anchors than proxies
    (8, 8, 16),  # whole chunks
)
"""Anchors, dimensions, proxies."""
NCA = ("nca", "softmax", "at once", "softmax at once")
FORMS = (*NCA, "triplet", "anchor")


def chunked_form(name: str, scale: float) -> Form:
    forms: dict[str, Any] = {
        "nca": partial(chunked_forms.nca, scale=scale),
        "softmax": partial(chunked_forms.nca, scale=scale, include_positive=True),
        "at once": chunked_forms.nca_at_once,
        "softmax at once": partial(chunked_forms.nca_at_once, include_positive=True),
        "triplet": partial(chunked_forms.triplet, margin=MARGIN),
        "anchor": partial(chunked_forms.anchor, margin=scale * MARGIN),
    }
    form: Form = forms[name]
    return form


def plain_form(name: str, scale: float) -> Callable[..., Tensor]:
    def plain(x: Tensor, positive: Tensor, p: Tensor, shares: Tensor | None = None) -> Tensor:
        logits, triplets = proxy_logits(x, p, scale), ProxyTriplets(positive)
        if name == "anchor":
            return anchor_of_cosines(logits / scale, triplets, scale=scale, margin=MARGIN)
        if name == "triplet":
            losses = triplet_of_logits(logits, triplets, margin=MARGIN)
        else:
            losses = nca_of_logits(logits, triplets, include_positive="softmax" in name)
        return losses.mean() if shares is None else losses @ shares

    return plain


def in_chunks(
    name: str,
    x: Tensor,
    positive: Tensor,
    p: Tensor,
    *,
    scale: float = 18.0,
    work: Workspace | None = None,
    shares: Tensor | None = None,
) -> Tensor:
    """The chunked form, however few the proxies are."""
    form, plain = chunked_form(name, scale), plain_form(name, scale)
    return Chunked(form, plain, scale, None, work or Workspace())(x, positive, p, shares)


def batch(
    b: int, dim: int, num_proxies: int, *, dtype: torch.dtype = torch.float64, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(b, dim, generator=g, dtype=dtype)
    positive = torch.randint(num_proxies, (b,), generator=g)
    p = torch.randn(num_proxies, dim, generator=g, dtype=dtype)
    return x.requires_grad_(), positive, p.requires_grad_()


def slow_loss(name: str, c: Tensor, positive: list[int], scale: float) -> float:
    """Loops over cosines (B, P)."""
    if name == "anchor":
        pull = push = 0.0
        for z in range(c.shape[1]):
            mine = [float(c[b, z]) for b, y in enumerate(positive) if y == z]
            others = [float(c[b, z]) for b, y in enumerate(positive) if y != z]
            pull += math.log1p(sum(math.exp(-scale * (s - MARGIN)) for s in mine))
            push += math.log1p(sum(math.exp(scale * (s + MARGIN)) for s in others))
        return pull / len(set(positive)) + push / c.shape[1]
    total = 0.0
    for b, y in enumerate(positive):
        logits = [scale * float(s) for s in c[b]]
        others = [v for z, v in enumerate(logits) if "softmax" in name or z != y]
        if name == "triplet":
            total += sum(max(0.0, v - logits[y] + MARGIN) for v in others) / len(others)
        else:
            top = max(others)
            total += top + math.log(sum(math.exp(v - top) for v in others)) - logits[y]
    return total / len(positive)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("chunk", [2**3, 2**6, 2**18])
@pytest.mark.parametrize("kept", [0, 2**8, 2**27], ids=["none kept", "some kept", "all kept"])
def test_equals_the_slow_loop_and_the_plain_gradients(
    name: str, chunk: int, kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunked, "CHUNK", chunk)
    monkeypatch.setattr(chunked_forms, "KEEP_BYTES", kept)
    for size in SIZES:
        for scale in (1.0, 18.0, 300.0):
            x, positive, p = batch(*size)
            loss = in_chunks(name, x, positive, p, scale=scale)
            cosines = F.normalize(x.detach()) @ F.normalize(p.detach()).T
            expected = slow_loss(name, cosines, positive.tolist(), scale)
            assert loss.item() == pytest.approx(expected, rel=1e-9, abs=1e-9)
            plain = plain_form(name, scale)(x, positive, p)
            # Times three: what comes back from above is not always 1.
            found, wanted = (torch.autograd.grad(3 * each, (x, p)) for each in (loss, plain))
            torch.testing.assert_close(found, wanted, rtol=1e-8, atol=1e-10)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("scale", [18.0, 64.0, 300.0])  # float32's exponents end at 85
@pytest.mark.parametrize("size", [(32, 64, 5001), (64, 16, 999), (1, 128, 3001)])
def test_float32_is_within_1e_5_of_double(
    size: tuple[int, int, int], scale: float, name: str
) -> None:
    x, positive, p = batch(*size, dtype=torch.float32)
    found = in_chunks(name, x, positive, p, scale=scale)
    exact_x, exact_p = (t.detach().double().requires_grad_() for t in (x, p))
    exact = plain_form(name, scale)(exact_x, positive, exact_p)
    assert found.dtype is torch.float32
    assert found.item() == pytest.approx(exact.item(), rel=1e-5, abs=1e-5)
    both = torch.autograd.grad(found, (x, p)), torch.autograd.grad(exact, (exact_x, exact_p))
    for a, b in zip(*both, strict=True):
        assert (a.double() - b).norm() <= 1e-5 * b.norm()


@pytest.mark.parametrize("name", NCA)
@pytest.mark.parametrize("scale", [64.0, 500.0])
def test_worst_placed_point_has_the_right_loss_and_a_gradient(scale: float, name: str) -> None:
    """A point opposite every negative (or its own proxy): in float32 naive exponentials vanish."""
    p = torch.tensor([[1.0, 0.0], [-1.0, 1e-3], [-1.0, 0.0]], requires_grad=True)
    x = torch.tensor([[1.0, 0.0], [-1.0, 0.0]])
    far, near = (in_chunks(name, x[i : i + 1], torch.tensor([0]), p, scale=scale) for i in (1, 0))
    # By hand: 2·scale apart, + log 2 for two negatives; the softmax form never falls below zero.
    assert far.item() == pytest.approx(2 * scale + math.log(2), rel=1e-4)
    if "softmax" not in name:
        assert near.item() == pytest.approx(-2 * scale + math.log(2), rel=1e-4)
    (grad,) = torch.autograd.grad(far, p)
    assert grad.isfinite().all()
    assert grad.abs().sum() > 0


@pytest.mark.parametrize("name", FORMS)
def test_equal_labels_duplicates_and_zero_rows(name: str) -> None:
    x, _, p = batch(6, 4, 11)
    x, p = x.detach()[[0, 0, 1, 1, 2, 2]], p.detach()[[0, 0, 0, 3, 4, 5, 5, 7, 8, 9, 10]]
    x[2] = p[4] = p[0] = 0
    x, p, positive = x.requires_grad_(), p.requires_grad_(), torch.tensor([0, 0, 0, 0, 3, 0])
    loss, plain = in_chunks(name, x, positive, p), plain_form(name, 18.0)(x, positive, p)
    torch.testing.assert_close(loss, plain)
    torch.testing.assert_close(
        torch.autograd.grad(loss, (x, p)), torch.autograd.grad(plain, (x, p))
    )
