"""What an index says of a query beside its neighbours: whether anything similar is there.

The rule is that of ranking/open_set.py; here is where its numbers are from. A sample of at most
`SAMPLED` items keeps the backbone's features in the index, in half precision: class means follow
from those that are there, so that items come, go and are relabelled without sums that would have to
be kept right. Which items are drawn follows from their names alone: every process that writes into
a database knows it without asking the others, and the same items are drawn again tomorrow.

The learned class means are those of all items in a folder, and of the sample in a database.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from nofuss.errors import RunError
from nofuss.model.encoder import Encoded, Encoder
from nofuss.model.manifest import mapped
from nofuss.ranking.open_set import (
    ENOUGH_CLASSES,
    Match,
    OpenSet,
    are_quantiles,
    class_sums,
    far,
    near,
    quantiles,
)
from nofuss.search.folder import FolderIndex
from nofuss.search.index import SAMPLED, About, Index, Item, draw, vectors_of

UNKNOWN = "unknown"
"""Key of what training keeps of them with the model."""
_MARGIN = 1.2  # how many more items keep their features than are drawn, as keys are random


class Query(NamedTuple):
    """What is searched for."""

    vector: Tensor
    """(D,) by the model as it was trained."""
    far: float | None = None
    """How far it is from all class means; None for an item of the index, which is not asked."""


@dataclass(frozen=True)
class Verdict:
    """Whether anything like a query is there."""

    match: Match = "unknown"
    """unknown: among filtered items, or in an index without a rule."""
    sentence: str = ""
    """The same in a sentence; empty for unknown."""
    numbers: Mapping[str, float | None] = field(default_factory=dict)
    """What it follows from: far and near values, their limits, and the fraction of unknown items
    that look as similar."""


class Means(NamedTuple):
    """The class means of an index, but for their lengths."""

    learned: Tensor
    """(C, D) sums of the vectors in force."""
    features: Tensor
    """(B, F) sums of the backbone's features."""
    places: Mapping[object, int]
    """Class → row of `learned`, see `_class_of`."""


_KNOWN: WeakKeyDictionary[Index, tuple[OpenSet, Means]] = WeakKeyDictionary()


def queries_of(index: Index, encoded: Encoded) -> list[Query]:
    """Return what to search for, given pictures as an encoder sees them."""
    rule, values = index.about.open_set, list[float | None]([None] * len(encoded.vectors))
    if rule is not None:
        values = far(encoded.features, _means_of(index, rule).features).tolist()
    return [Query(vector, value) for vector, value in zip(encoded.vectors, values, strict=True)]


def judged(index: Index, queries: Sequence[Query], *, without: str | None = None) -> list[Verdict]:
    """Return whether anything like each query is in an index, without one of its items."""
    rule = index.about.open_set
    if rule is None or not queries:
        return [Verdict()] * len(queries)
    means, own = _means_of(index, rule), None
    x = mapped(torch.stack([query.vector for query in queries]), index.matrix)
    if without is not None:
        places = [means.places.get(_class_of(*item[:2]), -1) for item in index.get([without])]
        own = torch.tensor((places or [-1]) * len(queries))
    found = []
    for query, value in zip(queries, near(x, means.learned, own).tolist(), strict=True):
        numbers = {
            "far": query.far,
            "far_limit": rule.far_limit,
            "near": value,
            "near_limit": rule.near_limit,
            "unknown_fraction": rule.fraction(value),
        }
        found.append(Verdict(*rule.judge(query.far, value), numbers))
    return found


def with_features(items: Sequence[Item], features: Tensor, count: int) -> list[Item]:
    """Give features (N, F) to the items that may be drawn from an index of `count` items."""
    last = _MARGIN * SAMPLED / max(1, count)
    return [
        item._replace(features=of) if draw(item.name) < last else item
        for item, of in zip(items, features.half(), strict=True)
    ]


