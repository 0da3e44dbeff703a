"""All scores of an embedding at once, with intervals: the protocol of the paper, stated.

Recall@K and NMI as in the paper's section 5; MAP@R, R-precision and AMI beside them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from nofuss.evaluate.inputs import classes_of, vectors_of
from nofuss.evaluate.intervals import class_intervals
from nofuss.evaluate.nmi import (
    adjusted_mutual_information,
    cluster,
    normalized_mutual_information,
)
from nofuss.evaluate.precision import precisions
from nofuss.evaluate.recall import ranks_of_first_positive, recall_of_ranks
from nofuss.geometry import Array

PROTOCOL = (
    "every item queries all others, itself left out by index; classes with one item stay in the "
    "gallery and are no queries; Euclidean distance on the unit sphere, ties count as wrong; "
    "NMI and AMI of k-means (k-means++ seeds, Lloyd, Hartigan's exchanges) with as many clusters "
    "as classes; 95% intervals by resampling classes"
)


@dataclass(frozen=True)
class Scores:
    """What `evaluate` found; `as_dict()` is what `scores.json` holds."""

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
    protocol: str = PROTOCOL

    def as_dict(self) -> dict[str, Any]:
        """Flat and ready for JSON: `recall@1`, `recall@1_interval` [low, high], `map@r` …"""
        scores: dict[str, Any] = {f"recall@{k}": share for k, share in self.recall.items()}
        scores |= {"map@r": self.map_at_r, "r_precision": self.r_precision}
        scores |= {"nmi": self.nmi, "ami": self.ami}
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
) -> Scores:
    """Recall@K, MAP@R, R-precision, NMI and AMI of embeddings whose classes are known.

    The intervals (95%, for the retrieval scores) resample the classes `bootstrap` times and average
    the results that their queries had. They cover which classes happened to be in the test set; not
    a gallery of other classes, another training run, or the seed of k-means (NMI and AMI have no
    interval). The same seed gives the same scores; `bootstrap=0` leaves the intervals out.
    """
    x = vectors_of(embeddings)
    classes = classes_of(labels, len(x))
    ranks = ranks_of_first_positive(x, classes)
    recall = recall_of_ranks(ranks, ks)
    found = precisions(x, classes)
    clusters = cluster(x, classes, seed=seed)
    results = {f"recall@{k}": (ranks <= k).double() for k in recall}
    results |= {"map@r": found.map_at_r, "r_precision": found.r_precision}
    is_query = (ranks > 0).cpu()
    intervals = class_intervals(
        {name: values.cpu()[is_query] for name, values in results.items()},
        classes[is_query],
        seed=seed,
        resamples=bootstrap,
    )
    return Scores(
        recall=recall,
        map_at_r=float(found.map_at_r.nanmean()),
        r_precision=float(found.r_precision.nanmean()),
        nmi=normalized_mutual_information(clusters, classes),
        ami=adjusted_mutual_information(clusters, classes),
        items=len(x),
        classes=int(classes.max()) + 1,
        queries=int(is_query.sum()),
        seed=seed,
        intervals=intervals,
    )
