"""`nofuss demo`: the built-in characters, half of them never seen in training."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from nofuss.commands import console
from nofuss.commands.train import show_scores
from nofuss.config import Options


def main(
    *,
    out: Annotated[
        Path | None,
        Parameter(metavar="RUN", show_default="a new folder under runs/"),
    ] = None,
    epochs: Annotated[int, Parameter(metavar="N")] = 15,
    seed: Annotated[int, Parameter(metavar="N")] = 0,
) -> None:
    """Train on half of the built-in characters, then search among the other half.

    Takes about three minutes.

    Args:
        out: The run directory.
        epochs: Passes over the training characters.
        seed: Seed for the split, the order, the augmentation and the initial weights.
    """
    from nofuss.distributed import processes  # all here, so that --help does not load torch
    from nofuss.training.train import run_training

    console.say(
        "Data: the built-in characters, drawn in matplotlib's typefaces; each character is a class."
    )
    console.say(
        "Half of the characters are used for training; the others are not seen until the end."
    )
    options = Options(out=out, epochs=epochs, seed=seed)
    path = run_training(options, callback=console.TrainingDisplay())
    if processes.first():
        show_scores(path)
        _show_a_search(path, seed=seed)
        console.say(f"Everything is in {path}. To train on your own pictures: nofuss train FOLDER")
        console.say(f"Look at what it learned: {path / 'report.html'}")


def _show_a_search(run: Path, *, seed: int) -> None:
    """Print the neighbours of a few characters that training has not seen."""
    import numpy as np
    import torch

    from nofuss.search import Index

    trained = Index.load(run / "index").items(vectors=True)
    test = [item for item in trained if item.split == "test"]
    vectors = torch.stack([vector for item in test if (vector := item.vector) is not None])
    names, labels = [item.name for item in test], [item.label for item in test]
    index = Index.build(vectors, names=names, labels=labels)
    queries = np.random.default_rng(seed).choice(len(test), 5, replace=False)
    found = index.search(index.vectors[queries], 9)
    console.say(f"Nearest neighbours among {len(test):,} pictures of unseen characters:")
    for query, hits in zip(queries, found, strict=True):
        name, label = test[query].name, test[query].label
        near = index.get([other for other in hits.names if other != name])
        console.say(f"  {label}  →  {' '.join(item.label or '' for item in near)}")
