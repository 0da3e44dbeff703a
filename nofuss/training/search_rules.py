"""How a run will search, by held-out classes: whether it re-ranks, how it recognises strangers."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from nofuss.config import TrainConfig
from nofuss.data.split import LEAST_CLASSES, classes_in
from nofuss.evaluate.reranking import Reranking, choose_reranking
from nofuss.evaluate.strangers import (
    ENOUGH_CLASSES,
    ENOUGH_IN_FOLD,
    ENOUGH_ITEMS,
    Strangers,
    choose_rule,
)
from nofuss.model.encoder import Encoder
from nofuss.terminal import console
from nofuss.training.job import Job


def decide_search(
    embeddings: Sequence[Tensor], labels: Sequence[Tensor], config: TrainConfig
) -> tuple[Strangers | None, Reranking | None]:
    """Choose how search recognises strangers and whether it re-ranks, on held-out classes."""
    if not embeddings:
        return None, None
    rerank = None
    if config.rerank == "auto":
        with console.busy("trying re-ranking on folds of the classes"):
            rerank = choose_reranking(embeddings, labels, seed=config.seed)
    return choose_rule(embeddings, labels), rerank


def read_search(stored: Mapping[str, Any]) -> tuple[Strangers | None, Reranking | None]:
    """Read what choice.json holds of it; KeyError, TypeError or ValueError for anything else."""
    strangers, rerank = stored["strangers"], stored["rerank"]
    return (
        None if strangers is None else Strangers.from_dict(strangers),
        None if rerank is None else Reranking.from_dict(rerank),
    )


def settle_search(job: Job) -> None:
    """Decide on held-out training classes how to search; on fixed features the folds have."""
    if job.collection.by_links:  # two groups may be of one class, so no distance tells them apart
        job.strangers = job.reranking = None
        console.say('search will not say "nothing like this": that needs labels')
        return
    if not job.fixed and job.config.epochs:
        job.strangers = job.reranking = None  # those of the folds are of the network before it
    if not job.fixed and len(job.sides.held_out):
        held_out = job.collection.subset(job.sides.held_out)
        assert held_out.labels is not None
        encoder = Encoder(job.embedder)
        found, labels = encoder.embed_collection(held_out), torch.from_numpy(held_out.labels)
        job.strangers, job.reranking = decide_search([found], [labels], job.config)
    if job.reranking is not None:
        console.say(job.reranking.describe())
    if job.strangers is not None:
        console.say(job.strangers.describe())
    elif job.collection.labels is not None:
        rows = job.sides.train if job.fixed else job.sides.held_out
        classes = len(classes_in(job.collection, rows))
        console.say(
            f'search will not say "nothing like this": that needs {ENOUGH_ITEMS} items of '
            f"{ENOUGH_CLASSES} held-out classes, {ENOUGH_IN_FOLD} in a fold; of {classes} classes "
            f"with {len(rows)} items too few could be compared"
            + ("" if job.fixed else f"; raise --val-fraction, which needs {LEAST_CLASSES} classes")
        )
