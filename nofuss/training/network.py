"""The network of a run: its backbone by name, for pictures of a size, and what of it is trained."""

import copy
import logging
from dataclasses import replace

import torch

from nofuss.config import Options, Preset, Settings
from nofuss.data.collection import Collection
from nofuss.distributed.device import choose_device, device_of
from nofuss.errors import UsageError
from nofuss.model.backbones import OWN, PRETRAINED, Backbone, check_precision
from nofuss.model.embedder import Embedder, build_embedder
from nofuss.model.lora import add_adapters
from nofuss.model.stages import ALL, freeze_first
from nofuss.training.settings import DIM, PRESETS, usual_size

log = logging.getLogger("nofuss")
ZOOM, LIGHT = 0.25, 0.25
"""Random crops for the last stages show this fraction of a picture or more, in light that changes
by this fraction or less (docs/lab)."""


def build_model(
    asked: Options | Settings,
    preset: Preset,
    collection: Collection,
    *,
    side: int | None = None,
    backbone: Backbone | None = None,
) -> Embedder:
    """Build the embedder at its start; its backbone says how its pictures are prepared.

    side: of the pictures, where the small convnet is to see them whole. backbone: of the caller,
    instead of one by name.
    """
    kind = "pictures" if collection.vectors is None else "vectors"
    name = OWN if backbone else asked.backbone or PRESETS[preset]["backbone"]
    if (name == "identity") != (kind == "vectors"):
        raise UsageError(f"--backbone {name} does not fit {kind}; leave it out")
    weights = asked.weights or (None if name == "inception-bn" else PRETRAINED)
    if weights is None:
        log.warning(
            "inception-bn starts at random: its ImageNet weights are in no package; give a public "
            "BN-Inception file with --weights, as the paper starts from one"
        )
    size = asked.size or usual_size(asked, preset, name)
    channels = None if name != "convnet" else 3  # as the network has it
    if collection.vectors is not None:
        channels = int(collection.vectors.shape[1])
    elif name == "convnet" and collection.images is not None and collection.images.ndim == 3:
        channels = 1  # gray arrays
    embedder = build_embedder(
        backbone or name,
        dim=asked.dim or PRESETS[preset].get("dim", DIM),
        channels=channels,
        weights=weights,
        root=preset in ("frozen", "finetune"),  # pooled activations: positive and heavy-tailed
        size=size,
        seed=asked.seed or 0,
    )
    device, precision = choose_device(asked.device or "auto"), asked.precision or "fp32"
    check_precision(precision, device)
    embedder.to(device).backbone.precision = precision
    preprocessing = embedder.backbone.preprocessing
    if preprocessing is None:
        return embedder
    if name == "convnet":
        side = size or max(16, min(side or preprocessing.size, 64))
        preprocessing = replace(preprocessing, size=side, resize=side)
    elif size:
        resize = round(size * preprocessing.resize / preprocessing.size)
        preprocessing = replace(preprocessing, size=size, resize=resize)
    if size:
        _check_size(embedder.backbone, size, "--size")
    embedder.backbone.preprocessing = preprocessing
    return embedder


def apply_settings(settings: Settings, embedder: Embedder) -> None:
    """Freeze what is not trained, add adapters, and say how training sees its pictures."""
    backbone, preprocessing = embedder.backbone, embedder.backbone.preprocessing
    if settings.freeze_batch_norm:
        embedder.freeze_batch_norm()
    if preprocessing is None:
        return
    backbone.mirror = settings.mirror
    freeze_first(embedder, settings.unfreeze)
    if settings.lora is not None:
        add_adapters(embedder, settings.lora, unfreeze=settings.unfreeze, seed=settings.seed)
    if settings.unfreeze not in (None, ALL) and preprocessing.flip:
        preprocessing = replace(preprocessing, zoom=ZOOM, light=LIGHT)
    if settings.train_size is not None:
        if settings.train_size > preprocessing.size:
            raise UsageError(
                f"--train-size is {settings.train_size}, but the network searches pictures of "
                f"{preprocessing.size} pixels; give a smaller one, or raise --size"
            )
        _check_size(backbone, settings.train_size, "--train-size")
    backbone.preprocessing = replace(preprocessing, train_size=settings.train_size)


@torch.no_grad()
def _check_size(backbone: Backbone, size: int, flag: str) -> None:
    """Raise UsageError if the network can't take pictures of that size."""
    network = copy.deepcopy(backbone.network).eval()
    try:
        network(torch.zeros(1, backbone.channels, size, size, device=device_of(network)))
    except (AssertionError, RuntimeError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UsageError(
            f"{backbone.name} can't take pictures of {size} pixels ({reason}); try another {flag}"
        ) from None
