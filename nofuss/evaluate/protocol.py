"""All scores of an embedding at once, with intervals: the protocol of the paper, stated.

Recall@K and NMI as in the paper's section 5; MAP@R, R-precision and AMI beside them; MAP, MRR,
precision@K and means over classes on request. Queries may search a separate gallery, as in In-Shop
retrieval. Scores of single queries serve paired comparisons and the search for hard classes; folds
of classes are scored each by a model that has not seen them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, NamedTuple, Unpack

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nofuss.evaluate.intervals import (
    Difference,
    class_intervals,
    in_points,
    paired_difference,
)
from nofuss.evaluate.nmi import (
    adjusted_mutual_information,
    cluster,
    normalized_mutual_information,
)
from nofuss.evaluate.precision import precisions
from nofuss.evaluate.recall import (
    average_of,
    checked_ks,
    class_means,
    hits,
    ranks_of_first_positive,
    reciprocal,
)
from nofuss.evaluate.retrieval import Options, classes_of, shared_classes, vectors_of
from nofuss.geometry import Array, as_tensor
from nofuss.progress import Progress, silent, working

KS = (1, 2, 4, 8)
"""The K of Recall@K that a run keeps, as the paper has them."""
QUERIES = {
    False: "every item queries all others, itself left out by index; classes with one item stay in "
    "the gallery and are no queries",
    True: "queries search a gallery of their own, those that are in it left out by index; queries "
    "whose class has no other item there are none",
}
DISTANCES = {
    True: "Euclidean distance on the unit sphere",
    False: "Euclidean distance between the vectors as they are",
}
SCORES = (
    "ties count as wrong; NMI and AMI of k-means (k-means++, Lloyd) with as many clusters as "
    "classes; 95% intervals over classes"
)
PROTOCOL = f"{QUERIES[False]}; {DISTANCES[True]}, {SCORES}"
_TITLES = {"map@r": "MAP@R", "map": "MAP", "mrr": "MRR", "r_precision": "R-precision"}
_TITLES |= {"nmi": "NMI", "ami": "AMI", "ordered": "in the right order"}


def scorable(labels: Any) -> bool:
    """Return whether retrieval can be scored: two classes or more, one of them with two items."""
    sizes = np.unique(np.asarray(labels), return_counts=True)[1]
    return len(sizes) > 1 and int(sizes.max()) > 1


# Single queries


class QueryScores(NamedTuple):
    """Scores of queries, one each: Recall@1 and MAP@R, and the class of each query."""

    recall: Tensor
    map_at_r: Tensor
    labels: Tensor

    @property
    def objective(self) -> Tensor:
        """Return what models are chosen by: the mean of Recall@1 and MAP@R."""
        return (self.recall + self.map_at_r) / 2


def pooled(parts: Sequence[QueryScores]) -> QueryScores:
    """Return the queries of all parts together."""
    return QueryScores(*map(torch.cat, zip(*parts, strict=True)))


def gains_over(ours: QueryScores, theirs: QueryScores) -> dict[str, Difference]:
    """Return the differences in Recall@1 and MAP@R of the same queries, over classes."""
    return {
        "recall@1": paired_difference(ours.recall, theirs.recall, ours.labels),
        "map@r": paired_difference(ours.map_at_r, theirs.map_at_r, ours.labels),
    }


class PerQuery(NamedTuple):
    """Scores of each query, (Q,), in the caller's order, without items alone in their class."""

    rows: Tensor  # the row of each query in the embeddings
    labels: NDArray[np.generic]  # its label, as given
    recall1: Tensor  # 1.0 where the nearest other item is of its class, else 0.0
    map_at_r: Tensor  # the average precision within its R nearest

    @property
    def scores(self) -> QueryScores:
        """Return the scores without their rows, names of classes as numbers."""
        labels = self.labels
        if labels.dtype.kind not in "biu":  # names
            labels = np.unique(labels, return_inverse=True)[1]
        return QueryScores(self.recall1, self.map_at_r, torch.as_tensor(labels))


def per_query(embeddings: Array, labels: Array, **options: Unpack[Options]) -> PerQuery:
    """Return Recall@1 and average precision at R of each query; their means are the overall scores.

    options: a gallery and whether to normalize, as for `evaluate`. The rows depend on the labels
    alone: two models' scores of the same items align, as `paired_difference` needs them.
    """
    x = vectors_of(embeddings)
    ranks = ranks_of_first_positive(x, labels, **options)
    return of_queries(ranks, precisions(x, labels, **options).map_at_r, labels)


