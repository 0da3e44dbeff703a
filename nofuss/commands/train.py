"""`nofuss train`: learn a distance from labelled data; its flags are the fields of TrainConfig."""

from typing import Annotated

from tyro.conf import Suppress, arg

from nofuss.config import TrainConfig


def main(
    config: Annotated[TrainConfig, arg(name="")], *, given: Suppress[frozenset[str]] = frozenset()
) -> None:
    """Learn a distance from labelled data and score it on classes not seen in training."""
    from nofuss.training.pipeline import run_training  # here, so that --help does not load torch

    run_training(config, given=given)
