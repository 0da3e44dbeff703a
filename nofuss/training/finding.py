"""How a run will search, by held-out classes: whether it re-ranks, how it recognises strangers."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from nofuss.config import TrainConfig
from nofuss.evaluate.reranking import Reranking, choose_reranking
from nofuss.evaluate.strangers import Strangers, choose_rule
from nofuss.terminal import console


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