def calibrated(index: Index, encoder: Encoder) -> About:
    """Return what holds for the index: its limits, and how many relatives a typical item has."""
    sample = index.get(index.sample(SAMPLED), vectors=True)
    unknown = _unknown(sample, _compute_means(index, sample), index, encoder)
    rule = OpenSet.of(*_features(sample), unknown)
    return index.about._replace(open_set=rule, relatives=_relatives(index, sample))


def _unknown(
    sample: Sequence[Item], means: Means, index: Index, encoder: Encoder
) -> list[float] | None:
    """Return how near unknown items are: as folds of the run found, and items of new classes."""
    labelled = [item for item in sample if item.label is not None]
    unseen = [item for item in labelled if item.label not in encoder.class_names]
    values = torch.empty(0)
    if unseen:
        own = torch.tensor([means.places[_class_of(*item[:2])] for item in unseen])
        values = near(_vectors(unseen, index), means.learned, own, unknown=True)
    classes = len({item.label for item in unseen})
    if len(unseen) < len(labelled) and (of_folds := encoder.extra.get(UNKNOWN)) is not None:
        if not are_quantiles(of_folds):
            raise RunError(
                f"model.json holds {UNKNOWN} that nofuss did not write; restore it, or train again"
            )
        # Few new classes change little, and many replace what the folds found.
        values, classes = torch.cat([values, torch.tensor(of_folds)]), classes + ENOUGH_CLASSES
    return quantiles(values, classes)


def _relatives(index: Index, sample: Sequence[Item]) -> int | None:
    """Return how many others of its class a typical item has; None without labels."""
    labels = index.labels if isinstance(index, FolderIndex) else [item.label for item in sample]
    sizes = np.array(list(Counter(label for label in labels if label is not None).values()))
    if not len(sizes):
        return None
    of_all = index.count() / len(labels)
    return round((float(np.median(np.repeat(sizes, sizes))) - 1) * of_all)


# Class means


def _means_of(index: Index, rule: OpenSet) -> Means:
    """Return the class means of an index, computed once for a rule."""
    known = _KNOWN.get(index)
    if known is None or known[0] != rule:
        sample = index.get(index.sample(SAMPLED), vectors=True)
        known = _KNOWN[index] = rule, _compute_means(index, sample)
    return known[1]


def _compute_means(index: Index, sample: Sequence[Item]) -> Means:
    described = [(item.name, item.label) for item in sample]
    if isinstance(index, FolderIndex):  # all items, but of those without a label only the sample
        drawn = {item.name for item in sample}
        every = [*zip(index.names, index.labels, strict=True)]
        rows = [i for i, (name, label) in enumerate(every) if label is not None or name in drawn]
        described = [every[row] for row in rows]
        vectors = index.vectors if len(rows) == len(index) else index.vectors[rows]
    else:
        vectors = _vectors(sample, index)
    codes, places = _codes(described)
    return Means(class_sums(vectors, codes), class_sums(*_features(sample)), places)


def _codes(items: Iterable[tuple[str, str | None]]) -> tuple[Tensor, dict[object, int]]:
    """Return the class of each item as a number, given name and label, and what has which."""
    places: dict[object, int] = {}
    codes = [places.setdefault(_class_of(name, label), len(places)) for name, label in items]
    return torch.tensor(codes, dtype=torch.int64), places


def _class_of(name: str, label: str | None) -> object:
    """Return what names an item's class: without a label it is one of its own."""
    return name if label is None else (label,)


def _features(sample: Sequence[Item]) -> tuple[Tensor, Tensor]:
    """Return the features (S, F) of those items that have some, and their classes (S,)."""
    some = [(item[:2], item.features) for item in sample if item.features is not None]
    codes, _ = _codes(described for described, _ in some)
    features = torch.stack([x for _, x in some]) if some else torch.empty(0, 0)
    return features.float(), codes


def _vectors(items: Iterable[Item], index: Index) -> Tensor:
    return mapped(vectors_of(items, index.about.dim), index.matrix)
