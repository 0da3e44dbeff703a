"""From what was asked to what a run is made with: `resolve` fills in the settings.

Two things follow later or before: network.py finds the network that is asked for, and head.py the
rates of a head on fixed features, from the number of items.

In layers, each over the one before: what all have in common, the preset, what follows from the
data, the backbone and the loss, and what the user has asked. Then one table says what each option
needs to have any effect.
"""

import logging
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any, NamedTuple

from nofuss.config import Options, Preset, Settings, check_limits
from nofuss.data.open import TEST_FRACTION, TrainingData
from nofuss.errors import RunError, UsageError
from nofuss.losses import INSTANCE_LOSSES, PROXY_LOSSES
from nofuss.losses.instance_loss import InstanceLoss
from nofuss.model.backbones import BESIDE, OWN, Backbone
from nofuss.model.stages import ALL, check_unfreeze

log = logging.getLogger("nofuss")
DIM = 512
"""Default dimensions of a head on features (docs/lab): an item of 512 takes 2 KB in the index."""
SMALL_SIDE = 96
"""Pictures with a shorter side get the small convnet, not a network with ImageNet's weights."""
FINETUNE_SIZE = 288
"""Side of the pictures that EfficientNet-Lite's last stages are trained on: that gains as much as
training them does (docs/lab), and cached activations make it affordable."""
LORA_LR = 1e-3
"""Rate of low-rank adapters, which start at zero and need more epochs."""
MORE_EPOCHS = 12
"""Of adapters, and of a module from Python, whose weights may be random."""

Layer = dict[str, Any]
BASE: Layer = {
    "loss": "proxy-nca",
    "assignment": "static",
    "head": "auto",
    "optimizer": "adam",
}
# A head on fixed features, from its closed form; how long and how fast it moves where it is trained
# follows from the number of items, see head.py.
_HEAD: Layer = {
    "start": "whitened",
    "batch_size": 128,
    "lr": 0.0,
    "schedule": "cosine",
    "scale": 16.0,
}
PRESETS: dict[Preset, Layer] = {
    # Two networks, each with one view of a picture, find more than one with its mirror image, in
    # about the time (docs/lab).
    "frozen": _HEAD | {"backbone": f"efficientnet-lite0{BESIDE}efficientnet-lite1"},
    "vectors": _HEAD | {"backbone": "identity"},
    "finetune": {
        "backbone": "efficientnet-lite0",
        "start": "whitened",
        "val_fraction": 0.1,
        "epochs": 4,  # more fit the training classes and lose new ones (docs/lab)
        "batch_size": 64,
        "lr": 2e-4,
        "head_lr": 2e-4,
        "proxy_lr": 1e-2,
        "scale": 16.0,
        "schedule": "ramp",
        "freeze_batch_norm": True,
        "views": 4,
    },
    "small": {
        "backbone": "convnet",
        "start": "random",
        "dim": 64,
        "val_fraction": 0.1,
        "epochs": 15,
        "batch_size": 32,
        "lr": 1e-3,
        "head_lr": 1e-3,
        "proxy_lr": 1e-2,
        "schedule": "cosine",
    },
    # Section 5: RMSprop, batch 32, 64-d; norms free in training, rescaled afterwards (Section 4).
    # Its decay of 0.94 is of the clustering loss's γ: see build_criterion. The paper gives no rates
    # and no number of epochs: these are ours, and so is mirroring the crops.
    "paper": {
        "backbone": "inception-bn",
        "start": "random",
        "dim": 64,
        "val_fraction": 0.1,
        "epochs": 40,
        "batch_size": 32,
        "optimizer": "rmsprop",
        "lr": 1e-4,
        "head_lr": 1e-4,
        "proxy_lr": 1e-2,
        "schedule": "constant",
    },
}
# The whole network instead of its last stages: smaller steps, after an epoch of the head alone.
_WHOLE: Layer = {
    "epochs": 4,
    "batch_size": 32,
    "lr": 1e-4,
    "head_lr": 1e-4,
    "schedule": "cosine",
    "warmup": 1,
    "scale": None,
    "views": 1,
}
# A head on fixed features from another start than the closed form: found for the PCA on CUB.
_OTHER_START: Layer = {"epochs": 20, "head_lr": 1e-4, "proxy_lr": 1e-3, "head": "trained"}

OF_TRAINING = (
    *("epochs", "loss", "assignment", "proxies_per_class", "scale", "free_norms", "batch_size"),
    *("per_class", "head_lr", "proxy_lr", "optimizer", "schedule", "weight_decay", "start"),
)
"""Options that ask for training: a head on fixed features is then trained."""
FREE = ("data", "out", "device", "num_workers", "tensorboard")
"""Settings that may change when a run is resumed: where and how fast, never what is learned."""


