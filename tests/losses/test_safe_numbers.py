"""Odd batches and few bits: a right loss, a documented zero or a clear error, never NaN."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from nofuss.losses import INSTANCE_LOSSES, PROXY_LOSSES
from nofuss.losses.nca import NCA
from nofuss.losses.proxy_anchor import ProxyAnchor
from nofuss.losses.proxy_loss import ProxyLoss
from nofuss.losses.proxy_nca import ProxyNCA, ProxyNCAPlusPlus
from nofuss.losses.proxy_triplet import ProxyTriplet
from nofuss.losses.ranking import Ranking
from nofuss.losses.soft_triple import SoftTriple

OVER_PROXIES: dict[str, Callable[[], nn.Module]] = {
    **{name: lambda loss=loss: loss(4, 5, seed=0) for name, loss in PROXY_LOSSES.items()},
    "free norms": lambda: ProxyNCA(4, 5, scale=None, seed=0),
    "fractional": lambda: ProxyNCA(4, 5, proxies_per_class=0.5, seed=0),
    "several": lambda: ProxyNCA(4, 5, proxies_per_class=2.5, seed=0),
    "dynamic": lambda: ProxyNCA(4, 5, assignment="dynamic", seed=0),
    "dynamic triplet": lambda: ProxyTriplet(4, 5, assignment="dynamic", seed=0),
}
OVER_INSTANCES: dict[str, Callable[[], nn.Module]] = {
    **INSTANCE_LOSSES,
    "nca, free norms": lambda: NCA(scale=None),
}
EVERY = {**OVER_PROXIES, **OVER_INSTANCES}
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


def test_worst_placed_triplet_at_scale_64() -> None:
    x = torch.tensor([[1.0, 0.0], [-1.0, 0.01], [1.0, 0.01]], requires_grad=True)
    loss = NCA(scale=64)(x, torch.tensor([0, 0, 1]))
    x64 = x.detach().double().requires_grad_()
    right = NCA(scale=64)(x64, torch.tensor([0, 0, 1]))
    torch.testing.assert_close(loss.double(), right, rtol=1e-5, atol=0)
    ours, exact = gradients(loss, x)[0].double(), gradients(right, x64)[0]
    assert exact.norm() > 0.1
    torch.testing.assert_close(ours, exact, rtol=1e-4, atol=1e-4)


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


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32])
@pytest.mark.parametrize("name", EVERY)
def test_labels_of_any_whole_type(
    batch: tuple[Tensor, Tensor], name: str, dtype: torch.dtype
) -> None:
    x, labels = batch
    criterion = EVERY[name]()
    torch.testing.assert_close(criterion(x, labels.to(dtype)), criterion(x, labels))


@pytest.mark.parametrize("name", [*EVERY, "ranking"])
def test_what_is_no_batch_is_refused(batch: tuple[Tensor, Tensor], name: str) -> None:
    x, labels = batch
    criterion = EVERY[name]() if name in EVERY else Ranking()
    for dtype in (torch.float32, torch.bool, torch.complex64):
        with pytest.raises(ValueError, match="expected int64 class numbers"):
            criterion(x, labels.to(dtype))
    with pytest.raises(ValueError, match="one a row"):
        criterion(x, labels[:-1])
    with pytest.raises(ValueError, match="one a row"):
        criterion(x, labels[:, None])
    with pytest.raises(ValueError, match="embeddings are empty"):
        criterion(x[:0], labels[:0])
    with pytest.raises(ValueError, match="expected \\(batch, dim\\) floating point"):
        criterion(x[0], labels)
    with pytest.raises(ValueError, match="expected \\(batch, dim\\) floating point"):
        criterion(x.long(), labels)


@pytest.mark.parametrize("name", OVER_PROXIES)
def test_labels_beyond_the_proxies_are_refused(batch: tuple[Tensor, Tensor], name: str) -> None:
    x, labels = batch
    criterion = OVER_PROXIES[name]()
    with pytest.raises(ValueError, match="labels reach 4 but there are 4 classes"):
        criterion(x, labels + 1)  # counted from one
    with pytest.raises(ValueError, match="labels go down to -1"):
        criterion(x, labels - 1)
    with pytest.raises(ValueError, match="embeddings have 4 columns but the proxies have dim 5"):
        criterion(x[:, :4], labels)


@pytest.mark.parametrize("name", [*OVER_INSTANCES, "dynamic", "dynamic triplet"])
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


@pytest.mark.parametrize("name", [n for n in OVER_PROXIES if "dynamic" not in n])
def test_one_item_is_enough_for_proxies(batch: tuple[Tensor, Tensor], name: str) -> None:
    x = batch[0][:1].float().requires_grad_()
    criterion = OVER_PROXIES[name]()
    criterion(x, torch.tensor([3])).backward()
    assert x.grad is not None
    assert x.grad.any()


COORDINATES = st.sampled_from([0.0, 0.0, 1.0, -1.0, 0.5, 1e-20, 1e-4, 3e3, -3e3])


@settings(max_examples=300, deadline=None, derandomize=True)
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


def test_no_global_seeding() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    np_state = np.random.get_state()[1].tolist()  # noqa: NPY002
    for name in OVER_PROXIES:
        assert isinstance(OVER_PROXIES[name](), ProxyLoss)
    assert torch.equal(torch.rand(3), expected)
    assert np.random.get_state()[1].tolist() == np_state  # noqa: NPY002
