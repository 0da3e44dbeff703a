"""Networks of timm by their names: ViT, DINOv2, CLIP, SigLIP, ConvNeXt, Swin, ResNet, ….

The preprocessing comes from the network's own configuration. Weights come from the hub where it can
be reached, or from a file of timm; a network can also start at random.
"""

from importlib import import_module
from typing import Any

import torch
from torch import nn

from nofuss.config import Preprocessing
from nofuss.errors import UsageError, unknown_name


def create_timm(name: str, *, channels: int, pretrained: bool) -> nn.Module:
    """Build timm:NAME, pooled, without its classifier."""
    try:
        import timm
    except (ImportError, RuntimeError) as error:  # RuntimeError: torchvision of another torch
        raise UsageError(
            f"{name} can't import timm ({error}); pip install 'nofuss[timm]', "
            f"with the torchvision made for torch {torch.__version__}"
        ) from None
    model_name = name.removeprefix("timm:")
    if not timm.is_model(model_name):
        raise unknown_name("timm model", model_name, timm.list_models())
    try:
        network: nn.Module = timm.create_model(
            model_name, pretrained=pretrained, num_classes=0, in_chans=channels
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
