"""BN-Inception against a reference that walks the public checkpoint's names step by step."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

from nofuss.errors import RunError
from nofuss.model.backbones import build_backbone
from nofuss.model.inception import InceptionBN, from_public_layout, halve

# Published output channels of each block (Ioffe and Szegedy 2015, Figure 5).
PUBLISHED = dict(
    zip(
        ("3a", "3b", "3c", "4a", "4b", "4c", "4d", "4e", "5a", "5b"),
        (256, 320, 576, 576, 576, 608, 608, 1056, 1024, 1024),
        strict=True,
    )
)


def public_checkpoint(*, counters: bool = False) -> dict[str, Tensor]:
    """Random tensors under the public names, with biases, statistics and a classifier."""
    generator = torch.Generator().manual_seed(0)
    tensors = {"last_linear.weight": torch.zeros(1000, 1024), "last_linear.bias": torch.zeros(1000)}
    for path, module in InceptionBN().named_modules():
        if isinstance(module, torch.nn.Conv2d):
            layer = path.removesuffix(".conv").replace(".", "_")
            shape, after = module.weight.shape, module.out_channels
            fan_in = shape[1] * shape[2] * shape[3]
            tensors[f"{layer}.weight"] = torch.randn(shape, generator=generator) / fan_in**0.5
            tensors[f"{layer}.bias"] = torch.randn(after, generator=generator)
            for leaf in ("weight", "bias", "running_mean"):
                tensors[f"{layer}_bn.{leaf}"] = torch.randn(after, generator=generator)
            tensors[f"{layer}_bn.running_var"] = torch.rand(after, generator=generator) + 0.5
            if counters:
                tensors[f"{layer}_bn.num_batches_tracked"] = torch.tensor(7)
    return tensors


def reference(tensors: dict[str, Tensor], bgr: Tensor) -> Tensor:
    """BN-Inception written out over the public names, bias and all."""

    def unit(x: Tensor, name: str, stride: int = 1) -> Tensor:
        weight, bias = tensors[f"{name}.weight"], tensors[f"{name}.bias"]
        x = F.conv2d(x, weight, bias, stride, padding=weight.shape[-1] // 2)
        mean, var = tensors[f"{name}_bn.running_mean"], tensors[f"{name}_bn.running_var"]
        scale, shift = tensors[f"{name}_bn.weight"], tensors[f"{name}_bn.bias"]
        return F.relu(F.batch_norm(x, mean.flatten(), var.flatten(), scale, shift))

    x = F.max_pool2d(unit(bgr, "conv1_7x7_s2", 2), 3, 2, ceil_mode=True)
    x = F.max_pool2d(unit(unit(x, "conv2_3x3_reduce"), "conv2_3x3"), 3, 2, ceil_mode=True)
    for block, channels in PUBLISHED.items():
        at = f"inception_{block}_"
        stride = 2 if block in ("3c", "4e") else 1
        three = unit(unit(x, at + "3x3_reduce"), at + "3x3", stride)
        double = unit(unit(x, at + "double_3x3_reduce"), at + "double_3x3_1")
        double = unit(double, at + "double_3x3_2", stride)
        if stride == 2:
            x = torch.cat([three, double, F.max_pool2d(x, 3, 2, ceil_mode=True)], 1)
        else:
            pool = F.max_pool2d(x, 3, 1, 1) if block == "5b" else F.avg_pool2d(x, 3, 1, 1)
            x = torch.cat([unit(x, at + "1x1"), three, double, unit(pool, at + "pool_proj")], 1)
        assert x.shape[1] == channels
    return F.adaptive_avg_pool2d(x, 1).flatten(1)


@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
def test_a_public_checkpoint_gives_the_features_of_the_public_network(
    tmp_path: Path, suffix: str
) -> None:
    tensors, file = public_checkpoint(), tmp_path / f"bn_inception{suffix}"
    if suffix == ".pth":
        torch.save(tensors, file)
    else:
        save_file(tensors, file)
    backbone = build_backbone("inception-bn", weights=file).eval()
    rgb = torch.randn(2, 3, 227, 227, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = reference(tensors, rgb.flip(1))  # it was trained on BGR
        torch.testing.assert_close(backbone(rgb), expected, rtol=1e-4, atol=1e-4)


def test_older_and_newer_layouts_load_alike() -> None:
    plain = from_public_layout(public_checkpoint())
    counted = from_public_layout(public_checkpoint(counters=True))
    older = public_checkpoint()
    older["fc.weight"] = older.pop("last_linear.weight")
    older = {k: t[None] if "_bn." in k else t for k, t in older.items()}  # (1, C)
    from_older = from_public_layout(older)
    assert plain.keys() == from_older.keys()
    assert all(torch.equal(plain[k], from_older[k]) for k in plain)
    assert counted.keys() == InceptionBN().state_dict().keys()


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("inception_4c_3x3.weight", None),
        ("aux.weight", torch.zeros(1)),
        ("conv2_3x3_bn.weight", torch.zeros(5)),
    ],
)
def test_the_file_of_another_network_is_refused(
    tmp_path: Path, name: str, tensor: Tensor | None
) -> None:
    tensors, file = public_checkpoint(), tmp_path / "other.safetensors"
    tensors.pop(name, None)
    save_file(tensors if tensor is None else tensors | {name: tensor}, file)
    with pytest.raises(RunError, match="another network") as caught:
        build_backbone("inception-bn", weights=file)
    assert next(iter(from_public_layout({name: torch.zeros(1)}))) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_code_in_a_checkpoint_is_not_run(tmp_path: Path) -> None:
    file = tmp_path / "whole.pth"
    torch.save(InceptionBN(), file)
    with pytest.raises(RunError, match=r"convert it to \.safetensors"):
        build_backbone("inception-bn", weights=file)
    torch.save({"epoch": 3}, file)
    with pytest.raises(RunError, match="dict"):
        build_backbone("inception-bn", weights=file)
    file.with_suffix(".safetensors").write_bytes(b"not tensors at all")
    with pytest.raises(RunError, match=r"whole\.safetensors"):
        build_backbone("inception-bn", weights=file.with_suffix(".safetensors"))


@pytest.mark.parametrize("side", range(3, 12))
def test_halving_is_as_large_as_a_strided_convolution(side: int) -> None:
    x = torch.rand(1, 1, side, side)
    assert halve(x).shape == F.conv2d(x, torch.ones(1, 1, 3, 3), stride=2, padding=1).shape
    slow = [
        [x[0, 0, i : i + 3, j : j + 3].max() for j in range(0, side, 2)] for i in range(0, side, 2)
    ]
    assert torch.equal(halve(x)[0, 0], torch.tensor(slow))


@pytest.mark.parametrize("side", [64, 75, 97])
def test_pictures_of_any_side_pass(side: int) -> None:
    assert InceptionBN().eval()(torch.rand(1, 3, side, side)).shape == (1, 1024)
