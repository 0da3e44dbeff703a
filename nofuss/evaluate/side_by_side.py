"""Several embeddings of the same items scored side by side, over folds too, and paired gains."""

from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any, TypeGuard

import numpy as np
import torch
from torch import Tensor

from nofuss.evaluate.intervals import class_intervals, paired_difference
from nofuss.evaluate.protocol import PROTOCOL, Scores, evaluate
from nofuss.evaluate.queries import PerQuery, QueryScores, pooled
from nofuss.evaluate.ranked import of_folds, ranked_scores, reranking_summary
from nofuss.evaluate.smoothing import Weighting
from nofuss.progress import Progress, silent

KS = (1, 2, 4, 8)
"""The K of Recall@K that a run keeps, as the paper has them."""
CLASS_SUMS = ("queries", "recall@1", "map@r")
MOST_QUERIES = 10**7


def scorable(labels: Any) -> bool:
    """Return whether retrieval can be scored: two classes or more, one of them with two items."""
    sizes = np.unique(np.asarray(labels), return_counts=True)[1]
    return len(sizes) > 1 and int(sizes.max()) > 1


def gain_over(
    name: str, ours: Sequence[PerQuery], theirs: Sequence[PerQuery], *, seed: int
) -> dict[str, Any]:
    """Return the gain over the method `name`, paired by query, over all folds."""
    a, b = (pooled([part.scores for part in parts]) for parts in (ours, theirs))
    recall = paired_difference(a.recall, b.recall, a.labels, seed)
    precision = paired_difference(a.map_at_r, b.map_at_r, a.labels, seed)
    return {"over": name, "recall@1": [*recall], "map@r": [*precision]}


def score_folds(
    kept: Sequence[Tensor],
    baselines: Mapping[str, Sequence[Tensor]],
    labels: Sequence[Tensor],
    *,
    seed: int,
    weightings: Sequence[Weighting] | None = None,
    progress: Progress = silent,
) -> dict[str, Any]:
    """Return scores of classes that were held out in turn, each searched within its fold.

    They are means over the folds, weighted by queries (NMI and AMI: by items), beside those of the
    baselines, and those of re-ranking if weightings are given, one a fold, chosen on the others;
    "by_class" has what `compare` needs of ours.
    """

    def scored(embeddings: Sequence[Tensor]) -> list[Scores]:
        found = []
        for x, y in zip(embeddings, labels, strict=True):
            progress(what, next(done), total)
            found.append(evaluate(x, y, ks=KS, seed=seed, bootstrap=0))
        return found

    what, done = "scoring each class by a model that has not seen it", count()
    total = (1 + len(baselines) + (weightings is not None)) * len(labels)
    ours, others = scored(kept), {name: scored(folds) for name, folds in baselines.items()}
    name, first = next(iter(others.items()))
    gain = gain_over(name, [s.per_query for s in ours], [s.per_query for s in first], seed=seed)
    columns = {name: _mean_of_folds(scores, seed=seed) for name, scores in others.items()}
    means = _mean_of_folds(ours, seed=seed)
    if weightings is not None:
        means["reranked"] = _reranked(kept, labels, weightings, seed=seed)
    progress(what, total, total)
    return means | {
        "gain": gain,
        "baselines": columns,
        "folds": len(labels),
        "by_class": class_sums(pooled([s.per_query.scores for s in ours])),
    }


def within_folds(scores: Mapping[str, Any]) -> str:
    """Say how many items each query of `score_folds` was searched among."""
    items, classes = (round(scores[name] / scores["folds"]) for name in ("items", "classes"))
    return (
        f"each query was searched among the {items:,} items of {classes:,} classes in its fold; "
        f"among all {scores['items']:,} it is harder"
    )


def compared(scores: Mapping[str, Any]) -> str:
    """Return how much was compared: "1,200 triplets" or "80 pairs of alike items"."""
    if "triplets" in scores:
        return f"{scores['triplets']:,} triplets"
    return f"{scores['pairs']:,} pairs of alike items"


def describe_gain(gain: Mapping[str, Any]) -> str:
    """Return the paired differences in words: "Recall@1 +4.10 points (95%: +3.02 to +5.21), …"."""
    words = []
    for label, name in (("Recall@1", "recall@1"), ("MAP@R", "map@r"), ("right order", "ordered")):
        if name not in gain:
            continue
        mean, low, high = (100 * value for value in gain[name])
        words.append(f"{label} {mean:+.2f} points (95%: {low:+.2f} to {high:+.2f})")
    return ", ".join(words)


def _reranked(
    folds: Sequence[Tensor], labels: Sequence[Tensor], weightings: Sequence[Weighting], *, seed: int
) -> dict[str, Any]:
    each = zip(folds, labels, weightings, strict=True)
    found = [ranked_scores(x, y, (None, weighting)) for x, y, weighting in each]
    plain, after = (of_folds(column) for column in zip(*found, strict=True))
    return reranking_summary(after, plain, seed=seed)


def class_sums(queries: QueryScores) -> dict[str, list[float]]:
    """Return for each class the number of its queries, and the sums of their scores."""
    _, group, counts = torch.unique(queries.labels, return_inverse=True, return_counts=True)
    sums = {"recall@1": queries.recall, "map@r": queries.map_at_r}
    return {"queries": counts.tolist()} | {
        name: torch.bincount(group, values.double()).tolist() for name, values in sums.items()
    }


def are_class_sums(sums: object) -> TypeGuard[Mapping[str, Sequence[float]]]:
    """Return whether JSON from outside is what `from_class_sums` takes, and not too much of it."""
    if not isinstance(sums, dict) or not all(isinstance(sums.get(n), list) for n in CLASS_SUMS):
        return False
    counts, *scores = (sums[name] for name in CLASS_SUMS)
    if not all(type(n) is int and n > 0 for n in counts) or sum(counts) > MOST_QUERIES:
        return False
    return all(
        len(column) == len(counts)
        and all(type(s) in (int, float) for s in column)
        and all(0 <= s <= n + 1e-6 for s, n in zip(column, counts, strict=True))
        for column in scores
    )


def from_class_sums(sums: Mapping[str, Sequence[float]]) -> PerQuery:
    """Return queries that each have the mean score of their class: pairing needs no more."""
    counts = torch.tensor(sums["queries"], dtype=torch.int64)
    classes = torch.arange(len(counts)).repeat_interleave(counts)
    recall, precision = (
        (torch.tensor(sums[name], dtype=torch.float64) / counts)[classes]
        for name in ("recall@1", "map@r")
    )
    return PerQuery(torch.arange(len(classes)), classes.numpy(), recall, precision)


def _mean_of_folds(parts: Sequence[Scores], *, seed: int) -> dict[str, Any]:
    means: dict[str, Any] = {}
    for name, value in parts[0].as_dict().items():
        if isinstance(value, float):
            weights = [p.items if name in ("nmi", "ami") else p.queries for p in parts]
            values = [p.as_dict()[name] for p in parts]
            means[name] = float(np.average(values, weights=weights))
    queries = pooled([part.per_query.scores for part in parts])
    ends = class_intervals(
        {"recall@1": queries.recall, "map@r": queries.map_at_r},
        queries.labels,
        seed=seed,
        resamples=1000,
    )
    means |= {f"{name}_interval": list(interval) for name, interval in ends.items()}
    for name in ("items", "classes", "queries"):
        means[name] = sum(getattr(part, name) for part in parts)
    protocol = (
        f"{len(parts)} folds of classes, each embedded by a model that learned from the others; "
        f"searched within a fold: {PROTOCOL}"
    )
    return means | {"seed": seed, "protocol": protocol}
