"""The shell of losses over proxies: options, refusals, precision, state, reductions."""

import doctest
import inspect
import math
import pydoc
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

import nofuss
from nofuss import ProxyAnchor, ProxyNCAPlusPlus
from nofuss.losses import PROXY_LOSSES
from nofuss.losses.proxy_loss import ProxyLoss, ProxyOptions, proxy_logits
from nofuss.losses.proxy_nca import ProxyNCA
from nofuss.losses.proxy_triplet import ProxyTriplet
from nofuss.losses.soft_triple import SoftTriple
from nofuss.proxies.assignment import Dynamic, Fractional, ProxyTriplets, Several, Static


def test_one_float32_parameter_named_proxies() -> None:
    for loss in PROXY_LOSSES.values():
        criterion = loss(6, 3)
        assert [name for name, _ in criterion.named_parameters()] == ["proxies"]
        assert criterion.proxies.dtype is torch.float32
        rows = 60 if loss is SoftTriple else 6
        assert criterion.proxies.shape == (rows, 3)


@pytest.mark.parametrize(
    ("proxies_per_class", "name", "rows"),
    [(1, "static", 10), (0.5, "fractional", 5), (0.31, "fractional", 3), (2.5, "several", 25)],
)
def test_ratio_chooses_the_assignment(proxies_per_class: float, name: str, rows: int) -> None:
    criterion = ProxyNCA(10, 3, proxies_per_class=proxies_per_class)
    assert criterion.assignment.name == name
    assert criterion.proxies.shape == (rows, 3)


def test_seed_fixes_the_proxies_and_the_deal() -> None:
    a, b, c = (ProxyNCA(20, 3, proxies_per_class=0.5, seed=s) for s in (1, 1, 2))
    for key, value in a.state_dict().items():
        assert torch.equal(value, b.state_dict()[key])
        assert not torch.equal(value, c.state_dict()[key])


