"""Scores of a model on classes it has not seen, beside what needs no training at all."""

from collections.abc import Sequence
from typing import Any, Unpack

import numpy as np
import torch
from torch import Tensor

from nofuss import console
from nofuss.data.collection import Collection
from nofuss.evaluate.protocol import Scores, evaluate
from nofuss.evaluate.recall import recall_at_k
from nofuss.evaluate.retrieval import Options
from nofuss.model.embedder import principal_components

KS = (1, 2, 4, 8)
"""The K of Recall@K that a run keeps, as the paper has them."""


def untrained(
    collection: Collection, features: Tensor | None, *, fit: Any, rows: Any, dim: int
) -> dict[str, Tensor]:
    """Embeddings of `rows` that nothing was learned for: features as they are, and their PCA.

    The PCA is fitted on the rows `fit`, as the head's start is. Without features (a backbone
    that starts at random) the pixels are the baseline.
    """
    if features is not None:
        raw, name = features, f"untrained features, {features.shape[1]}-d"
    elif collection.kind == "images" and collection.array is not None:
        pixels = np.asarray(collection.array).reshape(len(collection), -1)
        raw, name = torch.from_numpy(pixels).float() / 255, "raw pixels"
    else:
        return {}
    baselines = {name: raw[rows]}
    if features is not None and dim < features.shape[1] and dim < len(fit):
        mean, components = principal_components(features[fit], dim)
        baselines[f"their PCA, {dim}-d"] = (raw[rows] - mean) @ components.T
    return baselines


def recall_at_1(embeddings: Tensor, labels: Any) -> float:
    """Recall@1 alone; NaN where no class has two items."""
    sizes = np.unique(np.asarray(labels), return_counts=True)[1]
    return recall_at_k(embeddings, labels, ks=(1,))[1] if sizes.max(initial=0) > 1 else float("nan")


def score_table(title: str, scores: dict[str, Scores]) -> None:
    """A column a method, a row a score, in percent."""
    first = next(iter(scores.values()))
    rows = {f"Recall@{k}": [s.recall[k] for s in scores.values()] for k in first.recall}
    rows |= {
        "MAP@R": [s.map_at_r for s in scores.values()],
        "R-precision": [s.r_precision for s in scores.values()],
        "NMI": [s.nmi for s in scores.values()],
        "AMI": [s.ami for s in scores.values()],
    }
    rows |= {_title(name): [s.extended[name] for s in scores.values()] for name in first.extended}
    shown = [[name, *(f"{100 * v:.2f}" for v in values)] for name, values in rows.items()]
    console.table(title, ["%", *scores], shown)
    k = next(iter(first.recall))
    low, high = first.intervals[f"recall@{k}"]
    console.say(
        f"{first.queries:,} queries of {first.classes:,} classes; Recall@{k} of the first column "
        f"lies between {100 * low:.2f} and {100 * high:.2f} (95%, over classes)"
    )


def _title(name: str) -> str:
    """What a score of `Scores.extended` is called in a table."""
    of_classes = name.startswith("class_mean_")
    name = name.removeprefix("class_mean_").replace("r_precision", "R-precision")
    name = name.replace("map", "MAP").replace("mrr", "MRR").replace("@r", "@R")
    return f"{name[0].upper()}{name[1:]}" + (", mean over classes" if of_classes else "")


def scorable(labels: Any) -> bool:
    """Whether retrieval can be scored: two classes or more, one of them with two items."""
    sizes = np.unique(np.asarray(labels), return_counts=True)[1]
    return len(sizes) > 1 and int(sizes.max()) > 1


def score_all(
    embeddings: dict[str, Tensor],
    labels: Any,
    *,
    ks: Sequence[int],
    seed: int,
    extended: bool = False,
    **options: Unpack[Options],
) -> dict[str, Scores]:
    """`evaluate` for each set of embeddings, all on the same items and gallery."""
    return {
        name: evaluate(x, np.asarray(labels), ks=ks, seed=seed, extended=extended, **options)
        for name, x in embeddings.items()
    }
