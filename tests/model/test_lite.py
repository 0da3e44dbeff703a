"""EfficientNet-Lite with frozen batch norm: the values and gradients of its authors' layers."""

import pytest
import torch
from torch import Tensor, nn

from nofuss.model.backbones import build_backbone
from nofuss.model.lite import EfficientNetLite


def network_of(version: int) -> EfficientNetLite:
    network = build_backbone(f"efficientnet-lite{version}").network
    assert isinstance(network, EfficientNetLite)
    return network.double()


def as_published(network: EfficientNetLite, pictures: Tensor) -> Tensor:
    found: Tensor = network.body.extract_features(pictures).mean((2, 3))
    return found


@pytest.mark.parametrize("version", [0, 2])  # which pad differently: they are made for other sizes
def test_frozen_norms_give_the_published_values_and_gradients(version: int) -> None:
    network = network_of(version).eval()
    pictures = torch.randn(3, 3, 75, 75, dtype=torch.float64)
    weights = torch.randn(3, network.features, dtype=torch.float64)
    parameters = dict(network.named_parameters())
    found, expected = network(pictures), as_published(network, pictures)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    ours = torch.autograd.grad((found * weights).sum(), list(parameters.values()))
    theirs = torch.autograd.grad((expected * weights).sum(), list(parameters.values()))
    for name, one, other in zip(parameters, ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-7, atol=1e-9, msg=name)


def test_norms_that_move_are_the_published_ones() -> None:
    ours, theirs = network_of(0).train(), network_of(0).train()
    theirs.body._global_params = theirs.body._global_params._replace(drop_connect_rate=0.0)
    pictures = torch.randn(4, 3, 64, 64, dtype=torch.float64)
    found = ours.run(pictures, 0, len(ours.body._blocks), drop=False)
    torch.testing.assert_close(found, as_published(theirs, pictures), rtol=1e-9, atol=1e-9)
    moved, expected = ours.body._bn1.running_mean, theirs.body._bn1.running_mean
    torch.testing.assert_close(moved, expected, rtol=1e-9, atol=1e-9)
    assert not torch.equal(moved, network_of(0).body._bn1.running_mean)


def test_blocks_are_dropped_at_random_in_training_only() -> None:
    network = network_of(0)
    pictures = torch.randn(2, 3, 64, 64, dtype=torch.float64)
    for module in network.train().modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval()
    torch.manual_seed(0)
    assert not torch.equal(network(pictures), network(pictures))
    network.eval()
    assert torch.equal(network(pictures), network(pictures))


def test_inputs_are_left_as_they_are() -> None:
    network = network_of(0).eval()
    inputs = torch.randn(2, 112, 8, 8, dtype=torch.float64)
    before = inputs.clone()
    network.run(inputs, 11, 16).sum().backward()
    assert torch.equal(inputs, before)
