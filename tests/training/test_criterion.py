"""The loss of a run by its name, with its options, and where its proxies start."""

from typing import Any

import pytest
import torch

from nofuss.errors import UsageError
from nofuss.geometry import normalize
from nofuss.losses import (
    INSTANCE_LOSSES,
    PROXY_LOSSES,
    ProxyNCA,
    ProxyNCAPlusPlus,
)
from nofuss.model.whitening import pca
from nofuss.proxies.assignment import Balanced, Dynamic, Fractional, Several
from nofuss.training.criterion import build_criterion, check_loss, place_proxies
from tests.asked import settings_of


def criterion_of(**options: Any) -> Any:
    """Return the loss of six classes in four dimensions."""
    return build_criterion(settings_of(**options), 6, 4)


def features(n: int = 60, width: int = 7) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(n, width, generator=g) @ torch.randn(width, width, generator=g) + 3
    return x, torch.arange(n) % 5


def embedded(x: torch.Tensor) -> torch.Tensor:
    return normalize(pca(x, 4)(x))


@pytest.mark.parametrize("assignment", ["static", "balanced"])
@pytest.mark.parametrize("ratio", [1.0, 0.6])
def test_proxies_equal_the_mean_of_their_labels(assignment: str, ratio: float) -> None:
    """The mean of their items' directions, itself a direction: a loop over proxies."""
    x, labels = features()
    criterion = ProxyNCA(5, 4, proxies_per_class=ratio, assignment=assignment, seed=0)
    directions = embedded(x)
    place_proxies(criterion, directions, labels)
    own = criterion.assign(directions, labels)
    for p in range(len(criterion.proxies)):
        mean = directions[own == p].mean(0)
        assert torch.allclose(criterion.proxies[p], mean / mean.norm(), atol=1e-6)


@pytest.mark.parametrize(
    ("assignment", "ratio"), [("dynamic", 1.0), ("dynamic", 2.4), ("static", 2.4)]
)
@pytest.mark.parametrize("labelled", [True, False])
def test_other_proxies_start_at_different_points(
    assignment: str, ratio: float, labelled: bool
) -> None:
    x, labels = features()
    criterion = ProxyNCA(5, 4, assignment=assignment, proxies_per_class=ratio, seed=0)
    directions = embedded(x)
    place_proxies(criterion, directions, labels if labelled else None, seed=3)
    gap, point = torch.cdist(criterion.proxies.detach(), directions).min(1)
    assert gap.max() < 1e-3
    assert len(point.unique()) == len(criterion.proxies)
    if isinstance(criterion.assignment, Several) and labelled:
        assert torch.equal(labels[point], criterion.assignment.label_of_proxy)


@pytest.mark.parametrize("name", PROXY_LOSSES)
def test_every_proxy_loss_by_name(name: str) -> None:
    criterion = criterion_of(loss=name)
    assert type(criterion) is PROXY_LOSSES[name]
    x, labels = features(12, 4)
    assert criterion(x, labels).isfinite()


@pytest.mark.parametrize("name", INSTANCE_LOSSES)
def test_every_instance_loss_by_name(name: str) -> None:
    criterion = criterion_of(loss=name)
    assert type(criterion) is INSTANCE_LOSSES[name]
    assert not list(criterion.parameters())


def test_options_reach_the_loss() -> None:
    assert criterion_of(scale=5.0).scale == 5
    assert criterion_of(free_norms=True).scale is None
    temperature = criterion_of(loss="proxy-nca++", scale=20.0)
    assert isinstance(temperature, ProxyNCAPlusPlus)
    assert float(temperature.scale or 0) == pytest.approx(20)
    assert isinstance(criterion_of(proxies_per_class=0.5).assignment, Fractional)
    assert isinstance(criterion_of(proxies_per_class=2.0).assignment, Several)
    dynamic = criterion_of(assignment="dynamic").assignment
    assert isinstance(dynamic, Dynamic)
    assert criterion_of(assignment="matched").assignment.matched
    assert isinstance(criterion_of(assignment="balanced").assignment, Balanced)
    assert criterion_of(loss="clustering").gamma_decay == 0.94  # as in the paper


def test_the_seed_decides_the_first_proxies() -> None:
    a, b, c = (criterion_of(seed=s) for s in (1, 1, 2))
    assert torch.equal(a.proxies, b.proxies)
    assert not torch.equal(a.proxies, c.proxies)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss": "proxy-nsa"}, "did you mean 'proxy-nca'"),
        ({"proxies_per_class": 0.01}, "raise --proxies-per-class"),
        ({"proxies_per_class": -1.0}, "--proxies-per-class is -1"),
        ({"proxies_per_class": float("nan")}, "--proxies-per-class is nan"),
        ({"proxies_per_class": 1e12}, "take .* GB to train"),
        ({"scale": 0.0}, "scale is 0.0; expected above 0, or None for free norms"),
        ({"loss": "proxy-nca++", "scale": 0.0}, "scale is 0.0; expected above 0$"),
        ({"loss": "proxy-nca++", "free_norms": True}, "--loss proxy-nca.. uses cosines"),
        ({"loss": "soft-triple", "free_norms": True}, "--loss soft-triple uses cosines"),
        ({"loss": "soft-triple", "assignment": "dynamic"}, "does not take dynamic"),
        ({"loss": "soft-triple", "proxies_per_class": 2.5}, "2.5; expected a whole number"),
        ({"loss": "soft-triple", "proxies_per_class": 0.5}, "expected a whole number above 0"),
        ({"loss": "proxy-anchor", "assignment": "dynamic"}, "does not take dynamic"),
        ({"assignment": "balanced", "proxies_per_class": 2.0}, "per-class is 2; .* lower it to 1"),
        ({"loss": "proxy-anchor", "free_norms": True}, "--loss proxy-anchor uses cosines"),
    ],
)
def test_refused_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        check_loss(settings_of(**options), 6, 4)


@pytest.mark.parametrize("name", PROXY_LOSSES)
def test_options_are_checked_without_building(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred million proxies would take minutes and the memory of the machine."""
    monkeypatch.setattr("nofuss.training.criterion.memory", lambda: 2**60)
    check_loss(settings_of(loss=name), 10**8, 4)
