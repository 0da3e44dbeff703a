"""The head, what freezing means, where randomness comes from; folding changes only the speed."""

import pytest
import torch
from torch import nn

from nofuss.model.backbones import BACKBONES, build_backbone
from nofuss.model.embedder import Embedder, build_embedder, fold_batch_norm, for_inference

SHAPES = {"convnet": (1, 28, 28), "identity": (6,)}


def step(embedder: Embedder, inputs: torch.Tensor) -> None:
    """One step of gradient descent with weight decay on anything with a gradient."""
    optimizer = torch.optim.AdamW(embedder.parameters(), lr=1e-2, weight_decay=0.1)
    embedder(inputs).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def changed(before: dict[str, torch.Tensor], embedder: Embedder) -> set[str]:
    after = embedder.state_dict()
    return {name for name in before if not torch.equal(before[name], after[name])}


def snapshot(embedder: Embedder) -> dict[str, torch.Tensor]:
    return {name: t.clone() for name, t in embedder.state_dict().items()}


def test_an_empty_embedding_is_refused() -> None:
    with pytest.raises(ValueError, match="dim is 0"):
        Embedder(build_backbone("identity", channels=3), 0)


def test_the_parameter_groups_are_all_parameters_once() -> None:
    embedder = build_embedder("convnet")
    groups = [*embedder.backbone_parameters(), *embedder.head.parameters()]
    assert [id(p) for p in groups] == [id(p) for p in embedder.parameters()]
    assert {id(p) for p in embedder.head.parameters()} == {
        id(embedder.head.weight),
        id(embedder.head.bias),
    }


def test_the_seed_decides_the_start_and_the_global_generator_is_left_alone() -> None:
    state = torch.get_rng_state()
    first, again, other = (build_embedder("convnet", seed=seed) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), state)
    assert not changed(snapshot(first), again)
    assert "head.weight" in changed(snapshot(first), other)


def test_frozen_batch_norm_stays_fixed_in_training() -> None:
    embedder = build_embedder("convnet")
    embedder.freeze_batch_norm()
    embedder.train()
    norms = {n for n, m in embedder.named_modules() if isinstance(m, torch.nn.BatchNorm2d)}
    assert len(norms) == 4
    before, inputs = snapshot(embedder), torch.randn(8, 1, 28, 28)
    step(embedder, inputs)
    moved = changed(before, embedder)
    assert moved == {n for n in before if n.rpartition(".")[0] not in norms}
    assert embedder.training


def test_a_frozen_backbone_is_a_fixed_function_until_it_is_let_go() -> None:
    embedder = build_embedder("efficientnet-lite0", weights=None, dim=4)
    inputs = torch.randn(4, 3, 64, 64)
    embedder.freeze_backbone()
    embedder.train()
    features = embedder.backbone(inputs)
    assert not features.requires_grad
    before = snapshot(embedder)
    step(embedder, inputs)
    assert changed(before, embedder) == {"head.weight", "head.bias"}
    assert torch.equal(embedder.backbone(inputs), features)
    embedder.freeze_backbone(False)
    assert embedder.backbone.training
    before = snapshot(embedder)
    step(embedder, inputs)
    assert changed(before, embedder) == before.keys()


def test_letting_the_backbone_go_keeps_batch_norm_frozen() -> None:
    embedder = build_embedder("convnet")
    embedder.freeze_batch_norm()
    embedder.freeze_backbone()
    embedder.freeze_backbone(False)
    before = snapshot(embedder)
    step(embedder, torch.randn(8, 1, 28, 28))
    assert "backbone.network.0.weight" in changed(before, embedder)
    assert not any("running" in name for name in changed(before, embedder))
    assert not embedder.backbone.network.get_submodule("1").weight.requires_grad


def test_all_randomness_of_a_step_is_in_torchs_generator() -> None:
    embedder = build_embedder("efficientnet-lite0", weights=None, dim=4).train()
    inputs = torch.randn(4, 3, 64, 64)
    state, weights = torch.get_rng_state(), snapshot(embedder)
    first = embedder(inputs)
    embedder.load_state_dict(weights)
    assert not torch.equal(embedder(inputs), first)  # drop-connect draws anew
    embedder.load_state_dict(weights)
    torch.set_rng_state(state)
    assert torch.equal(embedder(inputs), first)


def test_the_root_of_the_features_keeps_their_sign_and_has_a_gradient_at_zero() -> None:
    embedder = build_embedder("identity", channels=3, dim=2, root=True)
    features = torch.tensor([[4.0, -9.0, 0.0]], requires_grad=True)
    rooted = embedder.to_head(features)
    torch.testing.assert_close(rooted, torch.tensor([[2.0, -3.0, 0.0]]), rtol=0, atol=1e-5)
    rooted.sum().backward()
    assert features.grad is not None
    assert features.grad.isfinite().all()
    torch.testing.assert_close(embedder(features), embedder.head(rooted))


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
