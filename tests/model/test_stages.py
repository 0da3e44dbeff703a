"""Networks in stages: one after the other they are the network, and fixed ones stay fixed."""

import copy

import pytest
import torch
from torch import nn

from nofuss.errors import UsageError
from nofuss.model.backbones import Backbone, build_backbone, own_backbone
from nofuss.model.embedder import Embedder, build_embedder
from nofuss.model.stages import Top, Trunk, check_unfreeze, freeze_first, split, stages_agree

COUNTS = {"convnet": 4, "efficientnet-lite0": 7, "inception-bn": 11}


def backbone_of(name: str) -> Backbone:
    torch.manual_seed(0)
    return build_backbone(name, channels=3, weights=None)


@pytest.mark.parametrize(("name", "count"), COUNTS.items())
def test_stages_in_order_are_the_network(name: str, count: int) -> None:
    backbone = backbone_of(name)
    assert len(split(backbone)) == count
    assert stages_agree(backbone, 64)


@pytest.mark.parametrize("name", COUNTS)
@pytest.mark.parametrize("fixed", [1, -1])
def test_trunk_and_top_are_the_embedder_and_share_no_parameter(name: str, fixed: int) -> None:
    embedder = Embedder(backbone_of(name), 8).eval()
    count = fixed % COUNTS[name]
    pictures = torch.randn(3, 3, 64, 64)
    trunk = Trunk(embedder.backbone, count)
    activations = trunk(pictures)
    found = Top(embedder, count)(activations.detach())
    torch.testing.assert_close(found, embedder(pictures))
    found.square().sum().backward()
    used = {id(p) for p in embedder.backbone.parameters() if p.grad is not None}
    owned = {id(p) for p in trunk.parameters()}
    assert used | owned == {id(p) for p in embedder.backbone.parameters()}
    assert used
    assert owned
    assert not used & owned


def test_a_copy_of_the_top_has_weights_of_its_own() -> None:
    """The check before training copies the model: its forward must not run the original."""
    top = Top(build_embedder("convnet", dim=4, weights=None).eval(), 2)
    twin = copy.deepcopy(top)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    activations = torch.randn(2, 64, 7, 7)
    assert twin(activations).abs().max() == 0
    assert top(activations).abs().max() > 0


def test_fixed_stages_have_no_gradient_and_keep_their_statistics() -> None:
    embedder = build_embedder("convnet", dim=4, weights=None)
    freeze_first(embedder, "1")
    before = copy.deepcopy(embedder.state_dict())
    moving = {id(p) for p in embedder.backbone_parameters()}
    optimizer = torch.optim.SGD(
        [*embedder.backbone_parameters(), *embedder.head.parameters()], lr=0.1
    )
    embedder.freeze_backbone()  # as in the epochs of warm-up
    embedder.freeze_backbone(False)
    embedder.train()
    embedder(torch.randn(4, 1, 28, 28)).square().sum().backward()
    optimizer.step()
    after = embedder.state_dict()
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert {name.split(".")[2] for name in moved if "backbone" in name} == {"12", "13"}
    assert moving == {
        id(p) for layer in [*embedder.backbone.network][12:] for p in layer.parameters()
    }


def test_how_many_stages_are_trained() -> None:
    backbone = backbone_of("convnet")
    assert check_unfreeze(backbone, None, size=28) == "2"
    assert check_unfreeze(backbone, "all", size=28) == "all"
    assert check_unfreeze(backbone, "3", size=28) == "3"
    assert check_unfreeze(backbone, "4", size=28) == "all"
    for asked in ("0", "-1", "some", "1.5"):
        with pytest.raises(UsageError, match=r"all or a number"):
            check_unfreeze(backbone, asked, size=28)
    with pytest.raises(UsageError, match="has 4 stages"):
        check_unfreeze(backbone, "5", size=28)


class Doubled(nn.Sequential):
    """A sequence by its type, but not in what it computes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run all layers, then double."""
        result: torch.Tensor = super().forward(x)
        return 2 * result


def test_of_a_module_from_python_a_sequence_has_stages() -> None:
    layers = [nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    assert check_unfreeze(own_backbone(nn.Sequential(*layers)), None, size=224) == "all"
    assert check_unfreeze(own_backbone(nn.Sequential(*layers)), "2", size=224) == "2"
    doubled = own_backbone(Doubled(*layers))
    assert check_unfreeze(doubled, None, size=224) == "all"
    with pytest.raises(UsageError, match="--unfreeze all"):
        check_unfreeze(doubled, "1", size=224)