def of_queries(ranks: Tensor, average: Tensor, labels: Array) -> PerQuery:
    """Pick the queries among all items: those whose first positive has a rank."""
    ranks, average = ranks.cpu(), average.cpu()
    rows = (ranks > 0).nonzero()[:, 0]
    names = labels.detach().cpu().numpy() if isinstance(labels, Tensor) else np.asarray(labels)
    return PerQuery(rows, names[rows.numpy()], (ranks[rows] == 1).double(), average[rows])


# All scores


@dataclass(frozen=True)
class Scores:
    """The result of `evaluate`; `as_dict()` is what `scores.json` holds."""

    recall: dict[int, float]
    map_at_r: float
    r_precision: float
    nmi: float
    ami: float
    items: int
    classes: int
    queries: int
    seed: int
    intervals: dict[str, tuple[float, float]]
    protocol: str
    per_query: PerQuery = field(repr=False, compare=False)
    extended: dict[str, float] = field(default_factory=dict)
    """`mrr`, `map`, `precision@K`, and `class_mean_…` of all scores, if asked for."""

    def as_dict(self) -> dict[str, Any]:
        """Return a flat dict for JSON: `recall@1`, `recall@1_interval` [low, high], `map@r` …"""
        scores: dict[str, Any] = {f"recall@{k}": value for k, value in self.recall.items()}
        scores |= {"map@r": self.map_at_r, "r_precision": self.r_precision}
        scores |= {"nmi": self.nmi, "ami": self.ami} | self.extended
        scores |= {f"{name}_interval": list(ends) for name, ends in self.intervals.items()}
        scores |= {"items": self.items, "classes": self.classes, "queries": self.queries}
        return scores | {"seed": self.seed, "protocol": self.protocol}


def evaluate(
    embeddings: Array,
    labels: Array,
    *,
    ks: Sequence[int] = KS,
    seed: int = 0,
    extended: bool = False,
    progress: Progress = silent,
    **options: Unpack[Options],
) -> Scores:
    """Return Recall@K, MAP@R, R-precision, NMI and AMI of embeddings whose classes are known.

    `gallery`, `gallery_labels` and `query_rows` are as in `recall_at_k`; NMI and AMI are then of
    all items, queries and gallery. `extended` adds MRR, precision@K, MAP over all ranks, which
    takes several times as long, and the means of the classes' means.

    The intervals (95%, for the retrieval scores) cover which classes happened to be in the test
    set, but not a gallery of other classes, another training run, or `seed`, which is of k-means
    (NMI and AMI have no interval).
    """
    x, ks = vectors_of(embeddings), checked_ks(ks)
    on_sphere = bool(options.get("normalize", True))
    classes = classes_of(labels, len(x))
    with working(progress, "computing Recall@K and MAP@R"):
        ranks = ranks_of_first_positive(x, labels, **options)
        precision = precisions(x, labels, ks=ks if extended else (), all_ranks=extended, **options)
    results = {f"recall@{k}": hits(ranks, k) for k in ks}
    results |= {"map@r": precision.map_at_r, "r_precision": precision.r_precision}
    means = {name: average_of(values, labels) for name, values in results.items()}
    is_query = (ranks > 0).cpu()
    intervals = class_intervals(
        {name: values.cpu()[is_query] for name, values in results.items()},
        classes[is_query],
    )
    more: dict[str, float] = {}
    if extended:
        extra = {"mrr": reciprocal(ranks)} | {
            f"precision@{k}": v for k, v in precision.precision.items()
        }
        if precision.average is not None:
            extra["map"] = precision.average
        more = {name: average_of(values, labels) for name, values in extra.items()}
        for name, values in (results | extra).items():
            more[f"class_mean_{name}"] = float(class_means(values, classes).nanmean())
    items, item_classes = _all_items(x, labels, **options)
    with working(progress, "clustering for NMI"):
        clusters = cluster(items, item_classes, seed=seed, normalize=options.get("normalize", True))
    has_gallery = options.get("gallery") is not None
    return Scores(
        recall={k: means[f"recall@{k}"] for k in ks},
        map_at_r=means["map@r"],
        r_precision=means["r_precision"],
        nmi=normalized_mutual_information(clusters, item_classes),
        ami=adjusted_mutual_information(clusters, item_classes),
        items=len(items),
        classes=len(torch.unique(classes[is_query] if has_gallery else item_classes)),
        queries=int(is_query.sum()),
        seed=seed,
        intervals=intervals,
        protocol=f"{QUERIES[has_gallery]}; {DISTANCES[on_sphere]}, {SCORES}",
        per_query=of_queries(ranks, precision.map_at_r, labels),
        extended=more,
    )