def test_without_a_seed_the_global_generator_decides() -> None:
    torch.manual_seed(3)
    a = ProxyNCA(20, 3)
    torch.manual_seed(3)
    assert torch.equal(ProxyNCA(20, 3).proxies, a.proxies)
    assert not torch.equal(ProxyNCA(20, 3).proxies, a.proxies)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_classes": 1}, "two classes or more"),
        ({"num_classes": 0}, "two classes or more"),
        ({"dim": 0}, "dim from 1 up"),
        ({"proxies_per_class": 0}, "expected above 0"),
        ({"proxies_per_class": math.nan}, "expected above 0"),
        ({"proxies_per_class": 0.1}, "is one proxy; a positive and a negative need two"),
        ({"scale": 0}, "expected above 0"),
        ({"scale": -18}, "expected above 0"),
        ({"scale": math.inf}, "expected above 0"),
        ({"assignment": "nearest"}, "choose from 'static', 'dynamic', 'matched', 'balanced'"),
        ({"assignment": Static(5)}, "made for 5 classes but the loss for 4"),
        ({"assignment": Fractional(5, 3)}, "made for 5 classes but the loss for 4"),
        ({"assignment": Several(3, 9)}, "made for 3 classes but the loss for 4"),
    ],
)
def test_options_that_do_not_fit(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ProxyNCA(**{"num_classes": 4, "dim": 5, **options})  # type: ignore[arg-type]


def test_what_goes_with_what() -> None:
    for name, loss in PROXY_LOSSES.items():
        if name == "soft-triple":
            continue  # takes no assignment: every class has its own centers
        for assignment in (Static(4), Fractional(4, 2), Several(4, 9), Dynamic(6)):
            if assignment.name in loss.takes:
                loss(4, 5, assignment=assignment)
            else:
                with pytest.raises(ValueError, match=f"does not take {assignment.name}"):
                    loss(4, 5, assignment=assignment)


def test_fixed_norms_are_the_free_ones_of_rescaled_vectors(
    batch: tuple[Tensor, Tensor], proxies: Tensor
) -> None:
    x = batch[0]
    n_x, n_p = 2.0, 5.0
    fixed = proxy_logits(x, proxies, 2 * n_x * n_p)
    free = proxy_logits(
        n_x * x / x.norm(dim=1, keepdim=True),
        n_p * proxies / proxies.norm(dim=1, keepdim=True),
        None,
    )
    torch.testing.assert_close(free + n_x**2 + n_p**2, fixed)


def test_proxies_in_the_batch_s_precision_stay_as_they_are(batch: tuple[Tensor, Tensor]) -> None:
    criterion = ProxyNCA(4, 5, seed=0)
    assert criterion(*batch).dtype is torch.float64  # a double batch is not rounded
    assert criterion.proxies.dtype is torch.float32


def test_labels_or_triplets_but_not_both_nor_neither(batch: tuple[Tensor, Tensor]) -> None:
    x, labels = batch
    criterion = ProxyNCA(4, 5, assignment="dynamic")
    with pytest.raises(ValueError, match="one of the two"):
        criterion(x, labels, positives=x, negatives=x)
    for given in ({}, {"positives": x}, {"negatives": x}):
        with pytest.raises(ValueError, match="negatives="):
            criterion(x, **given)


@pytest.mark.parametrize("proxies_per_class", [0.5, 1, 2])
def test_bare_triplets_need_dynamic_assignment(
    batch: tuple[Tensor, Tensor], proxies_per_class: float
) -> None:
    x = batch[0]
    criterion = ProxyNCA(4, 5, proxies_per_class=proxies_per_class)
    with pytest.raises(ValueError, match="assignment='dynamic'"):
        criterion(x, positives=x, negatives=x)


def test_triplets_of_other_shapes_are_refused(batch: tuple[Tensor, Tensor]) -> None:
    x = batch[0]
    criterion = ProxyNCA(4, 5, assignment="dynamic")
    for y, z in [
        (x[:-1], x),
        (x, x[:-1]),
        (x, x[:, None, :4]),
        (x, x[:, None][:, :0]),  # no negative at all
        (x, x[0]),
        (x, x[:, None, None]),
    ]:
        with pytest.raises(ValueError, match=r"expected \(B, D\), \(B, D\) and"):
            criterion(x, positives=y, negatives=z)


def test_a_miner_is_refused(batch: tuple[Tensor, Tensor]) -> None:
    with pytest.raises(ValueError, match="mined"):
        ProxyNCA(4, 5)(*batch, (batch[1],) * 3)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"proxies_per_class": 0.5},
        {"proxies_per_class": 2.25},
        {"proxies_per_class": 2, "assignment": "dynamic"},
    ],
    ids=str,
)
def test_state_dict_round_trip(
    batch: tuple[Tensor, Tensor], options: dict[str, object], tmp_path: Path
) -> None:
    before = ProxyNCA(4, 5, seed=1, **options)  # type: ignore[arg-type]
    after = ProxyNCA(4, 5, seed=2, **options)  # type: ignore[arg-type]
    before(*batch)  # counts, with dynamic assignment
    save_file(before.state_dict(), tmp_path / "loss.safetensors")
    after.load_state_dict(load_file(tmp_path / "loss.safetensors"))
    for key, value in before.state_dict().items():
        assert torch.equal(after.state_dict()[key], value)
    assert torch.equal(after(*batch), before(*batch))
    assert torch.equal(after.assign(*batch), before.assign(*batch))


def test_a_loss_needs_no_more_than_its_formula() -> None:
    class Nearest(ProxyLoss):
        def _losses(self, x: Tensor, p: Tensor, triplets: ProxyTriplets) -> Tensor:
            return 1 - (x * p[triplets.positive]).sum(1)

    x, labels = torch.randn(256, 64, requires_grad=True), torch.arange(256)
    for classes in (256, 2000):  # from 500 on, others compute in chunks
        loss = Nearest(classes, 64, scale=1.0, seed=0)(x, labels)
        (gradient,) = torch.autograd.grad(loss, x)
        assert gradient.isfinite().all()
    with pytest.raises(ValueError, match="no fused form"):
        Nearest(9, 64, scale=1.0, fused=True)


