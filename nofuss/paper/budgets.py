"""How long and how to train with `--budget minutes`, `hours` and `paper`.

Methods share start, batch, steps, schedule and number of tries; margins and scales are the defaults
of each, and losses over pairs draw several items a class. Only `paper` has a batch of 128 for
losses over instances, as the paper does, and so a quarter of their steps.
"""

import math
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from nofuss.config import TrainConfig
from nofuss.losses import INSTANCE_LOSSES
from nofuss.paper.further import loss_of
from nofuss.training.presets import resolve
from nofuss.training.setup import items_per_class

Name = Literal["minutes", "hours", "paper"]


@dataclass(frozen=True)
class Budget:
    """How long and how to train."""

    name: Name
    settings: dict[str, Any]
    """Options of `nofuss train`."""
    words: str
    """The same in words, for the report."""
    rates: tuple[float, ...]
    """Candidates for each method's rate."""
    seeds: int
    proxy_factor: float = 10
    """How many times as high the rate of proxies is."""
    folds: int = 2
    """A try is scored on the other half of the training classes; 2: and the reverse."""
    try_epochs: int | None = None
    """Epochs of a try, if fewer than the training's."""
    try_classes: int | None = None
    """Classes of each half in a try, if not all."""
    classes: int | None = None
    """Classes of each side, if not all."""
    scales: dict[str, float] = field(default_factory=dict)
    """Method → its scale, once it is chosen; the loss's own for the others."""
    instance_batch: int | None = None
    """The batch of losses over instances, if it differs."""
    curve_items: int = 6000
    """Most test items of a curve, a point an epoch; the last epoch is scored on all."""
    long: bool = False
    """Whether a training takes minutes: it writes checkpoints, and sweeps have fewer points."""

    def batch_of(self, loss: str) -> int:
        """Return the batch of a method."""
        special = self.instance_batch if loss in INSTANCE_LOSSES else None
        return special or int(self.settings["batch_size"])

    def config(self, method: str, rate: float, *, seed: int = 0, **more: Any) -> TrainConfig:
        """Return the resolved configuration of one training.

        With another batch than the budget's, the same number of items is seen, and rates are scaled
        by the root of the ratio, as is usual with Adam.
        """
        loss = loss_of(method)
        base = self.batch_of(loss)
        if method in self.scales:
            more.setdefault("scale", self.scales[method])
        rate *= math.sqrt(more.setdefault("batch_size", base) / base)
        vectors = self.settings["preset"] == "vectors"
        asked = TrainConfig(
            loss=loss,
            lr=0.0 if vectors else rate,
            head_lr=rate,
            proxy_lr=self.proxy_factor * rate,
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
            "batch_size": 64,
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
            "unfreeze": "1",
            "views": 4,
            "start": "random",  # from the PCA most methods have more to forget than to learn
            "dim": 64,
            "epochs": 10,
            "batch_size": 64,
            "size": 224,
            "val_fraction": 0.0,
            "mirror": False,
        },
        words=(
            "The last stage of EfficientNet-Lite0 and a head of 64 dimensions on the roots of its "
            "features, which starts at random weights as the proxies do, fine-tuned at 224 px on "
            "kept activations of 4 random crops a picture; scored on the centre crop, as in the "
            "paper"
        ),
        rates=(3e-5, 1e-4, 3e-4, 1e-3),
        seeds=3,
        proxy_factor=100,  # as in the README's loop; 10 to 200 differ by noise (LOG.md)
        folds=1,
        try_epochs=5,
        curve_items=2000,
        long=True,
    ),
    "paper": Budget(
        name="paper",
        settings={"preset": "paper", "batch_size": 32, "val_fraction": 0.0},
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
        settings={
            "preset": "small",
            "epochs": 6,
            "batch_size": 64,
            "size": 16,
            "val_fraction": 0.0,
        },
        words="The small convnet from random weights on 16 × 16 pixels, 160 characters a side",
        rates=(3e-4, 1e-3, 3e-3, 1e-2),
        seeds=3,
        classes=160,
    ),
    "hours": Budget(
        name="hours",
        settings={"preset": "small", "epochs": 10, "batch_size": 64, "val_fraction": 0.0},
        words="The small convnet from random weights on 28 × 28 pixels, all characters",
        rates=(3e-4, 1e-3, 3e-3, 1e-2),
        seeds=3,
    ),
    "paper": PHOTOGRAPHS["paper"],
}
# A class has five pictures: its proxy is the positive so rarely that it needs a higher rate (found
# on halves of the training classes, LOG.md).
HAN: dict[str, Budget] = {
    "minutes": Budget(
        name="minutes",
        settings={
            "preset": "small",
            "epochs": 10,
            "batch_size": 64,
            "size": 16,
            "val_fraction": 0.0,
        },
        words="The small convnet from random weights on 16 × 16 pixels, all characters",
        rates=(3e-4, 1e-3, 3e-3),
        seeds=1,
        proxy_factor=100,
        folds=1,
        try_classes=1000,
    ),
    "hours": Budget(
        name="hours",
        settings={"preset": "small", "epochs": 10, "batch_size": 64, "val_fraction": 0.0},
        words="The small convnet from random weights on 28 × 28 pixels, all characters",
        rates=(3e-4, 1e-3, 3e-3),
        seeds=3,
        proxy_factor=100,
        try_classes=2000,
        long=True,
    ),
    "paper": PHOTOGRAPHS["paper"],
}
