"""Networks of timm by their names: ViT, DINOv2, CLIP, SigLIP, ConvNeXt, Swin, ResNet, ….

The preprocessing comes from the network's own configuration. Weights come from the hub where it can
be reached, or from a file of timm; a network can also start at random. The stages of a network are
found by the names that timm's families of networks share.
"""

import copy
from collections.abc import Callable, Iterable
from contextlib import suppress
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from nofuss.config import Preprocessing
from nofuss.errors import UsageError, unknown_name

HUB_SECONDS = 5.0
"""How long to wait for the hub's first answer; its own client tries for a minute."""
HUB_FILES = ("model.safetensors", "open_clip_model.safetensors", "pytorch_model.bin")
Found = list[tuple[Callable[[Tensor], Tensor], list[nn.Module]]]


def create_timm(name: str, *, channels: int, pretrained: bool) -> nn.Module:
    """Build timm:NAME, pooled, without its classifier."""
    timm = _imported(name)
    model_name = name.removeprefix("timm:")
    if not timm.is_model(model_name):
        raise unknown_name("timm model", model_name, timm.list_models())
    if pretrained:
        _check_hub(timm, model_name)
    try:
        network: nn.Module = timm.create_model(
            model_name, pretrained=pretrained, num_classes=0, in_chans=channels
        )
    except Exception as error:  # the hub's client raises many types
        raise _no_download(name, error) from None
    return network


def timm_preprocessing(
    name: str, network: nn.Module, *, channels: int, size: int | None
) -> Preprocessing:
    """Return the preprocessing that timm states for a network.

    size: of its pictures, if it is not to be the network's own; the network is set to it.
    """
    stated = _imported(name).data.resolve_model_data_config(network)
    own_size = stated["input_size"][-1]
    size = size or own_size
    if size != own_size:
        _set_size(name, network, size, own_size)
    return Preprocessing(
        size=size,
        resize=round(size / stated["crop_pct"]),
        squash=stated.get("crop_mode") == "squash",
        mode="L" if channels == 1 else "RGB",
        mean=tuple(255 * m for m in stated["mean"][:channels]),
        std=tuple(255 * s for s in stated["std"][:channels]),
    )


def _imported(name: str) -> Any:
    try:
        import timm
    except (ImportError, RuntimeError) as error:  # RuntimeError: torchvision of another torch
        raise UsageError(
            f"{name} can't import timm ({error}); pip install 'nofuss[timm]', "
            f"with the torchvision made for torch {torch.__version__}"
        ) from None
    return timm


def _check_hub(timm: Any, model_name: str) -> None:
    """Raise UsageError if the weights are not on this machine and the hub does not answer."""
    hub = import_module("huggingface_hub")
    settings = timm.get_pretrained_cfg(model_name, allow_unregistered=True)
    hub_id = getattr(settings, "hf_hub_id", None)
    if not hub_id or settings.file or settings.state_dict:
        return
    if any(isinstance(hub.try_to_load_from_cache(hub_id, each), str) for each in HUB_FILES):
        return
    try:
        hub.utils.get_session().head(hub.constants.ENDPOINT, timeout=HUB_SECONDS)
    except Exception as error:  # of whichever HTTP library the client uses
        raise _no_download(f"timm:{model_name}", error) from None


def _no_download(name: str, error: Exception) -> UsageError:
    reason = str(error).partition("\n")[0] or type(error).__name__
    return UsageError(
        f"{name} can't be downloaded ({reason}); download its file elsewhere and give it with "
        "--weights"
    )


def without_classifier(tensors: dict[str, Tensor], network: nn.Module) -> dict[str, Tensor]:
    """Leave out the classifier of a file of timm, which the network is built without."""
    named = getattr(network, "pretrained_cfg", {}).get("classifier") or ()
    names = (named,) if isinstance(named, str) else tuple(named)
    wanted = network.state_dict().keys()
    prefixes = tuple(f"{name}." for name in names)
    return {k: t for k, t in tensors.items() if k in wanted or not k.startswith(prefixes)}


def _set_size(name: str, network: Any, size: int, own_size: int) -> None:
    """Set the size of the pictures; a transformer's positions are interpolated."""
    try:
        if hasattr(network, "set_input_size"):
            network.set_input_size(img_size=(size, size))
        feature_width(network, network.pretrained_cfg.get("input_size", (3,))[0], size)
    except (AssertionError, RuntimeError, TypeError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise UsageError(
            f"{name} can't take pictures of {size} pixels ({reason}); leave --size out for its "
            f"own {own_size}"
        ) from None


@torch.no_grad()
def feature_width(network: nn.Module, channels: int, size: int) -> int:
    """Return the length of the features: measured, since some networks end with more layers.

    On the meta device, where nothing is computed, if the network's operations allow it.
    """
    planned = copy.deepcopy(network).eval()
    with suppress(NotImplementedError, RuntimeError):
        shape = planned.to("meta")(torch.empty(1, channels, size, size, device="meta")).shape
        return int(shape[1])
    planned = copy.deepcopy(network).eval()
    return int(planned(torch.zeros(1, channels, size, size)).shape[1])


# Stages


def timm_stages(network: Any) -> Found:
    """Return the stages of a network of timm, (forward, modules); empty if it is not known.

    timm builds most networks in one of five ways. Whether the stages really give the network's
    features is checked on an example, see `stages.stages_agree`.
    """
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
