"""The shell of losses over proxies: options, refusals, precision, state."""

import doctest
import inspect
import math
import pydoc
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import nofuss
from nofuss.losses import PROXY_LOSSES
from nofuss.losses.proxy_loss import ProxyOptions, proxy_logits
from nofuss.losses.proxy_nca import ProxyNCA
from nofuss.losses.proxy_triplet import ProxyTriplet
from nofuss.losses.soft_triple import SoftTriple
from nofuss.proxies.assignment import Dynamic, Fractional, Several, Static


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
    with pytest.raises(ValueError, match="pass one of the two"):
        criterion(x, labels, positives=x, negatives=x)
    for given in ({}, {"positives": x}, {"negatives": x}):
        with pytest.raises(ValueError, match="both positives= and negatives="):
            criterion(x, **given)


@pytest.mark.parametrize("proxies_per_class", [0.5, 1, 2])
def test_bare_triplets_need_dynamic_assignment(
    batch: tuple[Tensor, Tensor], proxies_per_class: float
) -> None:
    x = batch[0]
    criterion = ProxyNCA(4, 5, proxies_per_class=proxies_per_class)
    with pytest.raises(
        ValueError, match="assignment needs labels: pass them, or assignment='dynamic'"
    ):
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
    with pytest.raises(ValueError, match="need no mined pairs"):
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


def test_idle_counters_travel_with_the_state(batch: tuple[Tensor, Tensor]) -> None:
    before, after = (ProxyTriplet(4, 5, assignment=Dynamic(40), seed=s) for s in (1, 2))
    for _ in range(2):
        before(*batch)
    after.load_state_dict(before.state_dict())
    assert isinstance(before.assignment, Dynamic)
    assert isinstance(after.assignment, Dynamic)
    assert after.assignment.batches == 2
    assert after.assignment.idle.tolist() == before.assignment.idle.tolist()
    assert 2 in after.assignment.idle


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
