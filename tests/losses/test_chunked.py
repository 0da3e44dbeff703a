"""The one autograd function of chunked losses, its workspace, and when a criterion uses it."""

import copy
import gc
import pickle
import weakref

import pytest
import torch
from torch import Tensor

from nofuss import ProxyAnchor, ProxyNCA, ProxyNCAPlusPlus, ProxyTriplet, SoftTriple
from nofuss.losses import chunked
from nofuss.losses.chunked import Workspace, pays
from nofuss.losses.chunked_forms import at_once_is_faster
from nofuss.losses.proxy_loss import ProxyLoss
from tests.losses.test_chunked_forms import FORMS, batch, in_chunks

FUSIBLE = (ProxyNCA, ProxyNCAPlusPlus, ProxyTriplet, ProxyAnchor)


def step(criterion: ProxyLoss, x: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
    """In double, where rounding can't hide or fake a difference."""
    criterion, x = criterion.double(), x.double().requires_grad_()
    loss = criterion(x, labels)
    return loss, *torch.autograd.grad(loss, (x, criterion.proxies))


@pytest.mark.parametrize("loss", FUSIBLE)
@pytest.mark.parametrize("ratio", [1.0, 0.5])
@pytest.mark.parametrize("classes", [3, 50, 7000])
def test_a_criterion_s_chunked_form_gives_the_plain_one_s_values_and_gradients(
    loss: type[ProxyLoss], ratio: float, classes: int
) -> None:
    x, labels = torch.randn(7, 5), torch.tensor([0, 1, 1, 2, 0, 0, 2])
    x[2] = x[1]
    x[3] = 0
    options = {"seed": 1, "proxies_per_class": ratio}
    found = [step(loss(classes, 5, fused=f, **options), x, labels) for f in (True, False)]  # type: ignore[arg-type]
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", FORMS)
def test_the_gradient_is_handed_over_not_copied(name: str) -> None:
    x, positive, p = batch(9, 8, 50)
    p, made = torch.nn.Parameter(p), []
    p.register_hook(lambda grad: made.append(grad.data_ptr()))
    in_chunks(name, x, positive, p).backward()
    assert p.grad is not None
    assert made == [p.grad.data_ptr()]


@pytest.mark.parametrize("name", FORMS)
def test_gradients_add_up_over_calls_and_over_a_retained_graph(name: str) -> None:
    x, positive, p = batch(9, 8, 50)
    in_chunks(name, x, positive, p).backward()
    assert p.grad is not None
    once = p.grad.clone()
    loss = in_chunks(name, x, positive, p)
    with torch.no_grad():
        torch.testing.assert_close(in_chunks(name, x, positive, p), loss.detach())
    loss.backward(retain_graph=True)
    loss.backward()
    torch.testing.assert_close(p.grad, 3 * once)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("name", FORMS)
def test_only_the_gradients_that_are_needed(name: str) -> None:
    x, positive, p = batch(9, 8, 50)
    both = torch.autograd.grad(in_chunks(name, x, positive, p), (x, p))
    (dx,) = torch.autograd.grad(in_chunks(name, x, positive, p.detach()), x)
    (dp,) = torch.autograd.grad(in_chunks(name, x.detach(), positive, p), p)
    torch.testing.assert_close((dx, dp), both)


@pytest.mark.usefixtures("threads")
def test_steps_that_share_a_workspace_do_not_disturb_each_other() -> None:
    """The buffer of one step serves the next; never while a backward may still read it."""
    batches, work = [batch(4, 3, 9, seed=i) for i in (1, 2)], Workspace()

    def gradients(i: int, loss: Tensor, *, retain: bool = False) -> tuple[Tensor, ...]:
        x, _, p = batches[i]
        return torch.autograd.grad(loss, (x, p), retain_graph=retain)

    expected = [gradients(i, in_chunks("nca", *batches[i])) for i in (0, 1)]
    first, second = (in_chunks("nca", *b, work=work) for b in batches)  # two graphs at once
    assert torch.equal(gradients(0, first, retain=True)[0], expected[0][0])
    third = in_chunks("nca", *batches[1], work=work)  # takes over what the first one left
    for i, loss in ((0, first), (1, second), (1, third)):
        torch.testing.assert_close(gradients(i, loss), expected[i], rtol=1e-12, atol=1e-14)


@pytest.mark.usefixtures("threads")
def test_memory_of_inference_mode_is_not_trained_with() -> None:
    x, positive, p = batch(6, 5, 11)
    work = Workspace()
    with torch.inference_mode():
        in_chunks("nca", x, positive, p, work=work)
    assert torch.autograd.grad(in_chunks("nca", x, positive, p, work=work), p)[0].isfinite().all()


@pytest.mark.usefixtures("threads")
def test_nothing_of_a_step_waits_for_the_garbage_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    walks: list[weakref.ref[chunked.Walk]] = []
    prepare = chunked.Walk.__init__

    def noted(self: chunked.Walk, batch: chunked.Batch) -> None:
        walks.append(weakref.ref(self))
        prepare(self, batch)

    monkeypatch.setattr(chunked.Walk, "__init__", noted)
    gc.disable()
    try:
        step(ProxyNCA(7000, 5, seed=0), torch.randn(4, 5), torch.arange(4))
        assert [walk() for walk in walks] == [None]
    finally:
        gc.enable()


def test_a_small_batch_and_a_step_without_gradients_leave_the_block_to_the_next() -> None:
    criterion = ProxyNCA(7000, 5, seed=0)
    step(criterion, torch.randn(4, 5), torch.arange(4))
    found = {use: block.data_ptr() for use, block in criterion._work._blocks.items()}
    step(criterion, torch.randn(2, 5), torch.arange(2))
    with torch.no_grad():
        criterion(torch.randn(4, 5), torch.arange(4))
    step(criterion, torch.randn(4, 5), torch.arange(4))
    assert {use: block.data_ptr() for use, block in criterion._work._blocks.items()} == found


def test_a_workspace_belongs_to_its_criterion_alone() -> None:
    criterion = ProxyNCA(7000, 5, seed=0)
    step(criterion, torch.randn(4, 5), torch.arange(4))
    assert criterion._work._blocks
    for other in (copy.deepcopy(criterion), pickle.loads(pickle.dumps(criterion))):
        assert not other._work._blocks
    assert [*criterion.state_dict()] == ["proxies"]


def test_by_itself_a_loss_is_chunked_where_that_is_faster() -> None:
    x, labels = torch.randn(32, 8, requires_grad=True), torch.zeros(32, dtype=torch.int64)
    for loss, classes, is_chunked in (
        (ProxyTriplet, 100, False),
        (ProxyTriplet, 50_000, True),
        (ProxyNCA, 100, True),
        (SoftTriple, 100, False),
    ):
        found = type(loss(classes, 8, seed=0)(x, labels).grad_fn).__name__
        assert (found == "ChunkedLossBackward") == is_chunked
    assert not pays(32, 100, 64)
    assert not pays(512, 100, 512)
    assert pays(32, 11_318, 64)
    assert at_once_is_faster(32, 4000)
    assert not at_once_is_faster(32, 11_318)
    assert not at_once_is_faster(100_000, 100)  # (B, P) twice would be 80 MB


@pytest.mark.parametrize(
    "options",
    [
        {"scale": None},
        {"assignment": "dynamic"},
        {"proxies_per_class": 2},
        {"reduction": "none"},
        {"scale": 1000.0},  # e^1000 is no double
    ],
)
def test_where_there_is_no_fused_form_asking_for_it_is_an_error(options: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="no fused form"):
        ProxyNCA(10, 4, fused=True, **options)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no sharded form"):
        ProxyNCA(10, 4, sharded=True, **options)  # type: ignore[arg-type]
    assert ProxyNCA(10, 4, **options).fused is False  # type: ignore[arg-type]
