"""All scores of an embedding at once, with intervals: the protocol of the paper, stated.

Recall@K and NMI as in the paper's section 5; MAP@R, R-precision and AMI beside them; MAP, MRR,
precision@K and means over classes on request. Queries may search a separate gallery, as in In-Shop
retrieval.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Unpack

import torch
from torch import Tensor

from nofuss.evaluate.averages import average_of, class_means
from nofuss.evaluate.checked import classes_of, shared_classes, vectors_of
from nofuss.evaluate.intervals import class_intervals
from nofuss.evaluate.nmi import (
    adjusted_mutual_information,
    cluster,
    normalized_mutual_information,
)
from nofuss.evaluate.precision import precisions
from nofuss.evaluate.queries import PerQuery, of_queries
from nofuss.evaluate.recall import checked_ks, hits, ranks_of_first_positive, reciprocal
from nofuss.evaluate.task import Options
from nofuss.geometry import Array, as_tensor
from nofuss.progress import Progress, silent, working

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
    "ties count as wrong; "
    "NMI and AMI of k-means (k-means++ seeds with swaps, Lloyd, Hartigan's exchanges) with as many "
    "clusters as classes; 95% intervals by resampling classes"
)
PROTOCOL = f"{QUERIES[False]}; {DISTANCES[True]}, {SCORES}"


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
        scores: dict[str, Any] = {f"recall@{k}": share for k, share in self.recall.items()}
        scores |= {"map@r": self.map_at_r, "r_precision": self.r_precision}
        scores |= {"nmi": self.nmi, "ami": self.ami} | self.extended
        scores |= {f"{name}_interval": list(ends) for name, ends in self.intervals.items()}
        scores |= {"items": self.items, "classes": self.classes, "queries": self.queries}
        return scores | {"seed": self.seed, "protocol": self.protocol}


def evaluate(
    embeddings: Array,
    labels: Array,
    *,
    ks: Sequence[int] = (1, 2, 4, 8),
    seed: int = 0,
    bootstrap: int = 1000,
    extended: bool = False,
    progress: Progress = silent,
    **options: Unpack[Options],
) -> Scores:
    """Return Recall@K, MAP@R, R-precision, NMI and AMI of embeddings whose classes are known.

    `gallery`, `gallery_labels` and `query_rows` are as in `recall_at_k`; NMI and AMI are then of
    all items, queries and gallery. `extended` adds MRR, precision@K, MAP over all ranks, which
    takes several times as long, and the means of the classes' means.

    The intervals (95%, for the retrieval scores) resample the classes `bootstrap` times and average
    the results of their queries. They cover which classes happened to be in the test set, but not
    a gallery of other classes, another training run, or the seed of k-means (NMI and AMI have no
    interval). The same seed gives the same scores; `bootstrap=0` leaves the intervals out.
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
        seed=seed,
        resamples=bootstrap,
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
        classes=len(torch.unique(classes if has_gallery else item_classes)),
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
