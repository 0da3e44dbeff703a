"""The network of a run: its backbone by name, for pictures of a size, and what of it is trained."""

import logging
from dataclasses import replace

from nofuss.config import Options, Preset, Settings
from nofuss.data.collection import Collection
from nofuss.distributed import processes
from nofuss.distributed.device import choose_device
from nofuss.errors import UsageError
from nofuss.model.backbones import (
    BESIDE,
    OWN,
    PRETRAINED,
    PRETRAINED_NETWORKS,
    SEVERAL,
    Backbone,
    build_backbone,
    check_precision,
    check_side,
    is_installed,
    is_non_commercial,
    licences,
    set_side,
)
from nofuss.model.embedder import Embedder, build_embedder, for_inference
from nofuss.model.features import measured_speed
from nofuss.model.lora import add_adapters
from nofuss.model.stages import ALL, freeze_first
from nofuss.training.settings import DIM, PRESETS, usual_backbone, usual_size

log = logging.getLogger("nofuss")
AUTO, BUDGET_MINUTES = "auto", 30.0
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
    name = OWN if backbone else asked.backbone or usual_backbone(asked, preset)
    if (name == "identity") != (kind == "vectors"):
        raise UsageError(f"--backbone {name} does not fit {kind}; leave it out")
    if name == AUTO:
        assert isinstance(asked, Options)  # settings have names
        name = _affordable(asked, preset, collection)
    elif isinstance(asked, Options) and asked.budget_minutes is not None:
        raise UsageError("--budget-minutes is for --backbone auto; add it, or drop the budget")
    if SEVERAL in name or BESIDE in name:
        for option in ("weights", "size", "train_size"):
            if getattr(asked, option) is not None:
                raise UsageError(f"--{option.replace('_', '-')} is for one network, not {name}")
        if preset != "frozen":
            raise UsageError(f"{name}: several networks stay as they are; drop --preset {preset}")
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
    for network, words in licences(embedder.backbone).items() if weights == PRETRAINED else ():
        if is_non_commercial(words):
            log.warning(f"the weights of {network} are not for commercial use: {words}")
    device, precision = choose_device(asked.device or "auto"), asked.precision or "fp32"
    check_precision(precision, device)
    embedder.to(device).backbone.precision = precision
    preprocessing = embedder.backbone.preprocessing
    if name == "convnet" and preprocessing is not None:
        side = size or max(16, min(side or preprocessing.size, 64))
        embedder.backbone.preprocessing = replace(preprocessing, size=side, resize=side)
        check_side(embedder.backbone, side)
    elif size and preprocessing is not None:
        set_side(embedder.backbone, size)
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
        check_side(backbone, settings.train_size, "--train-size")
    backbone.preprocessing = replace(preprocessing, train_size=settings.train_size)


def _affordable(asked: Options, preset: Preset, collection: Collection) -> str:
    """Return the installed networks that compute their features of all pictures within a time.

    The fastest come first, and one of them always does.
    """
    minutes = BUDGET_MINUTES if asked.budget_minutes is None else asked.budget_minutes
    mirror = asked.mirror is not False

    def choose() -> str:
        spent = {}
        for name in filter(is_installed, PRETRAINED_NETWORKS):
            embedder = build_embedder(build_backbone(name), mirror=mirror)
            backbone = for_inference(embedder).backbone
            spent[name] = len(collection) * backbone.views / measured_speed(backbone) / 60
        if not spent:
            raise UsageError(f"--backbone {AUTO} finds no weights here; see nofuss backbones")
        taken = sorted(spent, key=spent.__getitem__)
        while len(taken) > 1 and sum(spent[name] for name in taken) > minutes:
            taken.pop()
        log.info(
            f"trying {', '.join(taken)}: at most {sum(spent[name] for name in taken):.1f} minutes "
            f"for the features of {len(collection):,} pictures (--budget-minutes {minutes:g})"
        )
        return SEVERAL.join(name for name in spent if name in taken)

    return processes.from_first(choose)
