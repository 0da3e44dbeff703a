"""The stages of timm's networks, by the names that its families of networks share.

timm builds most networks in one of five ways; each gives a list of (forward, modules). Whether they
really give the network's features is checked on an example, see `stages_agree`.
"""

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn

Found = list[tuple[Callable[[Tensor], Tensor], list[nn.Module]]]


def timm_stages(network: Any) -> Found:
    """Return the stages of a network of timm; empty if its structure is not known."""
    names = {name for name, _ in network.named_children()}
    if {"patch_embed", "blocks", "norm"} <= names and hasattr(network, "_pos_embed"):
        return _transformer(network)
    if {"patch_embed", "layers", "norm"} <= names:  # Swin
        return _stages(network, [network.patch_embed], network.layers, [network.norm])
    if {"stem", "stages"} <= names and hasattr(network, "norm_pre"):  # ConvNeXt
        return _stages(network, [network.stem], network.stages, [network.norm_pre])
    if {"conv1", "bn1", "maxpool", "layer4"} <= names:  # ResNet
        front = [network.conv1, network.bn1, network.act1, network.maxpool]
        layers = [network.layer1, network.layer2, network.layer3, network.layer4]
        return _stages(network, front, layers, [])
    if {"conv_stem", "bn1", "blocks"} <= names:  # EfficientNet, MobileNet
        end = [network.conv_head, network.bn2] if "bn2" in names else []
        return _stages(network, [network.conv_stem, network.bn1], network.blocks, end)
    return []


def _stages(
    network: Any, front: list[nn.Module], stages: Iterable[nn.Module], end: list[nn.Module]
) -> Found:
    """Return stages, the first with what comes before them and the last with what comes after."""
    first, *middle, last = stages
    inner = [first, *middle, last]
    behind = [child for child in network.children() if not _within(inner + front, child)]
    return [
        (_chain(*front, first), [*front, first]),
        *((stage, [stage]) for stage in middle),
        (_chain(last, *end, network.forward_head), [last, *behind]),
    ]


def _transformer(network: Any) -> Found:
    """Return the blocks of a vision transformer (ViT, DeiT, DINOv2, CLIP, SigLIP) as stages."""

    def embed(x: Tensor) -> Tensor:
        x = network._pos_embed(network.patch_embed(x))
        result: Tensor = network.norm_pre(network.patch_drop(x))
        return result

    first, *middle, last = network.blocks
    front = [network.patch_embed, network.pos_drop, network.patch_drop, network.norm_pre]
    taken = [*front, first, *middle, last]
    behind = [child for child in network.children() if not _within(taken, child)]
    return [
        (_chain(embed, first), [*front, first]),
        *((block, [block]) for block in middle),
        (_chain(last, network.norm, network.forward_head), [last, *behind]),
    ]


def _chain(*layers: Callable[[Any], Any]) -> Callable[[Tensor], Tensor]:
    def forward(x: Tensor) -> Tensor:
        for layer in layers:
            x = layer(x)
        return x

    return forward


def _within(taken: list[nn.Module], child: nn.Module) -> bool:
    """Return whether a child is one of these modules or contains one of them."""
    modules = {id(module) for module in child.modules()}
    return any(id(module) in modules for module in taken)
