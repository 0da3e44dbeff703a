"""The stages of timm's networks, by the names that its families of networks share.

timm builds most networks in one of four ways; each gives a list of (forward, modules). Whether they
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
    if {"stem", "stages", "head"} <= names and hasattr(network, "norm_pre"):
        return _staged(network)
    if {"conv1", "bn1", "layer1", "layer4"} <= names:
        return _residual(network)
    if {"conv_stem", "blocks", "conv_head", "bn2"} <= names:
        return _efficient(network)
    return []


def _chain(*layers: Callable[[Any], Any]) -> Callable[[Tensor], Tensor]:
    def forward(x: Tensor) -> Tensor:
        for layer in layers:
            x = layer(x)
        return x

    return forward


def _rest(network: nn.Module, taken: Iterable[nn.Module]) -> list[nn.Module]:
    """Return the children of a network that are not among the taken ones."""
    names = {id(module) for module in taken}
    return [child for child in network.children() if id(child) not in names]


def _transformer(network: Any) -> Found:
    """Vision transformers (ViT, DeiT, DINOv2, CLIP, SigLIP): every block is a stage."""

    def embed(x: Tensor) -> Tensor:
        x = network._pos_embed(network.patch_embed(x))
        result: Tensor = network.norm_pre(network.patch_drop(x))
        return result

    first, *middle, last = network.blocks
    tail = [network.norm, network.fc_norm, network.head_drop, network.head]
    if getattr(network, "attn_pool", None) is not None:
        tail.append(network.attn_pool)
    front = [m for m in _rest(network, [*tail, network.blocks]) if m is not first]
    return [
        (_chain(embed, first), [*front, first]),
        *((block, [block]) for block in middle),
        (_chain(last, network.norm, network.forward_head), [last, *tail]),
    ]


def _staged(network: Any) -> Found:
    """ConvNeXt and its relatives: a stem, stages, a head."""
    first, *middle, last = network.stages
    return [
        (_chain(network.stem, first), [network.stem, first]),
        *((stage, [stage]) for stage in middle),
        (
            _chain(last, network.norm_pre, network.forward_head),
            [last, network.norm_pre, network.head],
        ),
    ]


def _residual(network: Any) -> Found:
    """ResNets: four layers behind a stem."""
    stem = [network.conv1, network.bn1, network.act1, network.maxpool]
    last = network.layer4
    return [
        (_chain(*stem, network.layer1), [*stem, network.layer1]),
        *((layer, [layer]) for layer in (network.layer2, network.layer3)),
        (_chain(last, network.forward_head), _rest(network, [*stem, *_first_layers(network)])),
    ]


def _first_layers(network: Any) -> list[nn.Module]:
    return [network.layer1, network.layer2, network.layer3]


def _efficient(network: Any) -> Found:
    """EfficientNets and MobileNets: a stem, groups of blocks, a last convolution."""
    first, *middle, last = network.blocks
    stem, top = [network.conv_stem, network.bn1], [network.conv_head, network.bn2]
    return [
        (_chain(*stem, first), [*stem, first]),
        *((group, [group]) for group in middle),
        (_chain(last, *top, network.forward_head), [last, *top]),
    ]
