"""Inception with batch norm, the paper's backbone (Ioffe and Szegedy 2015, "BN-Inception").

Children are named so that a tensor's path, joined by underscores, is its name in the public
checkpoints: `inception_3a.3x3_reduce.conv.weight` there is `inception_3a_3x3_reduce.weight`,
and `inception_3a.3x3_reduce.bn.bias` is `inception_3a_3x3_reduce_bn.bias`.

Departures from those checkpoints, none of which changes a feature: channels are RGB instead
of BGR; convolutions have no bias (batch norm absorbs it). The running statistics use
torch's momentum of 0.1 instead of Caffe's.
"""

import re
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class ConvUnit(nn.Module):
    """Convolution, batch norm, ReLU."""

    def __init__(self, before: int, after: int, kernel: int, *, stride: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv2d(before, after, kernel, stride=stride, padding=kernel // 2, bias=False)
        self.bn = nn.BatchNorm2d(after)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, before, H, W) to (B, after, H / stride, W / stride)."""
        return F.relu(self.bn(self.conv(x)), inplace=True)


class Widths(NamedTuple):
    """Output channels of one block's convolutions; 0 where the block has no such branch."""

    one: int
    reduce: int
    three: int
    double_reduce: int
    double: int
    pool: int


BLOCKS = {
    "3a": Widths(64, 64, 64, 64, 96, 32),
    "3b": Widths(64, 64, 96, 64, 96, 64),
    "3c": Widths(0, 128, 160, 64, 96, 0),
    "4a": Widths(224, 64, 96, 96, 128, 128),
    "4b": Widths(192, 96, 128, 96, 128, 128),
    "4c": Widths(160, 128, 160, 128, 160, 128),
    "4d": Widths(96, 128, 192, 160, 192, 128),
    "4e": Widths(0, 128, 192, 192, 256, 0),
    "5a": Widths(352, 192, 320, 160, 224, 128),
    "5b": Widths(352, 192, 320, 192, 224, 128),
}


class InceptionBlock(nn.ModuleDict):
    """Parallel 1×1, 3×3, double 3×3 and pooled branches; without the 1×1 it halves the side."""

    def __init__(self, before: int, w: Widths, *, max_pool: bool) -> None:
        stride = 1 if w.one else 2
        super().__init__(
            {
                "3x3_reduce": ConvUnit(before, w.reduce, 1),
                "3x3": ConvUnit(w.reduce, w.three, 3, stride=stride),
                "double_3x3_reduce": ConvUnit(before, w.double_reduce, 1),
                "double_3x3_1": ConvUnit(w.double_reduce, w.double, 3),
                "double_3x3_2": ConvUnit(w.double, w.double, 3, stride=stride),
            }
        )
        if w.one:
            self["1x1"] = ConvUnit(before, w.one, 1)
            self["pool_proj"] = ConvUnit(before, w.pool, 1)
        self.max_pool = max_pool
        self.after = w.one + w.three + w.double + (w.pool or before)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, before, H, W) to (B, after, …)."""
        three = self["3x3"](self["3x3_reduce"](x))
        double = self["double_3x3_2"](self["double_3x3_1"](self["double_3x3_reduce"](x)))
        if "1x1" not in self:
            return torch.cat([three, double, halve(x)], 1)
        pooled = F.max_pool2d(x, 3, 1, 1) if self.max_pool else F.avg_pool2d(x, 3, 1, 1)
        return torch.cat([self["1x1"](x), three, double, self["pool_proj"](pooled)], 1)


class InceptionBN(nn.Module):
    """BN-Inception up to its pooled features; pictures (B, 3, H, W) → (B, 1024)."""

    features = 1024

    def __init__(self) -> None:
        super().__init__()
        self.conv1_7x7_s2 = ConvUnit(3, 64, 7, stride=2)
        self.conv2_3x3_reduce = ConvUnit(64, 64, 1)
        self.conv2_3x3 = ConvUnit(64, 192, 3)
        channels = 192
        for name, widths in BLOCKS.items():
            block = InceptionBlock(channels, widths, max_pool=name == "5b")
            self.add_module(f"inception_{name}", block)
            channels = block.after

    def forward(self, pictures: Tensor) -> Tensor:
        """Return pooled features (B, 1024)."""
        x = self.stem(pictures)
        for name in BLOCKS:
            x = self.get_submodule(f"inception_{name}")(x)
        return x.mean((2, 3))

    def stem(self, pictures: Tensor) -> Tensor:
        """Return the input of the first block, an eighth of the side."""
        x = F.max_pool2d(self.conv1_7x7_s2(pictures), 3, 2, ceil_mode=True)
        return F.max_pool2d(self.conv2_3x3(self.conv2_3x3_reduce(x)), 3, 2, ceil_mode=True)


def halve(x: Tensor) -> Tensor:
    """Take the maximum over 3×3 with stride 2; as large as a padded convolution's output.

    Padding with zeros changes no maximum, because x comes out of a ReLU.
    """
    height, width = x.shape[2:]
    return F.max_pool2d(F.pad(x, (0, width % 2, 0, height % 2)), 3, 2, ceil_mode=True)


def from_public_layout(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename the tensors of a public BN-Inception checkpoint to ours; unknown names stay.

    The classifier (`last_linear`, `fc`) is dropped, BGR becomes RGB, a convolution's bias
    goes into the running mean of its batch norm, and statistics stored as (1, C) become (C,).
    """
    ours = {
        _our_name(name): tensor.flatten() if tensor.dim() == 2 else tensor
        for name, tensor in tensors.items()
        if not name.startswith(("last_linear.", "fc."))
    }
    first = "conv1_7x7_s2.conv.weight"
    if first in ours:
        ours[first] = ours[first].flip(1)
    for name in [name for name in ours if name.endswith(".conv.bias")]:
        bias = ours.pop(name)
        mean = name.replace(".conv.bias", ".bn.running_mean")
        if mean in ours:
            ours[mean] = ours[mean] - bias
    return ours


def _our_name(name: str) -> str:
    """Map `inception_3a_3x3_bn.bias` to `inception_3a.3x3.bn.bias`."""
    if not (match := re.fullmatch(r"(conv\d_|inception_\d\w_)(\w+?)(_bn)?\.(\w+)", name)):
        return name
    group, unit, norm, leaf = match.groups()
    group = group if group.startswith("conv") else group[:-1] + "."
    return f"{group}{unit}.{'bn' if norm else 'conv'}.{leaf}"
