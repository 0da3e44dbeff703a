"""timm's networks: built, sized, filled from its files, trained in part; a hub that is away."""

import copy
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import nofuss
from nofuss.errors import UsageError
from nofuss.model.backbones import build_backbone
from nofuss.model.embedder import Embedder, build_embedder
from nofuss.model.lora import add_adapters, merge_adapters
from nofuss.model.saved import load_model, save_model
from nofuss.model.stages import Top, Trunk, check_unfreeze, split, stages_agree

if find_spec("timm") is None:
    pytest.skip("the timm extra is not installed", allow_module_level=True)

OPERATORS = """
import torch
for name in ("nms", "qnms"):
    shape = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
    torch.library.define(f"torchvision::{name}", shape)
"""


@pytest.fixture(scope="module", autouse=True)
def timm() -> Any:
    """The timm module; a torchvision whose operators are of another torch gets them declared."""
    try:
        import timm
    except RuntimeError:
        exec(OPERATORS)
        import timm
    return timm


SMALL = ("resnet10t", "test_vit", "test_vit4", "test_convnext", "test_efficientnet", "test_resnet")


def test_networks_are_backbones(timm: Any, tmp_path: Path) -> None:
    backbone = build_backbone("timm:resnet10t", weights=None).eval()
    theirs = timm.create_model("resnet10t", num_classes=0).eval()
    theirs.load_state_dict(backbone.network.state_dict())
    pictures = torch.randn(4, 3, 64, 64)
    assert torch.equal(backbone(pictures), theirs(pictures))
    assert backbone(pictures).shape == (4, backbone.features)
    wide = build_backbone("timm:mobilenetv3_small_050", weights=None).eval()
    assert wide(pictures).shape == (4, wide.features)
    with pytest.raises(UsageError, match="unknown timm model 'resnet10'"):
        build_backbone("timm:resnet10", weights=None)


def test_preprocessing_is_the_network_s_own(timm: Any) -> None:
    backbone = build_backbone("timm:test_vit", weights=None)
    stated = timm.data.resolve_model_data_config(backbone.network)
    found = backbone.preprocessing
    assert found is not None
    assert found.size == stated["input_size"][-1]
    assert found.resize == round(found.size / stated["crop_pct"])
    assert found.mean == tuple(255 * value for value in stated["mean"])
    assert found.std == tuple(255 * value for value in stated["std"])


@pytest.mark.parametrize("end", ["safetensors", "pth"])
@pytest.mark.parametrize("name", ["test_vit", "test_resnet", "test_convnext", "test_efficientnet"])
def test_its_own_files_have_a_classifier(timm: Any, tmp_path: Path, name: str, end: str) -> None:
    theirs = timm.create_model(name, num_classes=10).eval()
    file = tmp_path / f"weights.{end}"
    if end == "pth":
        torch.save(theirs.state_dict(), file)
    else:
        save_file(theirs.state_dict(), file)
    backbone = build_backbone(f"timm:{name}", weights=file).eval()
    theirs.reset_classifier(0)
    pictures = torch.randn(2, 3, 160, 160)
    assert torch.equal(backbone(pictures), theirs(pictures))


def test_a_file_of_another_network_is_refused(timm: Any, tmp_path: Path) -> None:
    save_file(timm.create_model("test_resnet").state_dict(), tmp_path / "a.safetensors")
    with pytest.raises(nofuss.errors.RunError, match="is it the file of another network"):
        build_backbone("timm:test_vit", weights=tmp_path / "a.safetensors")


def test_a_transformer_takes_pictures_of_another_size(tmp_path: Path) -> None:
    embedder = build_embedder("timm:test_vit", dim=8, weights=None, size=96).eval()
    preprocessing = embedder.backbone.preprocessing
    assert preprocessing is not None
    assert preprocessing.size == 96
    pictures = torch.randn(2, 3, 96, 96)
    save_model(tmp_path / "model", embedder)
    again = load_model(tmp_path / "model")[0]
    torch.testing.assert_close(again(pictures), embedder(pictures))


def test_a_size_that_does_not_fit_is_one_line() -> None:
    with pytest.raises(UsageError, match=r"can't take pictures of 100 pixels .*; try another"):
        build_backbone("timm:test_vit", weights=None, size=100)
    with pytest.raises(UsageError, match=r"can't take pictures of 100 pixels .*; try another"):
        build_backbone("timm:swinv2_tiny_window8_256", weights=None, size=100)