def preset_of(asked: Options | Settings, data: TrainingData) -> Preset:
    """Return the preset that was asked for; auto chooses it by the data."""
    is_vectors, preset = data.collection.vectors is not None, asked.preset
    if preset is None or preset == "auto":
        small = data.side is not None and data.side < SMALL_SIDE
        return "vectors" if is_vectors else "small" if small else "frozen"
    if (preset == "vectors") != is_vectors:
        kind = "vectors" if is_vectors else "pictures"
        raise UsageError(f"--preset {preset} does not fit {kind}; leave it out")
    return preset


def resolve(options: Options, data: TrainingData, backbone: Backbone) -> Settings:
    """Return the settings of a run; UsageError for an option that would have no effect.

    backbone: of the preset, or as asked, with the preprocessing that training will use.
    """
    check_limits(options)
    preset, asked = preset_of(options, data), options.asked()
    values = BASE | PRESETS[preset] | _by_data(options, data, preset)
    unfreeze = None
    if preset == "finetune":
        assert backbone.preprocessing is not None
        size = backbone.preprocessing.size
        unfreeze = check_unfreeze(backbone, options.unfreeze, size=size)
    values |= _by_backbone(options, preset, backbone, unfreeze)
    if preset in ("frozen", "vectors"):
        if asked.get("start", values["start"]) != "whitened":
            values |= _OTHER_START
        elif asked.get("epochs") == 0:
            values["head"] = "closed-form"
        elif any(name in asked for name in OF_TRAINING):
            values["head"] = "trained"
    values |= asked
    values |= _by_loss(values, asked, preset, data)
    values |= {"preset": preset, "unfreeze": unfreeze}
    names = {field.name for field in fields(Settings)}
    settings = Settings(**{name: value for name, value in values.items() if name in names})
    _check_needs(asked, settings, data, backbone)
    if settings.dim is None or (dim := head_dim(settings, backbone.features)) == settings.dim:
        return settings
    log.warning(f"dim is {dim} instead of {settings.dim}: the features have no more")
    return replace(settings, dim=dim)


def usual_backbone(asked: Options | Settings, preset: Preset) -> str:
    """Return the network of a preset: one alone where a size or weights are asked for."""
    name: str = PRESETS[preset]["backbone"]
    is_one = any((asked.size, asked.train_size, asked.weights))
    return name.partition(BESIDE)[0] if is_one else name


def usual_size(asked: Options | Settings, preset: Preset, backbone: str) -> int | None:
    """Return the side of the pictures where it is not the network's own."""
    is_lite = backbone.startswith("efficientnet-lite")
    return FINETUNE_SIZE if preset == "finetune" and is_lite and asked.unfreeze != ALL else None


def head_dim(settings: Settings, width: int) -> int:
    """Return the dimension of a head on `width` features: as asked, by default DIM at most.

    A head that starts from the features has no more than they have.
    """
    if settings.start == "random":
        return settings.dim or DIM
    return min(settings.dim or DIM, width)


def agree(saved: Settings, options: Options) -> Settings:
    """Return the settings of the run to resume, elsewhere or faster if asked.

    RunError where the options ask for something that would be learned otherwise.
    """
    check_limits(options)
    once = ("resume", "budget_minutes")
    asked = {name: value for name, value in options.asked().items() if name not in once}
    changes = ", ".join(
        f"{name} {getattr(saved, name)} → {value}"
        for name, value in asked.items()
        if name not in FREE and getattr(saved, name) != value
    )
    if changes:
        raise RunError(
            f"{options.out} was made with other settings ({changes}); drop those flags, "
            "or train into another --out"
        )
    if saved.tensorboard is not None and options.tensorboard is None:
        # The run may be a stranger's, and the folder anywhere.
        log.info(f"to continue the curves, add --tensorboard {saved.tensorboard}")
        saved = replace(saved, tensorboard=None)
    return replace(saved, **{name: value for name, value in asked.items() if name in FREE})


def _by_data(options: Options, data: TrainingData, preset: Preset) -> Layer:
    """Return what follows from labels that are groups of linked items, or that are missing."""
    collection = data.collection
    if collection.has_classes:
        return {}
    if options.loss in INSTANCE_LOSSES:
        raise UsageError(
            f"--loss {options.loss} needs labels, and {collection.name} has none; use a loss "
            "over proxies: proxy-nca, proxy-triplet"
        )
    layer: Layer = {"test_fraction": TEST_FRACTION}
    if not collection.is_labelled:
        if options.start == "whitened":
            raise UsageError(
                "start='whitened' needs labels, and the data have none; use start='pca'"
            )
        if options.assignment not in (None, "dynamic"):
            raise UsageError(
                f"--assignment {options.assignment} needs labels, or triplets that link items to "
                f"groups, and {collection.name} has neither; use dynamic"
            )
        starts = {"start": "pca"} if PRESETS[preset]["start"] == "whitened" else {}
        return layer | {"assignment": "dynamic"} | starts
    is_shared = (options.proxies_per_class or 1) < 1
    return layer | ({"assignment": "balanced"} if is_shared else {})


