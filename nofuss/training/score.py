"""The scores of a finished training, on what it has not seen, and how its search works."""

import logging
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nofuss.config import Settings
from nofuss.data.collection import GALLERY, QUERY, Collection
from nofuss.data.open import TrainingData
from nofuss.data.split import Rows, Split
from nofuss.data.triplets import HeldOut
from nofuss.errors import DataError
from nofuss.evaluate.protocol import KS, Scores, evaluate, gain_over, scorable, score_folds
from nofuss.evaluate.retrieval import Options as RetrievalOptions
from nofuss.evaluate.triplet_accuracy import (
    Accuracy,
    extra_of,
    pair_accuracy,
    triplet_accuracy,
)
from nofuss.model.whitening import pca
from nofuss.progress import Progress, silent
from nofuss.ranking.rerank import Rerank, choose_reranking, of_folds, reranked_scores
from nofuss.run.choice import BEFORE, CLOSED, TRAINED
from nofuss.training.finetune import Fit

log = logging.getLogger("nofuss")


class Embedded(NamedTuple):
    """Embeddings that scores are of, and the items that they are scored on."""

    test: Tensor
    """Unit vectors of the test items."""
    val: Tensor | None
    """Unit vectors of the held-out training classes, where a network was trained."""
    compared: Tensor | None
    """Of the held-out triplets or pairs, of any length."""
    comparisons: HeldOut | None


class SearchRules(NamedTuple):
    """How a run searches, as held-out classes say; None where these are too few."""

    strangers: list[float] | None = None
    """How near held-out items are to the other classes: quantiles, see ranking/open_set.py."""
    rerank: Rerank | None = None
    """None also where nothing is gained by it."""


# How to search


def search_rules(
    fit: Fit,
    val: Tensor | None,
    data: TrainingData,
    split: Split,
    settings: Settings,
    *,
    progress: Progress = silent,
) -> SearchRules:
    """Choose whether search re-ranks, and find what a good match is, on held-out classes.

    val: unit vectors of the held-out training classes, where a network was trained; on fixed
    features the folds have embedded all of them.
    """
    whole = data.collection
    if whole.by_links:  # two groups may be of one class, so no distance tells them apart
        return SearchRules()
    is_of_folds = fit.head is not None and (settings.is_fixed or not settings.epochs)
    embeddings, labels, strangers = [], [], None
    if val is not None:  # an index of the run has these classes, and tells from them
        embeddings, labels = [val], [torch.from_numpy(whole.labels[split.val])]
    elif is_of_folds and fit.head is not None:
        embeddings, labels = fit.head.held_out(), _labels_of_folds(fit, data, split)
        strangers = fit.head.strangers()
    rerank = None
    if embeddings and settings.rerank == "auto":
        rerank = choose_reranking(embeddings, labels, progress=progress)
    if rerank is not None:
        log.debug(rerank.describe())
    return SearchRules(strangers, rerank if rerank is not None and rerank.on else None)


def _labels_of_folds(fit: Fit, data: TrainingData, split: Split) -> list[Tensor]:
    assert fit.head is not None
    labels = torch.from_numpy(data.collection.labels[split.train])
    return [labels[outcome.rows] for outcome in fit.head.outcomes]


# Scores


