"""How a run will search, by held-out classes: re-ranking, and the rule for unknown classes."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from nofuss.config import TrainConfig
from nofuss.data.split import LEAST_CLASSES, classes_in
from nofuss.progress import Progress, silent, working
from nofuss.ranking.open_set import (
    ENOUGH_CLASSES,
    ENOUGH_IN_FOLD,
    ENOUGH_ITEMS,
    OpenSet,
    choose_open_set,
)
from nofuss.ranking.rerank import Rerank, choose_reranking
from nofuss.training.job import Job

log = logging.getLogger("nofuss")


def decide_search(
    embeddings: Sequence[Tensor],
    labels: Sequence[Tensor],
    config: TrainConfig,
    *,
    progress: Progress = silent,
) -> tuple[OpenSet | None, Rerank | None]:
    """Choose how search recognises unknown classes and whether it re-ranks, on held-out classes."""
    if not embeddings:
        return None, None
    rerank = None
    if config.rerank == "auto":
        rerank = choose_reranking(embeddings, labels, progress=progress)
    with working(progress, "choosing how to recognise unknown classes"):
        return choose_open_set(embeddings, labels), rerank


def read_search(stored: Mapping[str, Any]) -> tuple[OpenSet | None, Rerank | None]:
    """Read what choice.json holds of it; KeyError, TypeError or ValueError for anything else."""
    open_set, rerank = stored["open_set"], stored["rerank"]
    return (
        None if open_set is None else OpenSet.from_dict(open_set),
        None if rerank is None else Rerank.from_dict(rerank),
    )


def settle_search(job: Job, held_out: Tensor | None) -> None:
    """Decide on held-out training classes how to search; on fixed features the folds have.

    held_out: unit vectors of these classes, where a network was trained.
    """
    if job.collection.by_links:  # two groups may be of one class, so no distance tells them apart
        job.open_set = job.reranking = None
        log.info('search will not say "nothing like this": that needs labels')
        return
    if not job.fixed and job.config.epochs:
        job.open_set = job.reranking = None  # those of the folds are of the network before it
    if held_out is not None:
        labels = [torch.from_numpy(job.collection.labels[job.split.val])]
        job.open_set, job.reranking = decide_search(
            [held_out], labels, job.config, progress=job.callbacks.progress
        )
    if job.reranking is not None:
        log.info(job.reranking.describe())
    if job.open_set is not None:
        log.info(job.open_set.describe())
    elif job.collection.has_classes:
        rows = job.split.train if job.fixed else job.split.val
        classes = len(classes_in(job.collection, rows))
        log.info(
            f'search will not say "nothing like this": that needs {ENOUGH_ITEMS} items of '
            f"{ENOUGH_CLASSES} held-out classes, {ENOUGH_IN_FOLD} in a fold; of {classes} classes "
            f"with {len(rows)} items too few could be compared"
            + ("" if job.fixed else f"; raise --val-fraction, which needs {LEAST_CLASSES} classes")
        )
