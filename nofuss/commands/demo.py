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
    """Train on half of the built-in characters, then search among the other half. Three minutes.

    Args:
        out: The run directory.
        epochs: Passes over the training characters.
        seed: Seed for the split, the order, the augmentation and the initial weights.
    """
    from nofuss.distributed import processes  # all here, so that --help does not load torch
    from nofuss.training.train import run_training

    console.say(
        "The built-in set: characters in the typefaces of matplotlib; a class is a character."
    )
    console.say(
        "Half of the characters are for training. The other half is not seen until the end."
    )
    options = Options(out=out, epochs=epochs, seed=seed)
    path = run_training(options, callback=console.TrainingDisplay())
    if processes.first():
        show_scores(path)
        _show_what_it_learned(path, seed=seed)


def _show_what_it_learned(path: Path, *, seed: int) -> None:
    _show_a_search(path, seed=seed)
    console.say(f"Everything is in {path}. To train on your own pictures: nofuss train FOLDER")
    console.say(f"Look at what it learned: {path / 'report.html'}")


def _show_a_search(run: Path, *, seed: int) -> None:
    """Print the neighbours of a few characters that training has not seen."""
    import numpy as np

    from nofuss.data.open import open_data
    from nofuss.run.embeddings import load_embeddings
    from nofuss.search import Index

    kept, characters = load_embeddings(run), open_data(None)
    assert kept is not None
    labels = [characters.class_names[i] for i in characters.labels[kept.test_rows]]
    index = Index.build(kept.test, names=[str(i) for i in range(len(labels))], labels=labels)
    queries = np.random.default_rng(seed).choice(len(labels), 5, replace=False)
    found = index.search(kept.test[queries], 9)
    console.say(f"a search among {len(labels):,} pictures of unseen characters in many typefaces:")
    for query, hits in zip(queries, found, strict=True):
        others = " ".join(labels[int(name)] for name in hits.names if name != str(query))
        console.say(f"  {labels[query]}  →  {others}")
