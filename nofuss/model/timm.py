"""Networks of timm: ViT, DINOv2, CLIP, SigLIP, ConvNeXt, Swin, ResNet, ….

They are named as in timm, `timm:NAME`, or in short for the ones that are mostly meant. Size of the
pictures, preprocessing and licence come from the network's own configuration in timm. Weights come
from the hub where it can be reached, or from a file of timm; a network can also start at random.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import nn

from nofuss.config import Preprocessing
from nofuss.errors import UsageError, unknown_name

TIMM = "timm:"
SIDE = "@"
"""Stands between a name and the side of the pictures, where that is not the network's own."""


class Short(NamedTuple):
    """What a short name stands for."""

    model: str
    """The name in timm, with the tag of its weights."""
    pool: str = ""
    """How its patch tokens become one vector, where that is not timm's own way."""


SHORT = {
    "clip-base": Short("vit_base_patch16_clip_224.openai"),
    "convnext-tiny": Short("convnext_tiny.in12k"),
    "dinov2-base": Short("vit_base_patch14_reg4_dinov2.lvd142m"),
    "dinov2-small": Short("vit_small_patch14_reg4_dinov2.lvd142m"),
    "dinov3-base": Short("vit_base_patch16_dinov3.lvd1689m", pool="token"),
    "dinov3-small": Short("vit_small_patch16_dinov3.lvd1689m", pool="token"),
    "mobilenetv4": Short("mobilenetv4_conv_medium.e500_r256_in1k"),
    "resnet50": Short("resnet50.a1_in1k"),
    "siglip2-base": Short("vit_base_patch16_siglip_224.v2_webli"),
}
"""Networks by what people call them. DINO's and CLIP's class token is what they were trained to
compare pictures by, SigLIP's is its attention pooling; of convolutions it is the mean."""


def is_timm(name: str) -> bool:
    """Return whether timm has the network of that name."""
    return name.startswith(TIMM) or name.partition(SIDE)[0] in SHORT


def timm_config(name: str) -> Any:
    """Return what timm states about a network's weights, or None: licence, size, where they are."""
    return import_timm(name).get_pretrained_cfg(_short(name).model, allow_unregistered=False)


def has_weights(name: str) -> bool:
    """Return whether the weights of a network have been downloaded, and timm can be imported."""
    if any(find_spec(package) is None for package in ("timm", "huggingface_hub")):
        return False
    try:
        where = getattr(timm_config(name), "hf_hub_id", None)
    except UsageError:
        return False
    look = import_module("huggingface_hub").try_to_load_from_cache
    files = ("model.safetensors", "open_clip_model.safetensors", "pytorch_model.bin")
    return where is not None and any(isinstance(look(where, file), str) for file in files)


def import_timm(name: str) -> Any:
    """Return the package; UsageError if it is not installed."""
    try:
        return import_module("timm").models
    except (ImportError, RuntimeError) as error:  # RuntimeError: torchvision of another torch
        raise UsageError(
            f"{name} can't import timm ({error}); pip install 'nofuss[timm]', "
            f"with the torchvision made for torch {torch.__version__}"
        ) from None


def _short(name: str) -> Short:
    name = name.partition(SIDE)[0]
    return SHORT.get(name) or Short(name.removeprefix(TIMM))


def create_timm(name: str, *, channels: int, pretrained: bool) -> nn.Module:
    """Build a network, pooled, without its classifier."""
    timm, (model, pool) = import_timm(name), _short(name)
    if not timm.is_model(model):
        raise unknown_name("timm model", model, timm.list_models())
    pooled = {"global_pool": pool} if pool else {}
    try:
        network: nn.Module = timm.create_model(
            model, pretrained=pretrained, num_classes=0, in_chans=channels, **pooled
        )
    except Exception as error:  # the hub's client raises many types
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise UsageError(
            f"{name} can't be downloaded ({reason}); download its file elsewhere and give it with "
            "--weights"
        ) from None
    return network


def set_size(network: Any, channels: int, size: int | None) -> Preprocessing:
    """Return the preprocessing that timm states for a network.

    size: of its pictures, if it is not to be the network's own; a transformer's positions are
    interpolated.
    """
    stated = import_module("timm.data").resolve_model_data_config(network)
    own_size = stated["input_size"][-1]
    size = size or own_size
    if size != own_size and hasattr(network, "set_input_size"):
        try:
            network.set_input_size(img_size=(size, size))
        except (AssertionError, RuntimeError, ValueError) as error:
            raise UsageError(
                f"it can't take pictures of {size} pixels ({error}); try another"
            ) from None
    return Preprocessing(
        size=size,
        resize=round(size / stated["crop_pct"]),
        squash=stated.get("crop_mode") == "squash",
        mode="L" if channels == 1 else "RGB",
        mean=tuple(255 * m for m in stated["mean"][:channels]),
        std=tuple(255 * s for s in stated["std"][:channels]),
    )
