"""Networks of timm by their names: ViT, DINOv2, CLIP, SigLIP, ConvNeXt, Swin, ResNet, ….

The preprocessing comes from the network's own configuration. Weights come from the hub where it can
be reached, or from a file of timm; a network can also start at random.
"""

import copy
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from nofuss.config import Preprocessing
from nofuss.errors import UsageError, unknown_name
from nofuss.model.modes import evaluating
from nofuss.model.tensors import fill, read_tensors

HUB_SECONDS = 5.0
"""How long to wait for the hub's first answer; its own client tries for a minute."""
HUB_FILES = ("model.safetensors", "open_clip_model.safetensors", "pytorch_model.bin")


class TimmNetwork(NamedTuple):
    """A network without its classifier, the width of its features, and its preprocessing."""

    network: nn.Module
    features: int
    preprocessing: Preprocessing


def timm_network(
    name: str, *, channels: int, file: Path | None, pretrained: bool, size: int | None
) -> TimmNetwork:
    """Build timm:NAME, pooled. size: of its pictures, if it is not to be the network's own."""
    timm = _imported(name)
    model_name = name.removeprefix("timm:")
    if not timm.is_model(model_name):
        raise unknown_name("timm model", model_name, timm.list_models())
    if pretrained:
        _check_hub(timm, model_name)
    try:
        network = timm.create_model(
            model_name, pretrained=pretrained, num_classes=0, in_chans=channels
        )
    except Exception as error:  # the hub's client raises many types
        raise _no_download(name, error) from None
    if file:
        tensors = _without_classifier(read_tensors(file), network)
        fill(network, tensors, source=file)
    data_config = timm.data.resolve_model_data_config(network)
    own_size = data_config["input_size"][-1]
    size = size or own_size
    if size != own_size:
        _set_size(name, network, size, own_size)
    preprocessing = Preprocessing(
        size=size,
        resize=round(size / data_config["crop_pct"]),
        squash=data_config.get("crop_mode") == "squash",
        mode="L" if channels == 1 else "RGB",
        mean=tuple(255 * m for m in data_config["mean"][:channels]),
        std=tuple(255 * s for s in data_config["std"][:channels]),
    )
    return TimmNetwork(network, _width(network, channels, size), preprocessing)


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


def _without_classifier(tensors: dict[str, Tensor], network: nn.Module) -> dict[str, Tensor]:
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
        _width(network, network.pretrained_cfg.get("input_size", (3,))[0], size)
    except (AssertionError, RuntimeError, TypeError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise UsageError(
            f"{name} can't take pictures of {size} pixels ({reason}); leave --size out for its "
            f"own {own_size}"
        ) from None


@torch.no_grad()
def _width(network: nn.Module, channels: int, size: int) -> int:
    """Return the length of the features: measured, since some networks end with more layers.

    On the meta device, where nothing is computed, if the network's operations allow it.
    """
    with suppress(NotImplementedError, RuntimeError):
        planned = copy.deepcopy(network).to("meta").eval()
        return int(planned(torch.empty(1, channels, size, size, device="meta")).shape[1])
    with evaluating(network):
        return int(network(torch.zeros(1, channels, size, size)).shape[1])
