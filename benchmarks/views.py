"""Other views of one network: larger pictures, an earlier stage, another pooling, mirror images.

    python -m benchmarks.views FOLDER …

EfficientNet-Lite0, one view of 224 pixels unless the name says otherwise: `288` takes larger
pictures, `mirror` averages with the mirror image, `gem` is the generalised mean (p = 3) of the last
activations instead of their mean, `middle` the mean of the activations before the last stage, 112
channels on a map four times as large. Scores of each, and side by side with the first, as in
benchmarks/backbones.py. `two networks` are Lite0 and Lite1 with one view each.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.backbones import COLUMNS, compared
from benchmarks.worth import features_by
from nofuss.commands import console
from nofuss.data.collection import Collection
from nofuss.data.open import open_data
from nofuss.model.backbones import Backbone, build_backbone, joined
from nofuss.model.features import features_of
from nofuss.model.lite import EfficientNetLite, _activated

MIDDLE = 11
"""The first block of the last stage but one, whose inputs have 112 channels."""


End = Callable[[EfficientNetLite, Tensor], Tensor]
"""From the activations of the middle to features (B, F)."""


class Pooled(nn.Module):
    """Lite0 with another end: (B, 3, 224, 224) → (B, F)."""

    def __init__(
        self, network: EfficientNetLite, end: Callable[[EfficientNetLite, Tensor], Tensor]
    ):
        super().__init__()
        self.network, self.end = network, end

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the features."""
        return self.end(self.network, self.network.run(inputs, 0, MIDDLE))


def middle(network: EfficientNetLite, x: Tensor) -> Tensor:
    """Return the mean activations of the middle."""
    return x.relu().mean((2, 3))


def gem(network: EfficientNetLite, x: Tensor) -> Tensor:
    """Return the generalised mean of the last activations."""
    body = network.body
    for block in body._blocks[MIDDLE:]:
        x = block(x)
    last = _activated(body._conv_head, body._bn1, x)
    return last.pow(3).mean((2, 3)).pow(1 / 3)


def view(end: End, pictures: Collection) -> Tensor:
    """Return the features (N, F) of Lite0 with another end."""
    lite = build_backbone("efficientnet-lite0").eval()
    assert isinstance(lite.network, EfficientNetLite)
    network = Pooled(lite.network, end).eval()
    with torch.no_grad():
        width = network(torch.zeros(1, 3, 224, 224)).shape[1]
    backbone = Backbone("own", network, width, channels=3, preprocessing=lite.preprocessing)
    return features_of(backbone, pictures, cached=False).values


def main() -> None:
    """Read the command line and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", nargs="+", type=Path, metavar="FOLDER")
    for path in parser.parse_args().data:
        pictures, lite0 = open_data(path), "efficientnet-lite0"
        first = features_by(lite0, pictures, mirror=False)
        others = {
            "288": features_by(f"{lite0}@288", pictures, mirror=False),
            "mirror": features_by(lite0, pictures),
            "gem": view(gem, pictures),
            "middle": view(middle, pictures),
        }
        two = joined([first, features_by("efficientnet-lite1", pictures, mirror=False)])
        against = {"mirror": others["mirror"], "two networks": two}
        console.table("a second network", COLUMNS, compared(pictures, against, [1, 2]))
        for name, x in others.items():
            console.table(name, COLUMNS, compared(pictures, {"224": first, name: x}, [1, 2]))


if __name__ == "__main__":
    main()