def score(
    fit: Fit,
    embedded: Embedded,
    x: Tensor | None,
    data: TrainingData,
    split: Split,
    settings: Settings,
    rules: SearchRules,
    *,
    progress: Progress = silent,
) -> dict[str, Any]:
    """Score on what is unseen beside what needs no training; return what scores.json holds.

    x: features (N, F) of the untrained backbone. {} where nothing can be scored.
    """
    whole, rows = data.collection, split.test
    if split.by_folds and fit.head is not None and fit.head.outcomes:
        return _score_folds(fit, x, data, split, settings, rules, progress)
    if not whole.has_classes or not len(rows):
        if embedded.compared is None or embedded.comparisons is None:
            log.info(
                "nothing is held out, so there are no scores; for other data: nofuss evaluate RUN "
                "DATA"
            )
            return {}
        return _score_order(fit, embedded.comparisons, embedded.compared, x, data, split)
    if not scorable(whole.labels[rows]):
        log.info("the test classes are too few to score: two are needed, one with two items")
        return {}
    seen = np.sort(np.r_[split.train, split.val])
    baselines = untrained(whole, x, fit=seen, rows=rows, dim=fit.embedder.dim)
    test = whole.subset(rows)
    columns = score_all(
        {"kept": embedded.test} | baselines, test, seed=settings.seed, progress=progress
    )
    ours = columns.pop("kept")
    scores = ours.as_dict()
    for name, other in [*columns.items()][:1]:
        scores["gain"] = gain_over(name, [ours.per_query], [other.per_query])
    if rules.rerank is not None:
        queries, own, options = among_themselves(embedded.test, test)
        gallery = options.get("gallery"), options.get("gallery_labels")
        scores["reranked"] = reranked_scores(queries, own, *gallery, progress=progress).as_dict()
    beside = {name: other.as_dict() for name, other in columns.items()}
    if embedded.comparisons is not None and embedded.compared is not None:
        # The labels' scores come first, then that of the triplets.
        order = _score_order(fit, embedded.comparisons, embedded.compared, x, data, split)
        scores |= extra_of(order)
        for name, other in order["baselines"].items():
            beside[name] |= extra_of(other)
    return scores | {"baselines": beside}


def method_of(fit: Fit, settings: Settings) -> str:
    """Return the name of what is kept: that of the loss, where it was trained."""
    chosen = BEFORE if fit.head is None else fit.head.choice.kept
    if settings.epochs == 0:  # nothing was trained
        return CLOSED if chosen == TRAINED else chosen
    kept = chosen if fit.head is not None and settings.is_fixed else TRAINED
    kept = BEFORE if fit.fell_back else kept
    return settings.loss if kept == TRAINED else kept


def _score_folds(
    fit: Fit,
    x: Tensor | None,
    data: TrainingData,
    split: Split,
    settings: Settings,
    rules: SearchRules,
    progress: Progress,
) -> dict[str, Any]:
    """Return the scores of classes held out in turn, where all were trained on."""
    assert fit.head is not None
    assert x is not None
    outcomes, labels = fit.head.outcomes, _labels_of_folds(fit, data, split)
    features = x[split.train]
    columns = {f"untrained features, {x.shape[1]}-d": [features[o.rows] for o in outcomes]}
    if fit.head.choice.kept == TRAINED:
        columns["closed form"] = [outcome.embeddings[CLOSED] for outcome in outcomes]
    found = fit.head.held_out()
    scores = score_folds(found, columns, labels, seed=settings.seed, progress=progress)
    if rules.rerank is not None:
        folds = [reranked_scores(z, y) for z, y in zip(found, labels, strict=True)]
        scores["reranked"] = of_folds(folds).as_dict()
    return scores


def _score_order(
    fit: Fit,
    compared: HeldOut,
    found: Tensor,
    x: Tensor | None,
    data: TrainingData,
    split: Split,
) -> dict[str, Any]:
    """Return how the model, and what needs no training, order held-out triplets or pairs."""
    rows, dim = compared.rows, fit.embedder.dim
    baselines = untrained(data.collection, x, fit=split.train, rows=rows, dim=dim)
    return score_orders(compared, {"kept": found} | baselines)


def untrained(
    collection: Collection, features: Tensor | None, *, fit: Any, rows: Any, dim: int
) -> dict[str, Tensor]:
    """Embeddings of `rows` that nothing was learned for: features as they are, and their PCA.

    The PCA is fitted on the rows `fit`, as the head's start is. Without features (a backbone
    that starts at random) the pixels are the baseline.
    """
    if features is not None:
        raw, name = features, f"untrained features, {features.shape[1]}-d"
    elif collection.images is not None:
        pixels = collection.images.reshape(len(collection), -1)
        raw, name = torch.from_numpy(pixels).float() / 255, "raw pixels"
    else:
        return {}
    baselines = {name: raw[rows]}
    if features is not None and dim < features.shape[1] and dim < len(fit):
        baselines[f"their PCA, {dim}-d"] = pca(features[fit], dim)(raw[rows])
    return baselines