@pytest.mark.parametrize("name", PROXY_LOSSES)
def test_help_shows_the_options(name: str) -> None:
    text = pydoc.render_doc(PROXY_LOSSES[name], renderer=pydoc.plaintext)
    described = inspect.getdoc(PROXY_LOSSES[name]) or ""
    own = set(inspect.signature(PROXY_LOSSES[name]).parameters) - {"options"}
    for option in own | ProxyOptions.__optional_keys__:
        assert f"{option}: " in text
        assert f"\n{option}: " in described


@pytest.mark.parametrize("name", PROXY_LOSSES)
def test_the_example_of_the_help_runs(name: str) -> None:
    names = {"nofuss": nofuss, "torch": torch}
    (example,) = doctest.DocTestFinder(recurse=False).find(PROXY_LOSSES[name], globs=names)
    assert example.examples
    failed, _ = doctest.DocTestRunner().run(example)
    assert failed == 0


@pytest.mark.parametrize("name", PROXY_LOSSES)
def test_given_proxies_are_copied(name: str, batch: tuple[Tensor, Tensor]) -> None:
    x, labels = batch
    loss = PROXY_LOSSES[name]
    drawn = loss(4, x.shape[1], seed=3)
    given = drawn.proxies.detach().double().requires_grad_()
    criterion = loss(4, x.shape[1], proxies=given)
    assert criterion.proxies.dtype is torch.float32
    assert torch.equal(criterion.proxies, drawn.proxies)
    assert torch.equal(criterion(x, labels), drawn(x, labels))
    criterion(x, labels).backward()
    assert given.grad is None
    with torch.no_grad():
        criterion.proxies.zero_()
    assert torch.equal(given, drawn.proxies.double())


def test_given_proxies_leave_the_deal_to_the_seed() -> None:
    drawn = ProxyNCA(20, 3, proxies_per_class=0.5, seed=1)
    state = torch.get_rng_state()
    given = ProxyNCA(20, 3, proxies_per_class=0.5, seed=1, proxies=torch.eye(10, 3))
    assert torch.equal(torch.get_rng_state(), state)
    assert isinstance(drawn.assignment, Fractional)
    assert isinstance(given.assignment, Fractional)
    assert torch.equal(given.assignment.proxy_of_label, drawn.assignment.proxy_of_label)