@pytest.mark.parametrize("name", SMALL)
def test_fixed_stages_own_what_the_others_do_not_use(name: str) -> None:
    embedder = build_embedder(f"timm:{name}", dim=4, weights=None).eval()
    count = len(split(embedder.backbone)) - 1
    assert count >= 3
    assert stages_agree(embedder.backbone, 160)
    trunk = Trunk(embedder.backbone, count)
    Top(embedder, count)(trunk(torch.randn(2, 3, 160, 160)).detach()).sum().backward()
    used = {id(p) for p in embedder.backbone.parameters() if p.grad is not None}
    owned = {id(p) for p in trunk.parameters()}
    assert used
    assert used | owned == {id(p) for p in embedder.backbone.parameters()}
    assert not used & owned


def test_a_network_of_unknown_structure_is_trained_whole() -> None:
    backbone = build_backbone("timm:regnety_002", weights=None)
    assert check_unfreeze(backbone, None, size=64) == "all"


def adapted() -> Embedder:
    embedder = build_embedder("timm:test_vit", dim=8, weights=None).eval()
    add_adapters(embedder, 4, unfreeze="2")
    return embedder


def test_adapters_start_at_the_network_and_are_all_that_moves() -> None:
    plain = build_embedder("timm:test_vit", dim=8, weights=None).eval()
    embedder, pictures = adapted(), torch.randn(2, 3, 160, 160)
    torch.testing.assert_close(embedder(pictures), plain(pictures))
    embedder.freeze_backbone()  # as in the epochs of warm-up
    embedder.freeze_backbone(False)
    moving = [n for n, p in embedder.backbone.named_parameters() if p.requires_grad]
    assert len(moving) == 2 * 2 * 4  # two blocks: qkv, proj, fc1, fc2; two matrices each
    assert all(name.endswith(("down", "up")) for name in moving)
    assert {id(p) for p in embedder.backbone_parameters()} == {
        id(p) for p in embedder.backbone.parameters() if p.requires_grad
    }


def test_merged_adapters_are_an_ordinary_network() -> None:
    embedder, pictures = adapted(), torch.randn(2, 3, 160, 160)
    names = build_embedder("timm:test_vit", dim=8, weights=None).state_dict().keys()
    before = embedder(pictures)
    with torch.no_grad():
        for parameter in embedder.backbone_parameters():
            parameter.normal_(std=0.2)
    learned = embedder(pictures)
    assert (learned - before).abs().max() > 1e-3
    twin = copy.deepcopy(embedder)
    merge_adapters(embedder)
    torch.testing.assert_close(embedder(pictures), learned)
    torch.testing.assert_close(twin(pictures), learned)
    assert embedder.state_dict().keys() == names


def test_adapters_need_attention() -> None:
    embedder = build_embedder("timm:test_resnet", dim=8, weights=None)
    with pytest.raises(UsageError, match="has no attention layers"):
        add_adapters(embedder, 4, unfreeze="2")


def pictures() -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    labels = np.arange(48) % 6
    colours = random.integers(0, 256, (6, 1, 1, 3))
    noise = random.integers(-40, 40, (48, 100, 100, 3))
    return np.clip(colours[labels] + noise, 0, 255).astype(np.uint8), labels


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"lora": 4}, {"lora": 4, "unfreeze": "all"}])
def test_a_transformer_is_fine_tuned(timm: Any, tmp_path: Path, options: dict[str, Any]) -> None:
    theirs = timm.create_model("test_vit", num_classes=10)
    save_file(theirs.state_dict(), tmp_path / "vit.safetensors")
    run = nofuss.train(
        pictures(),
        preset="finetune",
        backbone="timm:test_vit",
        weights=tmp_path / "vit.safetensors",
        size=96,
        epochs=2,
        batch_size=8,
        warmup=0,
        val_fraction=0.0,
        out=tmp_path / "run",
        **options,
    )
    encoder = nofuss.load(run)
    trained, start = encoder.embedder.backbone.network, theirs
    assert encoder.embed(list(pictures()[0][:2])).shape[0] == 2
    fixed = options.get("unfreeze") != "all"
    assert torch.equal(trained.blocks[0].attn.qkv.weight, start.blocks[0].attn.qkv.weight) == fixed
    assert not torch.equal(trained.blocks[5].attn.qkv.weight, start.blocks[5].attn.qkv.weight)
    norm_moved = not torch.equal(trained.blocks[5].norm1.weight, start.blocks[5].norm1.weight)
    assert norm_moved == ("lora" not in options)


def test_weights_that_can_not_be_downloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UsageError, match=r"timm:test_vit can't be downloaded .*with --weights"):
        build_backbone("timm:test_vit")
