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


@pytest.mark.parametrize("size", [64, 75])  # even and odd sides are padded differently
@pytest.mark.parametrize("version", [0, 2])
def test_frozen_norms_give_the_published_values_and_gradients(version: int, size: int) -> None:
    network = network_of(version).eval()
    pictures = torch.randn(3, 3, size, size, dtype=torch.float64)
    weights = torch.randn(3, network.features, dtype=torch.float64)
    parameters = dict(network.named_parameters())
    found, expected = network(pictures), as_published(network, pictures)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    ours = torch.autograd.grad((found * weights).sum(), list(parameters.values()))
    theirs = torch.autograd.grad((expected * weights).sum(), list(parameters.values()))
    for name, one, other in zip(parameters, ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-7, atol=1e-9, msg=name)


def test_norms_that_move_are_not_folded() -> None:
    network = network_of(0).train()
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = 0.5
    before = network.body._bn1.running_mean.clone()
    pictures = torch.randn(4, 3, 64, 64, dtype=torch.float64)
    found = network.run(pictures, 0, len(network.body._blocks), drop=False)
    assert (network.body._bn1.running_mean - before).abs().max() > 0
    centred = found - found.mean(0)  # of the batch's own statistics, not of ImageNet's
    network.eval()
    frozen = network(pictures)
    assert not torch.allclose(centred, frozen - frozen.mean(0), rtol=1e-2)


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