@pytest.mark.parametrize(
    ("proxies", "message"),
    [
        (torch.zeros(3, 5), r"\(3, 5\) torch.float32; expected \(4, 5\) floating point: pass one"),
        (torch.zeros(4, 6), r"expected \(4, 5\)"),
        (torch.zeros(20), r"expected \(4, 5\)"),
        (torch.zeros(4, 5, dtype=torch.int64), "torch.int64; expected"),
        (torch.full((4, 5), math.nan), "proxies hold NaN or infinity"),
    ],
)
def test_given_proxies_that_do_not_fit(proxies: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ProxyNCA(4, 5, proxies=proxies)


# reduction, weights, label smoothing and logits


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


def separable(name: str, reduction: str) -> ProxyLoss:
    loss, options = SEPARABLE[name]
    if reduction == "none":
        options = {k: v for k, v in options.items() if k != "fused"}
    return loss(4, 5, seed=0, reduction=reduction, **options).double()


@pytest.mark.parametrize("name", SEPARABLE)
def test_each_mean_and_sum(batch: tuple[Tensor, Tensor], name: str) -> None:
    each, mean, total = (separable(name, r)(*batch) for r in ("none", "mean", "sum"))
    assert each.shape == (12,)
    torch.testing.assert_close(mean, each.mean())
    torch.testing.assert_close(total, each.sum())
    alone = separable(name, "mean")
    for i in range(12):
        torch.testing.assert_close(each[i], alone(batch[0][i : i + 1], batch[1][i : i + 1]))


@pytest.mark.parametrize("name", SEPARABLE)
def test_whole_weights_are_repetitions(batch: tuple[Tensor, Tensor], name: str) -> None:
    x, labels = batch[0].requires_grad_(), batch[1]
    times = torch.tensor([1, 2, 0, 3, 1, 1, 2, 0, 1, 1, 4, 1])
    rows = torch.repeat_interleave(torch.arange(12), times)
    for reduction in ("mean", "sum"):
        criterion = separable(name, reduction)
        inputs = x, criterion.proxies
        weighted, repeated = criterion(x, labels, weights=times), criterion(x[rows], labels[rows])
        torch.testing.assert_close(weighted, repeated)
        found, right = (torch.autograd.grad(loss, inputs) for loss in (weighted, repeated))
        torch.testing.assert_close(found, right)
    each = separable(name, "none")
    torch.testing.assert_close(each(x, labels, weights=times), each(x, labels) * times)
    scaled = separable(name, "mean")
    torch.testing.assert_close(
        scaled(x, labels, weights=0.5 * times), scaled(x, labels, weights=times)
    )


@pytest.mark.parametrize("name", SEPARABLE)
def test_weights_can_be_learned(batch: tuple[Tensor, Tensor], name: str) -> None:
    criterion = separable(name, "sum")
    weights = torch.linspace(0.1, 2, 12, dtype=torch.double, requires_grad=True)
    (gradient,) = torch.autograd.grad(criterion(*batch, weights=weights), weights)
    torch.testing.assert_close(gradient, separable(name, "none")(*batch))


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


@pytest.mark.parametrize("share", [0.1, 0.5])
def test_label_smoothing_is_cross_entropy_s(batch: tuple[Tensor, Tensor], share: float) -> None:
    x, labels = batch
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


def test_reductions_and_weights_that_are_refused(batch: tuple[Tensor, Tensor]) -> None:
    x, labels = batch
    with pytest.raises(ValueError, match="'mean'"):
        ProxyNCA(4, 5, reduction="average")
    with pytest.raises(ValueError, match=r"ProxyAnchor .*reduction='none'"):
        ProxyAnchor(4, 5, reduction="none")
    with pytest.raises(ValueError, match=r"ProxyAnchor .*weights"):
        ProxyAnchor(4, 5)(x, labels, weights=torch.ones(12))
    with pytest.raises(ValueError, match=r"no fused form"):
        ProxyNCA(4, 5, reduction="none", fused=True)
    with pytest.raises(ValueError, match="label_smoothing"):
        ProxyNCAPlusPlus(4, 5, label_smoothing=0.1, fused=True)
    criterion = ProxyNCA(4, 5)
    with pytest.raises(ValueError, match=r"expected \(12,\) numbers"):
        criterion(x, labels, weights=torch.ones(11))
    for weights in (-torch.ones(12), torch.zeros(12), torch.full((12,), torch.nan)):
        with pytest.raises(ValueError, match="from 0 up"):
            criterion(x, labels, weights=weights)
    with pytest.raises(ValueError, match="leave ref_emb out"):
        criterion(x, labels, None, x, labels)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_weights_in_half_precision_are_summed_in_single(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x, labels = torch.randn(64, 8, generator=generator), torch.arange(64) % 9
    weights = (1000 + 3000 * torch.rand(64, generator=generator)).to(dtype)  # 65,504 is the largest
    expected = ProxyNCA(9, 8, seed=0)(x, labels, weights=weights.float())
    assert ProxyNCA(9, 8, seed=0)(x, labels, weights=weights) == expected