# Who searches where: items among each other, or queries in a gallery


class Queries(NamedTuple):
    """Arguments of `evaluate`: embeddings, their classes, and the gallery with its classes."""

    embeddings: Tensor
    labels: NDArray[np.generic]
    options: RetrievalOptions


def among_themselves(vectors: Tensor, collection: Collection) -> Queries:
    """Search every item among all others, or items marked query among those marked gallery."""
    query_and_gallery(collection)
    return among_sides(vectors, collection.known_labels(), collection.split)


def among_sides(
    vectors: Tensor, labels: NDArray[np.generic], split: NDArray[np.str_] | None
) -> Queries:
    """Search every item among all others, or those of side query among those of side gallery."""
    if split is None or GALLERY not in split:
        return Queries(vectors, labels, {})
    queries, gallery = (np.flatnonzero(split == side) for side in (QUERY, GALLERY))
    options: RetrievalOptions = {"gallery": vectors[gallery], "gallery_labels": labels[gallery]}
    return Queries(vectors[queries], labels[queries], options)


def query_and_gallery(collection: Collection) -> tuple[Rows, Rows] | None:
    """Return the rows marked query and gallery; None if there are none, DataError if not both."""
    if collection.split is None or GALLERY not in collection.split:
        return None
    query_rows, gallery_rows = (
        np.flatnonzero(collection.split == side) for side in (QUERY, GALLERY)
    )
    if not len(query_rows):
        raise DataError(
            f"{collection.name} has rows of split gallery but none of split query; add some"
        )
    names = names_of(collection)
    check_shared(names[query_rows], names[gallery_rows])
    return query_rows, gallery_rows


def score_all(
    embeddings: dict[str, Tensor],
    collection: Collection,
    *,
    seed: int,
    progress: Progress = silent,
) -> dict[str, Scores]:
    """Return the scores of each set of embeddings of a collection, searched `among_themselves`."""
    found = {}
    for name, vectors in embeddings.items():
        queries, labels, options = among_themselves(vectors, collection)
        found[name] = evaluate(queries, labels, ks=KS, seed=seed, progress=progress, **options)
    return found


def names_of(collection: Collection) -> NDArray[np.str_]:
    """Return the name of each item's class."""
    if not collection.has_classes:
        raise DataError(f"{collection.name} has no labels, so hits can't be counted; add labels")
    return np.asarray(collection.class_names)[collection.known_labels()]


def check_shared(labels: NDArray[np.str_], others: NDArray[np.str_]) -> None:
    """Refuse queries and a gallery without a common class."""
    if not len(np.intersect1d(labels, others)):
        raise DataError(
            f"queries and gallery share no class ({labels[0]}, … and {others[0]}, …); "
            "give the same class the same name in both"
        )


def score_order(scored: HeldOut, embeddings: Tensor) -> Accuracy:
    """Return how many triplets or pairs the embeddings of `scored.rows` put in the right order."""
    groups = scored.comparisons.resampled_together(len(scored.rows))
    order = triplet_accuracy if scored.comparisons.kind == "triplets" else pair_accuracy
    return order(embeddings, scored.comparisons.rows, groups=groups)


def score_orders(scored: HeldOut, columns: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the scores of the first column, with the others as baselines and the gain over one."""
    scores = {name: score_order(scored, x) for name, x in columns.items()}
    (_, ours), *others = scores.items()
    gain = {"gain": ours.gain_over(*others[0])} if others else {}
    return ours.as_dict() | gain | {"baselines": {name: s.as_dict() for name, s in others}}
