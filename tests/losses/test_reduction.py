"""reduction, weights, label smoothing and logits of the losses over proxies."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from nofuss import ProxyAnchor, ProxyNCA, ProxyNCAPlusPlus, ProxyTriplet, SoftTriple
from nofuss.losses.proxy_loss import ProxyLoss

SEPARABLE: dict[str, tuple[type[ProxyLoss], dict[str, Any]]] = {
    "nca": (ProxyNCA, {}),
    "nca, plain": (ProxyNCA, {"fused": False}),
    "nca, several": (ProxyNCA, {"proxies_per_class": 2.5}),
    "softmax": (ProxyNCAPlusPlus, {}),
    "softmax, smoothed": (ProxyNCAPlusPlus, {"label_smoothing": 0.2}),
    "triplet": (ProxyTriplet, {"margin": 1}),
    "triplet, fused": (ProxyTriplet, {"margin": 1, "fused": True}),
    "soft triple": (SoftTriple, {"proxies_per_class": 2}),
}
DYNAMIC = {"assignment": "dynamic", "proxies_per_class": 2}


def make(name: str, reduction: str) -> ProxyLoss:
    loss, options = SEPARABLE[name]
    if reduction == "none":
        options = {k: v for k, v in options.items() if k != "fused"}
    return loss(4, 5, seed=0, reduction=reduction, **options).double()


@pytest.mark.parametrize("name", SEPARABLE)
def test_each_mean_and_sum(batch: tuple[Tensor, Tensor], name: str) -> None:
    each, mean, total = (make(name, r)(*batch) for r in ("none", "mean", "sum"))
    assert each.shape == (12,)
    torch.testing.assert_close(mean, each.mean())
    torch.testing.assert_close(total, each.sum())
    alone = make(name, "mean")
    for i in range(12):
        torch.testing.assert_close(each[i], alone(batch[0][i : i + 1], batch[1][i : i + 1]))


@pytest.mark.parametrize("name", SEPARABLE)
def test_whole_weights_are_repetitions(batch: tuple[Tensor, Tensor], name: str) -> None:
    x, labels = batch[0].requires_grad_(), batch[1]
    times = torch.tensor([1, 2, 0, 3, 1, 1, 2, 0, 1, 1, 4, 1])
    rows = torch.repeat_interleave(torch.arange(12), times)
    for reduction in ("mean", "sum"):
        criterion = make(name, reduction)
        inputs = x, criterion.proxies
        weighted, repeated = criterion(x, labels, weights=times), criterion(x[rows], labels[rows])
        torch.testing.assert_close(weighted, repeated)
        found, right = (torch.autograd.grad(loss, inputs) for loss in (weighted, repeated))
        torch.testing.assert_close(found, right)
    each = make(name, "none")
    torch.testing.assert_close(each(x, labels, weights=times), each(x, labels) * times)
    scaled = make(name, "mean")
    torch.testing.assert_close(
        scaled(x, labels, weights=0.5 * times), scaled(x, labels, weights=times)
    )


@pytest.mark.parametrize("name", SEPARABLE)
def test_weights_can_be_learned(batch: tuple[Tensor, Tensor], name: str) -> None:
    criterion = make(name, "sum")
    weights = torch.linspace(0.1, 2, 12, dtype=torch.double, requires_grad=True)
    (gradient,) = torch.autograd.grad(criterion(*batch, weights=weights), weights)
    torch.testing.assert_close(gradient, make(name, "none")(*batch))


@pytest.mark.parametrize("loss", [ProxyNCA, ProxyNCAPlusPlus, ProxyTriplet])
def test_many_proxies_take_weights_too(loss: type[ProxyLoss]) -> None:
    x = torch.randn(6, 5, dtype=torch.double, generator=torch.Generator().manual_seed(0))
    x, labels = x.requires_grad_(), torch.tensor([0, 1, 6999, 3, 1, 2])
    weights = torch.tensor([0.5, 0, 2, 1, 1, 3])
    found = []
    for fused in (True, False):
        criterion = loss(7000, 5, seed=0, fused=fused).double()
        value = criterion(x, labels, weights=weights)
        found.append((value, *torch.autograd.grad(value, (x, criterion.proxies))))
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("loss", [ProxyNCA, ProxyTriplet])
def test_dynamic_assignment_gives_each_embedding_the_mean_of_its_triplets(
    batch: tuple[Tensor, Tensor], loss: type[ProxyLoss]
) -> None:
    x, labels = batch
    each, mean, total = (
        loss(4, 5, seed=0, reduction=r, **DYNAMIC).double()(x, labels)
        for r in ("none", "mean", "sum")
    )
    assert each.shape == (12,)
    torch.testing.assert_close(total, each.sum())
    positives = torch.bincount(labels)[labels] - 1  # as many triplets as that, if none is empty
    torch.testing.assert_close(mean, (each * positives).sum() / positives.sum())
    criterion = loss(4, 5, seed=0, **DYNAMIC).double()
    torch.testing.assert_close(criterion(x, labels, weights=torch.ones(12)), mean)
    lone = loss(4, 5, seed=0, reduction="none", **DYNAMIC).double()
    assert lone(x[:4], torch.arange(4)).tolist() == [0, 0, 0, 0]


def test_anchors_of_bare_triplets_have_weights(batch: tuple[Tensor, Tensor]) -> None:
    x = batch[0]
    given = {"positives": x.flip(0), "negatives": x.roll(3, 0)}
    each = ProxyNCA(4, 5, seed=0, reduction="none", **DYNAMIC).double()(x, **given)
    weights = torch.arange(12)
    mean = ProxyNCA(4, 5, seed=0, **DYNAMIC).double()(x, **given, weights=weights)
    counted = (each != 0).double() * weights
    torch.testing.assert_close(mean, (each * weights).sum() / counted.sum())


@pytest.mark.parametrize("share", [0.1, 0.5])
def test_label_smoothing_is_cross_entropy_s(batch: tuple[Tensor, Tensor], share: float) -> None:
    x, labels = batch
    criterion = ProxyNCAPlusPlus(4, 5, label_smoothing=share, seed=0).double()
    expected = F.cross_entropy(criterion.logits(x), labels, label_smoothing=share)
    torch.testing.assert_close(criterion(x, labels), expected)
    centers = SoftTriple(4, 5, label_smoothing=share, margin=0, tau=0, seed=0).double()
    assert centers.logits(x).shape == (12, 4)
    expected = F.cross_entropy(centers.logits(x), labels, label_smoothing=share)
    torch.testing.assert_close(centers(x, labels), expected)


def test_logits_are_scaled_cosines_or_minus_squared_distances(batch: tuple[Tensor, Tensor]) -> None:
    x = batch[0]
    criterion = ProxyNCA(4, 5, seed=0, proxies_per_class=2).double()
    cosines = F.cosine_similarity(x[:, None], criterion.proxies, dim=2)
    torch.testing.assert_close(criterion.logits(x), 18 * cosines)
    free = ProxyNCA(4, 5, seed=0, scale=None).double()
    torch.testing.assert_close(free.logits(x), -torch.cdist(x, free.proxies).square())
    # The nearest proxy's label is a classifier.
    assert (criterion.logits(criterion.proxies).argmax(1) == torch.arange(8)).all()


def test_what_is_refused(batch: tuple[Tensor, Tensor]) -> None:
    x, labels = batch
    with pytest.raises(ValueError, match="choose from 'mean', 'sum', 'none'"):
        ProxyNCA(4, 5, reduction="average")
    with pytest.raises(ValueError, match="ProxyAnchor has no reduction='none': it sums"):
        ProxyAnchor(4, 5, reduction="none")
    with pytest.raises(ValueError, match="ProxyAnchor takes no weights: it sums"):
        ProxyAnchor(4, 5)(x, labels, weights=torch.ones(12))
    with pytest.raises(ValueError, match="no fused form"):
        ProxyNCA(4, 5, reduction="none", fused=True)
    with pytest.raises(ValueError, match="label_smoothing has no fused"):
        ProxyNCAPlusPlus(4, 5, label_smoothing=0.1, fused=True)
    criterion = ProxyNCA(4, 5)
    with pytest.raises(ValueError, match=r"expected \(12,\) numbers"):
        criterion(x, labels, weights=torch.ones(11))
    for weights in (-torch.ones(12), torch.zeros(12), torch.full((12,), torch.nan)):
        with pytest.raises(ValueError, match="expected numbers from 0 up"):
            criterion(x, labels, weights=weights)
    with pytest.raises(ValueError, match="leave ref_emb out"):
        criterion(x, labels, None, x, labels)


@pytest.mark.parametrize("name", SEPARABLE)
def test_weights_do_not_change_the_precision(batch: tuple[Tensor, Tensor], name: str) -> None:
    x, labels = batch[0].half(), batch[1]
    weights = torch.linspace(0.1, 3, 12, dtype=torch.double)
    criterion = make(name, "mean").float()
    found = criterion(x, labels, weights=weights)
    assert found.dtype is torch.float32
    torch.testing.assert_close(found, criterion(x.float(), labels, weights=weights.float()))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_weights_in_half_precision_are_summed_in_single(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x, labels = torch.randn(64, 8, generator=generator), torch.arange(64) % 9
    weights = (1000 + 3000 * torch.rand(64, generator=generator)).to(dtype)  # 65,504 is the largest
    expected = ProxyNCA(9, 8, seed=0)(x, labels, weights=weights.float())
    assert ProxyNCA(9, 8, seed=0)(x, labels, weights=weights) == expected
