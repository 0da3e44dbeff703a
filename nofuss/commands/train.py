"""`nofuss train`: learn a distance from labelled data; its flags are the fields of Options."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from nofuss.commands import console
from nofuss.config import Options
from nofuss.errors import command

DEFAULTS = Options()


def main(
    data: Annotated[
        Path | None, Parameter(name="DATA", show_default="the built-in characters")
    ] = None,
    /,
    *,
    options: Options = DEFAULTS,
) -> None:
    """Learn a distance from labelled data and score it on classes not seen in training.

    Args:
        data: A folder of class folders, a CSV (path,label or anchor,positive,negative or a,b,same),
            arrays (.npz, .safetensors), WebDataset shards (.tar), Parquet, a Hugging Face dataset
            on disk, the official folder of CUB-200-2011, Cars196 or Stanford Online Products, or
            the word han: 22,634 characters, drawn with fonts of Debian.
    """
    from nofuss.distributed import processes  # all here, so that --help does not load torch
    from nofuss.training.train import run_training

    run = run_training(replace(options, data=data), callback=console.TrainingDisplay())
    if not processes.first():  # the others are done before the scores are there
        return
    show_scores(run)
    console.say(f"Details: {run / 'report.html'}")
    console.say(f"Search:  {command('nofuss', 'serve', run)}")


def show_scores(run: Path) -> None:
    """Print what training was worth, if there was anything to score."""
    from nofuss.report import read_optional_json

    scores = read_optional_json(run / "scores.json")
    if scores:
        preset = read_optional_json(run / "config.json").get("preset")
        console.score_lines(scores, scores["method"], preset=preset)
