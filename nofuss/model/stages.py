"""A network as a sequence of stages: the first ones can stay fixed while the last ones are trained.

Early stages learn edges and textures that new pictures share, and cost most of the time; the last
ones cost little and gain most. `split` finds the stages of a network, `Trunk` is the fixed part in
front, `Top` an embedder whose inputs are the trunk's activations.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from nofuss.distributed.device import device_of
from nofuss.errors import UsageError
from nofuss.model.backbones import OWN, Backbone, ConvNet, evaluating
from nofuss.model.embedder import Embedder
from nofuss.model.inception import BLOCKS, InceptionBN
from nofuss.model.lite import EfficientNetLite
from nofuss.model.timm import is_timm

ALL = "all"
USUAL = 2
"""Stages that are trained where the user names no number."""


@dataclass(frozen=True)
class Stage:
    """Consecutive layers of a network: what they compute, and with which modules.

    The last stage, which is never fixed, need not name all of its modules.
    """

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
    if is_timm(backbone.name) and (found := _timm_stages(network)):
        return found
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

        front = () if first else (network.body._conv_stem, network.body._bn0)
        return Stage(forward, (*front, *network.body._blocks[first:last]))

    return [stage(first, last) for first, last in borders]


def _inception_stages(network: InceptionBN) -> list[Stage]:
    """Return the stem, then every inception block as a stage."""
    blocks = [network.get_submodule(f"inception_{name}") for name in BLOCKS]
    stem = (network.conv1_7x7_s2, network.conv2_3x3_reduce, network.conv2_3x3)
    stages = [Stage(block, (block,)) for block in blocks]
    last = stages[-1]
    stages[-1] = Stage(lambda x: last.forward(x).mean((2, 3)), last.modules)
    return [Stage(network.stem, stem), *stages]


def _timm_stages(network: Any) -> list[Stage]:
    """Return the stages of a network of timm; none if it is not built in one of five usual ways.

    Whether they really give the network's features is checked on an example, see `stages_agree`.
    """
    names = {name for name, _ in network.named_children()}
    end: list[Any] = [network.forward_head] if hasattr(network, "forward_head") else []
    if {"patch_embed", "blocks", "norm"} <= names and hasattr(network, "_pos_embed"):

        def embed(x: Tensor) -> Tensor:
            x = network._pos_embed(network.patch_embed(x))
            result: Tensor = network.norm_pre(network.patch_drop(x))
            return result

        modules = (network.patch_embed, network.pos_drop, network.patch_drop, network.norm_pre)
        return _framed(Stage(embed, modules), network.blocks, [network.norm, *end])
    if {"patch_embed", "layers", "norm"} <= names:  # Swin
        return _framed(_sequence([network.patch_embed]), network.layers, [network.norm, *end])
    if {"stem", "stages"} <= names and hasattr(network, "norm_pre"):  # ConvNeXt
        return _framed(_sequence([network.stem]), network.stages, [network.norm_pre, *end])
    if {"conv1", "bn1", "maxpool", "layer4"} <= names:  # ResNet
        front = _sequence([network.conv1, network.bn1, network.act1, network.maxpool])
        layers = [network.layer1, network.layer2, network.layer3, network.layer4]
        return _framed(front, layers, end)
    if {"conv_stem", "bn1", "blocks"} <= names:  # EfficientNet, MobileNet
        last = [network.conv_head, network.bn2] if "bn2" in names else []
        front = _sequence([network.conv_stem, network.bn1])
        return _framed(front, network.blocks, [*last, *end])
    return []


def _framed(
    front: Stage, stages: Iterable[nn.Module], end: Sequence[Callable[[Tensor], Tensor]]
) -> list[Stage]:
    """Return stages, the first with what comes before them and the last with what comes after."""
    first, *middle, last = stages

    def begin(x: Tensor) -> Tensor:
        result: Tensor = first(front.forward(x))
        return result

    def finish(x: Tensor) -> Tensor:
        x = last(x)
        for layer in end:
            x = layer(x)
        return x

    return [
        Stage(begin, (*front.modules, first)),
        *(Stage(stage, (stage,)) for stage in middle),
        Stage(finish, (last,)),
    ]


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
