"""What `--budget minutes`, `hours` and `paper` spend, on photographs and on the built-in set.

Methods share start, batch, steps, schedule and number of tries; margins and scales are the defaults
of each, and losses over pairs draw several items a class. Only `paper` gives losses over instances
the batch of 128 that the paper gives them, and with it a quarter of the steps.
"""

import math
from dataclasses import dataclass, replace
from typing import Any, Literal

from nofuss.config import TrainConfig
from nofuss.losses import INSTANCE_LOSSES
from nofuss.training.presets import resolve
from nofuss.training.setup import items_per_class

Name = Literal["minutes", "hours", "paper"]


@dataclass(frozen=True)
class Budget:
    """How much is trained, and how."""

    name: Name
    settings: dict[str, Any]
    """Options of `nofuss train`."""
    words: str
    """The same for a reader."""
    rates: tuple[float, ...]
    """What each method's rate is chosen from; proxies have ten times it."""
    seeds: int
    folds: int = 2
    """A try is scored on the other half of the training classes; 2: both ways."""
    try_epochs: int | None = None
    """Epochs of a try, where shorter than the training's."""
    classes: int | None = None
    """Classes of each side, where not all."""
    instance_batch: int | None = None
    """The batch of losses over instances, where it differs."""
    long: bool = False
    """Trainings take long enough to want checkpoints."""

    def batch_of(self, loss: str) -> int:
        """Items a step."""
        own = self.instance_batch if loss in INSTANCE_LOSSES else None
        return own or int(self.settings["batch"])

    def config(self, loss: str, rate: float, *, seed: int = 0, **more: Any) -> TrainConfig:
        """The resolved configuration of one training.

        Another batch than the budget's keeps the number of items seen and moves the rates by the
        root of the ratio, as Adam wants it.
        """
        base = self.batch_of(loss)
        rate *= math.sqrt(more.setdefault("batch", base) / base)
        vectors = self.settings["preset"] == "vectors"
        asked = TrainConfig(
            loss=loss,
            rate=0.0 if vectors else rate,
            head_rate=rate,
            proxy_rate=10 * rate,
            seed=seed,
            **{**self.settings, **more},
        )
        config = resolve(asked, kind="vectors" if vectors else "pictures", small=False)
        return replace(config, per_class=items_per_class(config))


PHOTOGRAPHS: dict[str, Budget] = {
    "minutes": Budget(
        name="minutes",
        settings={
            "preset": "vectors",
            "start": "pca",
            "dim": 64,
            "epochs": 12,
            "batch": 64,
            "center": False,
        },
        words=(
            "A linear head to 64 dimensions on the roots of frozen EfficientNet-Lite0 features "
            "(224 px, 1280-d), started at their PCA, proxies at class means (a recipe first found "
            "with Proxy-NCA, which may favour it)"
        ),
        rates=(3e-5, 1e-4, 3e-4, 1e-3),
        seeds=3,
    ),
    "hours": Budget(
        name="hours",
        settings={
            "preset": "finetune",
            "start": "pca",
            "dim": 64,
            "center": False,
            "root": True,
            "epochs": 3,
            "batch": 64,
            "size": 96,
            "warmup": 0,
            "holdout": 0.0,
        },
        words=(
            "EfficientNet-Lite0 fine-tuned whole on crops of 96 px, its head started at the PCA, "
            "proxies at class means"
        ),
        rates=(1e-5, 3e-5, 1e-4, 3e-4),
        seeds=3,
        folds=1,
        try_epochs=1,
        long=True,
    ),
    "paper": Budget(
        name="paper",
        settings={"preset": "paper", "batch": 32, "holdout": 0.0},
        words=(
            "Inception with batch norm, RMSprop, as the paper has it; rates times 0.94 an epoch "
            "(the paper decays “the margin multiplier constant γ”), norms equal, crops mirrored"
        ),
        rates=(1e-5, 3e-5, 1e-4, 3e-4),
        seeds=3,
        folds=1,
        instance_batch=128,
        long=True,
    ),
}
CHARACTERS: dict[str, Budget] = {
    "minutes": Budget(
        name="minutes",
        settings={"preset": "small", "epochs": 6, "batch": 64, "size": 16, "holdout": 0.0},
        words="The small convnet from random weights on 16 × 16 pixels, 160 characters a side",
        rates=(3e-4, 1e-3, 3e-3, 1e-2),
        seeds=3,
        classes=160,
    ),
    "hours": Budget(
        name="hours",
        settings={"preset": "small", "epochs": 10, "batch": 64, "holdout": 0.0},
        words="The small convnet from random weights on 28 × 28 pixels, all characters",
        rates=(3e-4, 1e-3, 3e-3, 1e-2),
        seeds=3,
    ),
    "paper": PHOTOGRAPHS["paper"],
}
