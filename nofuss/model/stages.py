"""A network as a sequence of stages: the first ones can stay fixed while the last ones are trained.

Early stages learn edges and textures that new pictures share, and cost most of the time; the last
ones cost little and gain most. `split` finds the stages of a network, `Trunk` is the fixed part in
front, `Top` an embedder whose inputs are the trunk's activations.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

from nofuss.distributed.device import device_of
from nofuss.errors import UsageError
from nofuss.model.backbones import OWN, Backbone, ConvNet, evaluating
from nofuss.model.embedder import Embedder
from nofuss.model.inception import BLOCKS, InceptionBN
from nofuss.model.lite import EfficientNetLite
from nofuss.model.timm import timm_stages

ALL = "all"
USUAL = 2
"""Stages that are trained where the user names no number."""


@dataclass(frozen=True)
class Stage:
    """Consecutive layers of a network: what they compute, and the modules with their parameters."""

    forward: Callable[[Tensor], Tensor]
    modules: tuple[nn.Module, ...]


def split(backbone: Backbone) -> list[Stage]:
    """Return the stages of a backbone, of which each takes the output of the one before.

    A network whose structure is not known is a single stage.
    """
    network = backbone.network
    if isinstance(network, EfficientNetLite):
        return _lite_stages(network)
    if isinstance(network, InceptionBN):
        return _inception_stages(network)
    if isinstance(network, ConvNet):
        borders = [*range(0, len(network) - 1, 4), len(network)]
        return [_sequence([*network][a:b]) for a, b in pairwise(borders)]
    if backbone.name.startswith("timm:") and (found := timm_stages(network)):
        return [Stage(forward, tuple(modules)) for forward, modules in found]
    if isinstance(network, nn.Sequential):
        return [_sequence([layer]) for layer in network]
    return [Stage(network, (network,))]


def _sequence(layers: Sequence[nn.Module]) -> Stage:
    """Return layers that run one after the other as a stage."""
    return Stage(nn.Sequential(*layers), tuple(layers))


def _lite_stages(network: EfficientNetLite) -> list[Stage]:
    """Return the seven stages of EfficientNet, the stem with the first, the pooling with the last.

    A stage starts with the block that changes the number of channels.
    """
    blocks = [block._block_args for block in network.body._blocks]
    starts = [i for i, args in enumerate(blocks) if args.input_filters != args.output_filters]
    borders = [*pairwise([*starts, len(blocks)])]

    def stage(first: int, last: int) -> Stage:
        def forward(x: Tensor) -> Tensor:
            # Blocks are not skipped at random: few are trained, and not for long.
            return network.run(x, first, last, drop=False)

        modules: list[nn.Module] = [*network.body._blocks[first:last]]
        if not first:
            modules += [network.body._conv_stem, network.body._bn0]
        if last == len(blocks):
            modules += [network.body._conv_head, network.body._bn1]
        return Stage(forward, tuple(modules))

    return [stage(first, last) for first, last in borders]


def _inception_stages(network: InceptionBN) -> list[Stage]:
    """Return the stem, then every inception block as a stage."""
    blocks = [network.get_submodule(f"inception_{name}") for name in BLOCKS]
    stem = (network.conv1_7x7_s2, network.conv2_3x3_reduce, network.conv2_3x3)
    stages = [Stage(block, (block,)) for block in blocks]
    last = stages[-1]
    stages[-1] = Stage(lambda x: last.forward(x).mean((2, 3)), last.modules)
    return [Stage(network.stem, stem), *stages]


class Trunk(nn.Module):
    """The first `count` stages of a backbone: pictures → activations (B, …).

    Its modules are the backbone's own; do not copy it, since its forward would run the original.
    """

    def __init__(self, backbone: Backbone, count: int) -> None:
        super().__init__()
        stages = split(backbone)[:count]
        self._forwards = [stage.forward for stage in stages]
        self.owned = nn.ModuleList(module for stage in stages for module in stage.modules)
        # Such as the positions of a transformer's patches, which are added in its first stage.
        self.bare = nn.ParameterList(backbone.network.parameters(recurse=False))

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the activations in front of the next stage."""
        for forward in self._forwards:
            inputs = forward(inputs)
        return inputs


class Top(nn.Module):
    """An embedder without its first `count` stages: their activations → raw embeddings (B, dim)."""

    def __init__(self, embedder: Embedder, count: int) -> None:
        super().__init__()
        self.embedder = embedder
        self.count = count

    def forward(self, activations: Tensor) -> Tensor:
        """Return raw embeddings (B, dim)."""
        embeddings: Tensor = self.embedder.head(self.embedder.to_head(self.features(activations)))
        return embeddings

    def features(self, activations: Tensor) -> Tensor:
        """Return the backbone's features (B, F)."""
        backbone = self.embedder.backbone

        def last_stages(x: Tensor) -> Tensor:
            # Split at every call: a copy of this module must run the copy of the embedder.
            for stage in split(backbone)[self.count :]:
                x = stage.forward(x)
            return x

        return backbone.in_precision(last_stages, activations)


@torch.no_grad()
def stages_agree(backbone: Backbone, size: int) -> bool:
    """Return whether the stages one after the other give the network's features, on an example."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(2, backbone.channels, size, size, generator=generator)
    inputs = inputs.to(device_of(backbone))
    try:
        with evaluating(backbone):
            expected, found = backbone.network(inputs), inputs
            for stage in split(backbone):
                found = stage.forward(found)
    except (AttributeError, RuntimeError, TypeError, ValueError):  # another structure after all
        return False
    return found.shape == expected.shape and torch.allclose(found, expected, atol=1e-4, rtol=1e-4)


def check_unfreeze(backbone: Backbone, asked: str | None, *, size: int) -> str:
    """Return how many stages are trained, as a number or ALL; None is USUAL where that works.

    A module from Python is trained whole unless a number is asked for. size: of the pictures.
    UsageError for a number that the network does not allow.
    """
    if asked == ALL or (asked is None and backbone.name == OWN):
        return ALL
    count = len(split(backbone))
    works = count > 1 and stages_agree(backbone, size)
    if asked is None:
        return str(min(USUAL, count - 1)) if works else ALL
    if not asked.isdecimal() or not int(asked):
        raise UsageError(
            f"--unfreeze is {asked}; expected {ALL} or a number of stages from 1 up (--preset "
            "frozen trains the head alone)"
        )
    if not works:
        raise UsageError(f"{backbone.name} has no known stages; use --unfreeze {ALL}")
    if int(asked) > count:
        raise UsageError(f"--unfreeze is {asked}, but {backbone.name} has {count} stages")
    return asked if int(asked) < count else ALL


def fixed_count(backbone: Backbone, unfreeze: str | None) -> int:
    """Return how many stages are in front of those that are trained."""
    if unfreeze is None or unfreeze == ALL:
        return 0
    return len(split(backbone)) - int(unfreeze)


def freeze_first(embedder: Embedder, unfreeze: str | None) -> None:
    """Freeze the stages in front of those that are trained."""
    if count := fixed_count(embedder.backbone, unfreeze):
        trunk = Trunk(embedder.backbone, count)
        embedder.keep_fixed(trunk.owned, trunk.bare)
