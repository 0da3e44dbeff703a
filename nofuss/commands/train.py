"""`nofuss train`: learn a distance from labelled data; its flags are the fields of TrainConfig."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from nofuss.config import TrainConfig

DEFAULTS = TrainConfig()


def main(
    data: Annotated[
        Path | None, Parameter(name="DATA", show_default="the built-in characters")
    ] = None,
    /,
    *,
    config: TrainConfig = DEFAULTS,
    given: Annotated[frozenset[str], Parameter(parse=False)] = frozenset(),
) -> None:
    """Learn a distance from labelled data and score it on classes not seen in training.

    Args:
        data: A folder of class folders, a CSV (path,label or anchor,positive,negative or a,b,same),
            arrays (.npz, .safetensors), WebDataset shards (.tar), Parquet, a Hugging Face dataset
            on disk, the official folder of CUB-200-2011, Cars196 or Stanford Online Products, or
            the word han: 22,634 characters, drawn with fonts of Debian.
    """
    from nofuss.training.pipeline import run_training  # here, so that --help does not load torch

    run_training(replace(config, data=data), given=given)