def _by_backbone(
    options: Options, preset: Preset, backbone: Backbone, unfreeze: str | None
) -> Layer:
    """Return what fine-tuning does with all of a network, a Lite's last stages, or adapters."""
    layer: Layer = {"backbone": backbone.name}
    # The networks of the default are instead of mirror images; what is asked for gets both.
    is_enough = options.backbone is None and len(backbone.parts) > 1
    layer["mirror"] = preset in ("frozen", "finetune") and _flips(backbone) and not is_enough
    if preset != "finetune":
        return layer
    if size := usual_size(options, preset, backbone.name):
        layer["size"] = size
    if unfreeze == ALL:
        layer |= _WHOLE
    if backbone.name == OWN:
        layer["epochs"] = MORE_EPOCHS
    if options.lora is not None:
        layer |= {"lr": LORA_LR, "epochs": MORE_EPOCHS}
    return layer


def _by_loss(values: Layer, asked: Layer, preset: Preset, data: TrainingData) -> Layer:
    """Return proxies and items per class that the loss wants, and its scale or free norms."""
    layer: Layer = {}
    of_proxies = PROXY_LOSSES.get(values["loss"])
    of_instances = INSTANCE_LOSSES.get(values["loss"])
    if "proxies_per_class" not in asked:
        layer["proxies_per_class"] = 1.0 if of_proxies is None else of_proxies.usual_proxies
    if "per_class" not in asked:
        is_chosen = values["assignment"] in ("dynamic", "matched")  # by the items of the batch
        some = InstanceLoss.per_class if is_chosen else 0
        some = some if of_instances is None else of_instances.per_class
        layer["per_class"] = some if data.collection.is_labelled else 0
    if "scale" not in asked:
        if preset == "paper" and of_proxies is not None and of_proxies.free_norms:
            layer["free_norms"] = True
        if "free_norms" in asked or of_proxies is None or of_proxies.own_scale:
            layer["scale"] = None
    return layer


# What an option needs to have an effect


class Need(NamedTuple):
    """A condition on settings and data, in words, and what to do where it does not hold."""

    holds: Callable[[Settings, TrainingData, Backbone], bool]
    words: str
    cure: str


def _flips(backbone: Backbone) -> bool:
    return backbone.preprocessing is not None and backbone.preprocessing.flip


_TRAINABLE = Need(
    lambda s, *_: not s.is_fixed,
    "needs a trainable backbone, and this one is fixed",
    "drop it, or add --preset finetune",
)
_PICTURES = Need(
    lambda s, data, _: data.collection.vectors is None,
    "is for pictures, and the data are vectors",
    "drop it",
)
_FLIPPED = Need(
    lambda s, _, backbone: _flips(backbone),
    "needs pictures that stay the same in a mirror, and small gray ones are mostly characters",
    "drop it, or use --preset frozen",
)
_FINETUNE = Need(
    lambda s, *_: s.preset == "finetune", "is for --preset finetune", "add it, or drop {flag}"
)
_TRAINED = Need(
    lambda s, *_: not s.is_fixed or s.head == "trained" or s.epochs == 0,
    "needs a head that is trained",
    "drop it, or --head",
)
_PROXIES = Need(
    lambda s, *_: s.loss not in INSTANCE_LOSSES, "is for losses over proxies", "drop it, or --loss"
)
_FIXED = Need(lambda s, *_: s.is_fixed, "is for fixed features", "drop it, or use --preset frozen")
_SOLVED = Need(
    lambda s, *_: s.start == "whitened", "needs labels, or groups of linked items", "drop it"
)
_LABELLED = Need(
    lambda s, data, _: data.collection.is_labelled,
    "needs labels, or groups of linked items",
    "drop it",
)
NEEDS: tuple[tuple[Need, str], ...] = (
    (_PICTURES, "mirror size train_size precision"),
    (_FLIPPED, "mirror"),
    (_TRAINABLE, "lr warmup freeze_batch_norm val_fraction train_size"),
    (_FINETUNE, "unfreeze views lora"),
    (_FIXED, "head"),
    (_SOLVED, "head"),
    (_LABELLED, "per_class"),
    (_TRAINED, " ".join(OF_TRAINING)),
    (_PROXIES, "assignment proxies_per_class scale free_norms"),
)


def _check_needs(asked: Layer, settings: Settings, data: TrainingData, backbone: Backbone) -> None:
    for need, names in NEEDS:
        for name in names.split():
            if asked.get(name) and not need.holds(settings, data, backbone):
                flag = f"--{name.replace('_', '-')}"
                raise UsageError(f"{flag} {need.words}; {need.cure.format(flag=flag)}")
    if asked.get("views") and settings.unfreeze == ALL:
        raise UsageError("--views needs stages that stay fixed; drop it, or --unfreeze all")
    if settings.backbone == OWN and asked.get("weights"):
        raise UsageError("--weights is for a backbone by name; load them into your own module")
    if settings.free_norms and asked.get("scale"):
        raise UsageError("--free-norms has no scale; drop --scale or --free-norms")
