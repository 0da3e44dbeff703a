"""Folding changes nothing but the speed; extraction is the plain loop into one buffer."""

import pytest
import torch
from torch import nn

from nofuss.model.backbones import BACKBONES
from nofuss.model.embedder import Embedder, build_embedder
from nofuss.model.inference import extract, fold_batch_norm, for_inference

SHAPES = {"convnet": (1, 28, 28), "identity": (6,)}


def trained(name: str) -> tuple[Embedder, torch.Tensor]:
    """An embedder whose batch norms have moved away from the identity."""
    shape = SHAPES.get(name, (3, 64, 64))
    torch.manual_seed(0)
    embedder = build_embedder(name, channels=shape[0], dim=8, weights=None)
    for module in embedder.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.weight.data.uniform_(0.5, 1.5)
            module.bias.data.normal_()
            module.momentum = 0.5
    inputs = torch.randn(4, *shape)
    embedder.train()(inputs)
    return embedder, inputs


@pytest.mark.parametrize("name", BACKBONES)
@torch.no_grad()
def test_folding_leaves_the_embeddings_and_the_original_alone(name: str) -> None:
    embedder, inputs = trained(name)
    before = {k: t.clone() for k, t in embedder.state_dict().items()}
    ready = for_inference(embedder)
    assert not any(isinstance(module, nn.BatchNorm2d) for module in ready.modules())
    assert not ready.training
    assert embedder.training
    assert all(torch.equal(before[k], t) for k, t in embedder.state_dict().items())
    expected = embedder.eval()(inputs)
    assert (ready(inputs) - expected).norm() <= 1e-4 * expected.norm()


def test_folding_by_hand() -> None:
    conv, norm = nn.Conv2d(1, 1, 1, bias=False), nn.BatchNorm2d(1, eps=0.0)
    conv.weight.data.fill_(3.0)
    norm.running_mean, norm.running_var = torch.tensor([5.0]), torch.tensor([4.0])
    norm.weight.data.fill_(10.0)
    norm.bias.data.fill_(7.0)
    block = nn.Sequential(conv, norm).eval()
    fold_batch_norm(block)
    # 10 · (3x − 5) / 2 + 7 = 15x − 18
    assert block(torch.tensor([[[[2.0]]]])).item() == pytest.approx(12.0)


def test_extraction_is_the_plain_loop() -> None:
    embedder, _ = trained("convnet")
    embedder.freeze_batch_norm()
    embedder.train()
    modes = [module.training for module in embedder.modules()]
    batches = [torch.randn(n, 1, 28, 28) for n in (5, 5, 2)]
    seen: list[tuple[str, int, int]] = []
    embeddings = extract(embedder, batches, count=12, progress=lambda *told: seen.append(told))
    features = extract(embedder.backbone, iter(batches), count=12)
    assert seen == [("embedding", done, 12) for done in (5, 10, 12)]
    assert not embeddings.requires_grad
    assert [module.training for module in embedder.modules()] == modes
    embedder.eval()
    assert torch.equal(embeddings, torch.cat([embedder(batch) for batch in batches]))
    assert torch.equal(features, torch.cat([embedder.backbone(batch) for batch in batches]))


def test_a_wrong_count_is_refused() -> None:
    embedder, inputs = trained("identity")
    with pytest.raises(ValueError, match="held 4 inputs, expected count=5"):
        extract(embedder, [inputs], count=5)
    with pytest.raises(ValueError, match="more than count=3 inputs"):
        extract(embedder, [inputs], count=3)
    assert embedder.training
