"""Parameter groups and schedules."""

from itertools import pairwise

import pytest
import torch
from torch import nn

from nofuss.errors import UsageError
from nofuss.training.optim import RAMP, SCHEDULES, build_optimizer, set_rates


def build(name: str = "adam", backbone: int = 1, decay: float = 0.1) -> torch.optim.Optimizer:
    return build_optimizer(
        name,
        backbone=[nn.Parameter(torch.ones(2)) for _ in range(backbone)],
        head=[nn.Parameter(torch.ones(3))],
        proxies=[nn.Parameter(torch.ones(4))],
        lr=1e-4,
        head_lr=1e-3,
        proxy_lr=1e-2,
        weight_decay=decay,
    )


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("adam", torch.optim.Adam),
        ("adamw", torch.optim.AdamW),
        ("rmsprop", torch.optim.RMSprop),
    ],
)
def test_groups_with_rates_of_their_own(name: str, kind: type) -> None:
    optimizer = build(name)
    assert type(optimizer) is kind
    groups = {g["name"]: g for g in optimizer.param_groups}
    assert {n: g["lr"] for n, g in groups.items()} == {
        "backbone": 1e-4,
        "head": 1e-3,
        "proxies": 1e-2,
    }
    assert {n: g["weight_decay"] for n, g in groups.items()} == {
        "backbone": 0.1,
        "head": 0.1,
        "proxies": 0.0,
    }


def test_no_group_without_parameters() -> None:
    assert [g["name"] for g in build(backbone=0).param_groups] == ["head", "proxies"]


def test_proxies_are_not_decayed() -> None:
    optimizer = build("adamw")
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = torch.zeros_like(p)
    optimizer.step()
    _, head, proxies = (g["params"][0] for g in optimizer.param_groups)
    assert torch.equal(proxies, torch.ones(4))
    assert torch.allclose(head, torch.full((3,), 1 - 1e-3 * 0.1))


def test_an_unknown_optimizer_suggests_the_nearest() -> None:
    with pytest.raises(UsageError, match="did you mean 'adam'"):
        build("adm")


def test_rates_are_a_function_of_the_moment_alone() -> None:
    """Set in any order, the same moment has the same rates."""
    optimizer = build()
    for schedule in SCHEDULES:
        seen = {}
        for moment in (0.0, 2.5, 9.99, 2.5, 0.0):
            set_rates(optimizer, schedule, moment, 10)
            rates = [g["lr"] for g in optimizer.param_groups]
            assert seen.setdefault(moment, rates) == rates
        assert seen[0.0] == [1e-4, 1e-3, 1e-2] or schedule == "ramp"


def test_schedules_against_torchs_own() -> None:
    """Epoch by epoch as torch's schedulers step them."""
    for name, theirs in (
        ("constant", lambda o: torch.optim.lr_scheduler.ConstantLR(o, 1.0)),
        ("cosine", lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 10)),
    ):
        optimizer, reference = build(), build()
        scheduler = theirs(reference)
        for epoch in range(11):
            set_rates(optimizer, name, epoch, 10)
            ours = [g["lr"] for g in optimizer.param_groups]
            expected = [g["lr"] for g in reference.param_groups]
            assert ours == pytest.approx(expected, rel=1e-9, abs=1e-12)
            reference.step()
            scheduler.step()


def test_no_schedule_raises_a_rate_after_the_ramp() -> None:
    for schedule in SCHEDULES.values():
        factors = [schedule(e / 7, 5) for e in range(3, 36)]
        assert all(0 <= b <= a <= 1 for a, b in pairwise(factors))


def test_a_ramp_rises_to_the_cosine() -> None:
    factors = [SCHEDULES["ramp"](e / 30, 5) for e in range(11)]
    assert all(0 < a < b <= 1 for a, b in pairwise(factors))
    assert factors[0] < 0.05
    for epoch in (RAMP, 1.0, 4.9):
        assert SCHEDULES["ramp"](epoch, 5) == SCHEDULES["cosine"](epoch, 5)
