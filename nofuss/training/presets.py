"""Presets: settings that go together, and how the missing ones are filled in."""

import dataclasses
from typing import Any

from nofuss.config import TrainConfig, check_limits
from nofuss.errors import UsageError

DIM = 512
"""Default dimensions of a head on features (LOG.md): more gain nothing beyond noise, and an item of
512 takes 2 KB in the index."""
Preset = dict[str, Any]
_COMMON: Preset = {
    "optimizer": "adam",
    "weight_decay": 0.0,
    "warmup": 0,
    "freeze_batch_norm": False,
    "mirror": False,
}
# A head on fixed features, from its closed form; how long and how fast it moves follows from the
# number of items, see training/head.py.
_HEAD: Preset = _COMMON | {
    "start": "whitened",
    "batch_size": 128,
    "lr": 0.0,
    "schedule": "cosine",
    "scale": 16.0,
    "folds": 4,
}
# The same from another start, with epochs and rates that were found for the PCA on CUB: started at
# random it over-fits the training classes and ends below the features it came from.
_OTHER_START: Preset = {"epochs": 20, "head_lr": 1e-4, "proxy_lr": 1e-3, "folds": 0}
# The whole network instead of its last stages: smaller steps, after an epoch of the head alone.
_WHOLE: Preset = {
    "epochs": 4,
    "batch_size": 32,
    "lr": 1e-4,
    "head_lr": 1e-4,
    "schedule": "cosine",
    "warmup": 1,
}
FINETUNE_SIZE = 288
"""Side of the pictures that EfficientNet-Lite's last stages are trained on: that gains as much as
training them does (LOG.md), and kept activations make it affordable."""
LORA_LR = 1e-3
"""Rate of low-rank adapters, which start at zero and need more epochs."""
MORE_EPOCHS = 12
"""Of adapters, and of a module from Python, whose weights may be random."""
PRESETS: dict[str, Preset] = {
    "frozen": _HEAD | {"backbone": "efficientnet-lite0", "mirror": True},
    "vectors": _HEAD | {"backbone": "identity"},
    "finetune": _COMMON
    | {
        "backbone": "efficientnet-lite0",
        "start": "whitened",
        "folds": 4,
        "val_fraction": 0.1,
        "epochs": 4,  # more fit the training classes and lose new ones (LOG.md)
        "batch_size": 64,
        "lr": 2e-4,
        "head_lr": 2e-4,
        "proxy_lr": 1e-2,
        "scale": 16.0,
        "schedule": "ramp",
        "freeze_batch_norm": True,
        "mirror": True,
        "views": 4,
    },
    "small": _COMMON
    | {
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
    "paper": _COMMON
    | {
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


def resolve(config: TrainConfig, *, kind: str, small: bool, labelled: bool = True) -> TrainConfig:
    """Fill every None from the preset; `auto` chooses it by the data.

    kind: "vectors" or "pictures"; small: pictures too small for a backbone of photographs;
    labelled: False for bare triplets, which have no classes to whiten within.
    """
    check_limits(config)
    preset = config.preset
    if preset == "auto":
        preset = "vectors" if kind == "vectors" else "small" if small else "frozen"
    if (preset == "vectors") != (kind == "vectors"):
        raise UsageError(f"--preset {preset} does not fit {kind}; leave it out")
    fixed = preset in ("frozen", "vectors")
    _check_fits(config, fixed=fixed, kind=kind)
    for name in ("unfreeze", "views", "lora") if preset != "finetune" else ():
        if getattr(config, name) is not None:
            raise UsageError(f"--{name} is for --preset finetune; add it, or drop --{name}")
    if config.views is not None and config.unfreeze == "all":
        raise UsageError("--views needs stages that stay fixed; drop it, or --unfreeze all")
    if kind == "vectors" and config.size is not None:
        raise UsageError("--size is for pictures, and the data are vectors; drop it")
    if config.free_norms and config.scale is not None:
        raise UsageError("--free-norms has no scale; drop --scale or --free-norms")
    settings = PRESETS[preset]
    if not labelled and config.start == "whitened":
        raise UsageError("--start whitened needs labels, and the data have none; use --start pca")
    if settings["start"] != "whitened" and config.start != "whitened" and not config.resume:
        for name in ("shrinkage", "folds"):
            if getattr(config, name) is not None:
                raise UsageError(f"--{name} needs --start whitened; drop it, or add that")
    if config.untrained:
        settings = settings | {"epochs": 0, "folds": 0}
    elif not labelled and settings["start"] == "whitened":
        settings = settings | {"start": "pca"}
    if (config.start or settings["start"]) != "whitened":
        pooled = preset in ("frozen", "finetune")  # activations: positive and heavy-tailed
        settings = settings | {"center": not pooled, "root": pooled}
        settings |= _OTHER_START if fixed else {}
    backbone = config.backbone or settings["backbone"]
    if preset == "finetune" and (config.unfreeze == "all" or backbone == "own"):
        settings = {k: v for k, v in (settings | _WHOLE).items() if k not in ("scale", "views")}
        settings |= {"epochs": MORE_EPOCHS} if backbone == "own" else {}
    elif preset == "finetune" and backbone.startswith("efficientnet-lite"):
        settings = settings | {"size": FINETUNE_SIZE}
    if config.lora is not None:
        settings = settings | {"lr": LORA_LR, "epochs": MORE_EPOCHS}
    filled = {name: value for name, value in settings.items() if getattr(config, name) is None}
    if config.proxies_per_class is None:
        filled["proxies_per_class"] = 10.0 if config.loss == "soft-triple" else 1.0
    if preset == "paper" and config.scale is None and config.loss in ("proxy-nca", "proxy-triplet"):
        filled["free_norms"] = True
    if config.free_norms or config.loss not in ("proxy-nca", "proxy-nca++"):
        filled.pop("scale", None)  # other losses have a scale of their own
    if (backbone == "identity") != (kind == "vectors"):
        raise UsageError(f"--backbone {backbone} does not fit {kind}; leave it out")
    return dataclasses.replace(config, preset=preset, **filled)


def head_dim(config: TrainConfig, width: int) -> int:
    """Return the dimension of a head on `width` features: as configured, by default DIM.

    A head that starts from the features has no more than they have; untrained features keep theirs.
    """
    if config.dim is None:
        return width if config.untrained else min(DIM, width)
    return config.dim if config.start == "random" else min(config.dim, width)


def _check_untrained(config: TrainConfig) -> None:
    """Refuse settings of a training together with --untrained."""
    names = ("epochs", "start", "shrinkage", "root", "center", "folds", "head_lr", "proxy_lr")
    given = [name for name in names if getattr(config, name)]
    if config.loss != TrainConfig.loss:
        given.append("loss")
    if given:
        flags = " and ".join(f"--{name.replace('_', '-')}" for name in given)
        raise UsageError(f"--untrained trains nothing; drop {flags}")


def _check_fits(config: TrainConfig, *, fixed: bool, kind: str) -> None:
    """Refuse settings that would do nothing."""
    trained = ("lr", "warmup", "freeze_batch_norm", "val_fraction", "train_size")
    for name in trained if fixed else ():
        if getattr(config, name):
            flag = name.replace("_", "-")
            cure = "drop it" if kind == "vectors" else "drop it, or add --preset finetune"
            raise UsageError(f"--{flag} needs a trainable backbone, and this one is fixed; {cure}")
    if config.untrained and not fixed:
        raise UsageError("--untrained keeps features as they are; it needs --preset frozen")
    if config.untrained and not config.resume:  # whose settings were checked, then filled in
        _check_untrained(config)
    if config.folds == 1:
        raise UsageError("--folds is 1; expected 0 (no folds) or 2 and more")
    if config.shrinkage is not None and config.start not in (None, "whitened"):
        raise UsageError("--shrinkage is for --start whitened; drop one of the two")
    if kind == "vectors" and config.precision != "fp32":
        raise UsageError("--precision is for networks, and the data are vectors; drop it")
    if kind == "vectors" and config.mirror:
        raise UsageError("--mirror is for pictures, and the data are vectors; drop it")
