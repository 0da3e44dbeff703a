"""EfficientNet-Lite up to its pooled features, faster to train while its batch norm is frozen.

The layers are those of `efficientnet_lite_pytorch`. A frozen batch norm multiplies and adds what
its statistics say, which its convolution can do by itself: then activations are read and written
once instead of three times, forward and backward, for the same values and gradients up to rounding.
"""

from typing import Any

import torch
from efficientnet_lite_pytorch import EfficientNet
from efficientnet_lite_pytorch.utils import drop_connect
from torch import Tensor, nn
from torch.nn import functional


class EfficientNetLite(nn.Module):
    """EfficientNet-Lite up to its pooled features: no dropout, no classifier."""

    features = 1280

    def __init__(self, version: int) -> None:
        super().__init__()
        self.body = EfficientNet.from_name(f"efficientnet-lite{version}")
        del self.body._fc, self.body._dropout

    def forward(self, inputs: Tensor) -> Tensor:
        """Return pooled features (B, 1280)."""
        return self.run(inputs, 0, len(self.body._blocks))

    def run(self, x: Tensor, first: int, last: int, *, drop: bool = True) -> Tensor:
        """Run some of the blocks, with the stem if they start at 0, and pool if they end last.

        drop: skip blocks of some pictures at random in training (Huang et al. 2016).
        """
        body: Any = self.body
        blocks, rate = body._blocks, body._global_params.drop_connect_rate if drop else 0.0
        if not first:
            x = _activated(body._conv_stem, body._bn0, x)
        for i in range(first, last):  # later blocks are skipped more often in training
            x = _block(blocks[i], x, rate * i / len(blocks))
        return _activated(body._conv_head, body._bn1, x).mean((2, 3)) if last == len(blocks) else x


def _block(block: Any, inputs: Tensor, drop_rate: float) -> Tensor:
    """Run an inverted residual block: widen, filter each channel, narrow, add what came in."""
    args = block._block_args
    x = inputs
    if args.expand_ratio != 1:
        x = _activated(block._expand_conv, block._bn0, x)
    x = _activated(block._depthwise_conv, block._bn1, x)
    x = _normed(block._project_conv, block._bn2, x)
    if args.stride != 1 or args.input_filters != args.output_filters:
        return x
    return inputs + (drop_connect(x, p=drop_rate, training=block.training) if drop_rate else x)


def _activated(conv: Any, norm: nn.Module, x: Tensor) -> Tensor:
    # In place: neither a convolution nor a batch norm needs its own output for the gradient. The
    # exporter takes twice as long to make the in-place form functional again.
    in_place = not torch.compiler.is_exporting()
    return functional.relu6(_normed(conv, norm, x), inplace=in_place)


def _normed(conv: Any, norm: nn.Module, x: Tensor) -> Tensor:
    """Return norm(conv(x)), in one step if the norm is frozen, or folded and gone."""
    if isinstance(norm, nn.BatchNorm2d) and norm.training:
        result: Tensor = norm(conv(x))
        return result
    weight, bias = conv.weight, conv.bias
    if isinstance(norm, nn.BatchNorm2d):
        assert norm.running_mean is not None
        assert norm.running_var is not None
        factor = norm.weight * torch.rsqrt(norm.running_var + norm.eps)
        weight = weight * factor[:, None, None, None]
        bias = norm.bias - norm.running_mean * factor
    left, right, top, bottom = getattr(conv.static_padding, "padding", (0, 0, 0, 0))
    padding = (top, left)
    if (top, left) != (bottom, right):  # with a stride of 2, the last row and column have more
        x, padding = conv.static_padding(x), (0, 0)
    return functional.conv2d(x, weight, bias, conv.stride, padding, conv.dilation, conv.groups)
