"""How a run will search, by held-out classes: whether it re-ranks, how it recognises strangers."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
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
from nofuss.progress import Progress, silent, working
from nofuss.training.job import Job

log = logging.getLogger("nofuss")


def decide_search(
    embeddings: Sequence[Tensor],
    labels: Sequence[Tensor],
    config: TrainConfig,
    *,
    progress: Progress = silent,
) -> tuple[Strangers | None, Reranking | None]:
    """Choose how search recognises strangers and whether it re-ranks, on held-out classes."""
    if not embeddings:
        return None, None
    rerank = None
    if config.rerank == "auto":
        rerank = choose_reranking(embeddings, labels, seed=config.seed, progress=progress)
    with working(progress, "choosing how to recognise unknown classes"):
        return choose_rule(embeddings, labels), rerank


def read_search(stored: Mapping[str, Any]) -> tuple[Strangers | None, Reranking | None]:
    """Read what choice.json holds of it; KeyError, TypeError or ValueError for anything else."""
    strangers, rerank = stored["strangers"], stored["rerank"]
    return (
        None if strangers is None else Strangers.from_dict(strangers),
        None if rerank is None else Reranking.from_dict(rerank),
    )


def settle_search(job: Job, held_out: Tensor | None) -> None:
    """Decide on held-out training classes how to search; on fixed features the folds have.

    held_out: unit vectors of these classes, where a network was trained.
    """
    if job.collection.by_links:  # two groups may be of one class, so no distance tells them apart
        job.strangers = job.reranking = None
        log.info('search will not say "nothing like this": that needs labels')
        return
    if not job.fixed and job.config.epochs:
        job.strangers = job.reranking = None  # those of the folds are of the network before it
    if held_out is not None:
        labels = [torch.from_numpy(np.asarray(job.collection.labels)[job.sides.held_out])]
        job.strangers, job.reranking = decide_search(
            [held_out], labels, job.config, progress=job.callbacks.progress
        )
    if job.reranking is not None:
        log.info(job.reranking.describe())
    if job.strangers is not None:
        log.info(job.strangers.describe())
    elif job.collection.labels is not None:
        rows = job.sides.train if job.fixed else job.sides.held_out
        classes = len(classes_in(job.collection, rows))
        log.info(
            f'search will not say "nothing like this": that needs {ENOUGH_ITEMS} items of '
            f"{ENOUGH_CLASSES} held-out classes, {ENOUGH_IN_FOLD} in a fold; of {classes} classes "
            f"with {len(rows)} items too few could be compared"
            + ("" if job.fixed else f"; raise --val-fraction, which needs {LEAST_CLASSES} classes")
        )
