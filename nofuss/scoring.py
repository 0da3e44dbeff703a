"""Scores of a model on classes it has not seen, beside what needs no training at all."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nofuss import console
from nofuss.data.collection import Collection
from nofuss.evaluate.intervals import class_intervals, paired_difference
from nofuss.evaluate.protocol import PROTOCOL, Scores, evaluate
from nofuss.evaluate.queries import PerQuery
from nofuss.model.start import pca_head
from nofuss.train.folds import QueryScores

KS = (1, 2, 4, 8)
"""The K of Recall@K that a run keeps, as the paper has them."""
EXTENDED = ("mrr", "map", "precision@", "class_mean_")
"""How the names of scores begin that are there on request."""


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
        baselines[f"their PCA, {dim}-d"] = pca_head(features[fit], dim)(raw[rows])
    return baselines


def score_table(title: str, columns: Mapping[str, Mapping[str, Any]]) -> None:
    """A column a method, a row a score, in percent."""
    first = next(iter(columns.values()))
    names = [n for n in first if n.startswith("recall@") and not n.endswith("_interval")]
    rows = {f"Recall@{n.removeprefix('recall@')}": n for n in names}
    rows |= {"MAP@R": "map@r", "R-precision": "r_precision", "NMI": "nmi", "AMI": "ami"}
    rows |= {_title(name): name for name in first if _is_extended(name)}
    shown = [
        [label, *(f"{100 * of[name]:.2f}" for of in columns.values())]
        for label, name in rows.items()
    ]
    console.table(title, ["%", *columns], shown)
    low, high = first[f"{names[0]}_interval"]
    console.say(
        f"{first['queries']:,} queries of {first['classes']:,} classes; Recall@"
        f"{names[0].removeprefix('recall@')} of the first column lies between {100 * low:.2f} and "
        f"{100 * high:.2f} (95%, over classes)"
    )
    if gain := first.get("gain"):
        console.say(f"over the {gain['over']}: {describe_gain(gain)}")


def describe_gain(gain: Mapping[str, Any]) -> str:
    """The paired differences in words: "Recall@1 +4.10 points (95%: +3.02 to +5.21), …"."""
    words = []
    for label, name in (("Recall@1", "recall@1"), ("MAP@R", "map@r")):
        mean, low, high = (100 * value for value in gain[name])
        words.append(f"{label} {mean:+.2f} points (95%: {low:+.2f} to {high:+.2f})")
    return ", ".join(words)


def _is_extended(name: str) -> bool:
    return name.startswith(EXTENDED) and name != "map@r" and not name.endswith("_interval")


def _title(name: str) -> str:
    """What a score that is there on request is called in a table."""
    of_classes = name.startswith("class_mean_")
    name = name.removeprefix("class_mean_").replace("r_precision", "R-precision")
    name = name.replace("map", "MAP").replace("mrr", "MRR").replace("@r", "@R")
    return f"{name[0].upper()}{name[1:]}" + (", mean over classes" if of_classes else "")


def scorable(labels: Any) -> bool:
    """Whether retrieval can be scored: two classes or more, one of them with two items."""
    sizes = np.unique(np.asarray(labels), return_counts=True)[1]
    return len(sizes) > 1 and int(sizes.max()) > 1


def score_all(embeddings: dict[str, Tensor], labels: Any, *, seed: int) -> dict[str, Scores]:
    """`evaluate` for each set of embeddings, on the same items."""
    y = np.asarray(labels)
    return {name: evaluate(x, y, ks=KS, seed=seed) for name, x in embeddings.items()}


def gain_over(
    name: str, ours: Sequence[PerQuery], theirs: Sequence[PerQuery], *, seed: int
) -> dict[str, Any]:
    """What was gained over the method `name`, query by query, in every fold."""
    ours_, theirs_ = _joined(ours), _joined(theirs)
    recall = paired_difference(ours_.recall, theirs_.recall, ours_.labels, seed)
    precision = paired_difference(ours_.map_at_r, theirs_.map_at_r, ours_.labels, seed)
    return {"over": name, "recall@1": [*recall], "map@r": [*precision]}


def score_folds(
    kept: Sequence[Tensor],
    baselines: Mapping[str, Sequence[Tensor]],
    labels: Sequence[Tensor],
    *,
    seed: int,
) -> dict[str, Any]:
    """Scores of classes that were held out in turn, each searched within its own fold.

    Means over the folds, by queries (NMI and AMI: by items), beside the baselines'.
    """

    def scored(embeddings: Sequence[Tensor]) -> list[Scores]:
        pairs = zip(embeddings, labels, strict=True)
        return [evaluate(x, y, ks=KS, seed=seed, bootstrap=0) for x, y in pairs]

    ours, others = scored(kept), {name: scored(of) for name, of in baselines.items()}
    name, first = next(iter(others.items()))
    gain = gain_over(name, [s.per_query for s in ours], [s.per_query for s in first], seed=seed)
    columns = {name: _mean_of_folds(of, seed=seed) for name, of in others.items()}
    return _mean_of_folds(ours, seed=seed) | {
        "gain": gain,
        "baselines": columns,
        "folds": len(labels),
    }


def _joined(parts: Sequence[PerQuery]) -> QueryScores:
    """Every query of every fold."""
    return QueryScores(
        torch.cat([part.recall1 for part in parts]),
        torch.cat([part.map_at_r for part in parts]),
        torch.cat([torch.as_tensor(part.labels) for part in parts]),
    )


def _mean_of_folds(parts: Sequence[Scores], *, seed: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in parts[0].as_dict().items():
        if isinstance(value, float):
            weights = [p.items if name in ("nmi", "ami") else p.queries for p in parts]
            values = [p.as_dict()[name] for p in parts]
            found[name] = float(np.average(values, weights=weights))
    queries = _joined([part.per_query for part in parts])
    ends = class_intervals(
        {"recall@1": queries.recall, "map@r": queries.map_at_r},
        queries.labels,
        seed=seed,
        resamples=1000,
    )
    found |= {f"{name}_interval": list(interval) for name, interval in ends.items()}
    for name in ("items", "classes", "queries"):
        found[name] = sum(getattr(part, name) for part in parts)
    protocol = (
        f"{len(parts)} folds of classes, each embedded by a model that learned from the others and "
        f"searched within itself; {PROTOCOL}"
    )
    return found | {"seed": seed, "protocol": protocol}