def _all_items(x: Tensor, labels: Array, **options: Unpack[Options]) -> tuple[Tensor, Tensor]:
    """Return queries and gallery as one set with its classes; a query in both counts once."""
    gallery, gallery_labels = options.get("gallery"), options.get("gallery_labels")
    if gallery is None or gallery_labels is None:
        return x, classes_of(labels, len(x))
    y = vectors_of(gallery, name="gallery").to(x)
    own, others = shared_classes(labels, len(x), gallery_labels, len(y))
    rows = options.get("query_rows")
    alone = torch.ones(len(x), dtype=torch.bool)
    if rows is not None:
        alone = as_tensor(rows).cpu() < 0
    return torch.cat([x[alone], y]), torch.cat([own[alone], others])


# Folds of classes


def gain_over(name: str, ours: Sequence[PerQuery], theirs: Sequence[PerQuery]) -> dict[str, Any]:
    """Return the gain over the method `name`, paired by query, over all folds."""
    a, b = (pooled([part.scores for part in parts]) for parts in (ours, theirs))
    return {"over": name} | {score: [*gain] for score, gain in gains_over(a, b).items()}


def score_folds(
    kept: Sequence[Tensor],
    baselines: Mapping[str, Sequence[Tensor]],
    labels: Sequence[Tensor],
    *,
    seed: int,
    progress: Progress = silent,
) -> dict[str, Any]:
    """Return scores of classes that were held out in turn, each searched within its fold.

    They are means over the folds, weighted by queries (NMI and AMI: by items), beside those of the
    baselines; "by_class" has what `compare` needs of ours.
    """

    def scored(embeddings: Sequence[Tensor]) -> list[Scores]:
        found = []
        for x, y in zip(embeddings, labels, strict=True):
            progress(what, next(done), total)
            found.append(evaluate(x, y, ks=KS, seed=seed))
        return found

    what, done = "scoring each class by a model that has not seen it", count()
    total = (1 + len(baselines)) * len(labels)
    ours, others = scored(kept), {name: scored(folds) for name, folds in baselines.items()}
    name, first = next(iter(others.items()))
    gain = gain_over(name, [s.per_query for s in ours], [s.per_query for s in first])
    columns = {name: _mean_of_folds(scores, seed=seed) for name, scores in others.items()}
    means = _mean_of_folds(ours, seed=seed)
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


def headline(scores: Mapping[str, Any], preset: object) -> str:
    """Return the result in one sentence; preset: of the training, which says what was searched."""
    what = {"vectors": "vectors", "small": "pictures"}.get(str(preset), "photos")
    name = "recall@1" if "recall@1" in scores else "ordered"
    baselines = [of[name] for of in scores.get("baselines", {}).values() if name in of]
    before = f" ({of_hundred(baselines[0])} without training)" if baselines else ""
    found = of_hundred(scores[name])
    if name == "ordered":
        return f"Puts {found} of 100 comparisons it has never seen in the right order{before}."
    return (
        f"Finds the right class first for {found} of 100 {what} of classes it has never "
        f"seen{before}."
    )


def of_hundred(fraction: float) -> int:
    """Return how many of 100 that is; 100 and 0 only for all and none."""
    return min(99, max(1, round(100 * fraction))) if 0 < fraction < 1 else round(100 * fraction)


def describe_gain(gain: Mapping[str, Any]) -> str:
    """Return the paired differences in words: "Recall@1 +4.10 points (95%: +3.02 to +5.21), …"."""
    names = ("recall@1", "map@r", "ordered")
    return ", ".join(f"{score_title(n)} {in_points(gain[n])}" for n in names if n in gain)


def score_title(name: str) -> str:
    """Return the title of a score in a table: "Recall@1", "MAP, mean over classes"."""
    plain = name.removeprefix("class_mean_")
    title = _TITLES.get(plain, plain.capitalize())
    return title if plain == name else f"{title}, mean over classes"


def class_sums(queries: QueryScores) -> dict[str, list[float]]:
    """Return for each class the number of its queries, and the sums of their scores."""
    _, group, counts = torch.unique(queries.labels, return_inverse=True, return_counts=True)
    sums = {"recall@1": queries.recall, "map@r": queries.map_at_r}
    return {"queries": counts.tolist()} | {
        name: torch.bincount(group, values.double()).tolist() for name, values in sums.items()
    }


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
    )
    means |= {f"{name}_interval": list(interval) for name, interval in ends.items()}
    for name in ("items", "classes", "queries"):
        means[name] = sum(getattr(part, name) for part in parts)
    protocol = (
        f"{len(parts)} folds of classes, each embedded by a model that learned from the others; "
        f"searched within a fold: {PROTOCOL}"
    )
    return means | {"seed": seed, "protocol": protocol}
