"""`nofuss train`: learn a distance from labelled data; its flags are the fields of TrainConfig."""

from typing import Annotated

from tyro.conf import Suppress, arg

from nofuss.config import TrainConfig

GROUPS = {
    "Common options": (
        *("out", "epochs", "preset", "dim", "test_fraction", "seed", "device", "resume"),
        *("class_level", "label_pattern"),
    ),
    "Further options": (),
    "Options of the paper and its experiments": (
        *("loss", "assignment", "proxies_per_class", "scale", "free_norms", "proxy_lr"),
        *("per_class", "start", "shrinkage", "center", "root", "optimizer", "schedule", "warmup"),
        *("freeze_batch_norm", "untrained"),
    ),
}
"""Headings of the help page → settings; the one without names has all others."""


def main(
    config: Annotated[TrainConfig, arg(name="")], *, given: Suppress[frozenset[str]] = frozenset()
) -> None:
    """Learn a distance from labelled data and score it on classes not seen in training."""
    from nofuss.training.pipeline import run_training  # here, so that --help does not load torch

    run_training(config, given=given)
