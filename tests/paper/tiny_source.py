"""A small source: vectors around a centre a class, half of the classes for testing."""

from typing import Any

import numpy as np

from nofuss.data.collection import Collection
from nofuss.paper.sources import Budget

CLASSES, ITEMS, WIDTH = 16, 8, 12


def vectors(seed: int = 0) -> Collection:
    random = np.random.default_rng(seed)
    labels = np.repeat(np.arange(CLASSES), ITEMS)
    x = random.normal(size=(CLASSES, WIDTH))[labels] + 0.8 * random.normal(
        size=(len(labels), WIDTH)
    )
    return Collection(
        name="tiny",
        layout="arrays",
        array=x.astype(np.float32),
        labels=labels,
        class_names=tuple(map(str, range(CLASSES))),
        split=np.where(labels < CLASSES // 2, "train", "test"),
    )


def tiny_budget(**more: Any) -> Budget:
    settings = {"preset": "vectors", "epochs": 2, "batch_size": 16, "dim": 6}
    return Budget(
        name="minutes", settings=settings, words="tiny", rates=(1e-3, 1e-2), seeds=2, **more
    )
