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
from nofuss.data.triplets import HeldOut
from nofuss.errors import DataError
from nofuss.evaluate.protocol import KS, evaluate, gain_over, scorable, score_folds
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
from nofuss.training.finetune import Fit, Task
from nofuss.training.head import HeadFit

log = logging.getLogger("nofuss")


class SearchRules(NamedTuple):
    """How a run searches, as held-out classes say; None where these are too few."""

    unknown: list[float] | None = None
    """How near held-out items are to the other classes: quantiles, see ranking/open_set.py."""
    rerank: Rerank | None = None
    """None also where nothing is gained by it."""


def search_rules(
    task: Task, fit: Fit, vectors: Tensor, *, progress: Progress = silent
) -> SearchRules:
    """Choose whether search re-ranks, and find what a good match is, on held-out classes.

    vectors: unit embeddings (N, D) of all items. Of fixed features the folds held classes out.
    """
    whole, val, settings, head = task.whole, task.split.val, task.settings, fit.head
    if whole.by_links:  # two groups may be of one class, so no distance tells them apart
        return SearchRules()
    embeddings, labels, unknown = [], [], None
    if len(val) and not settings.is_fixed:  # an index of the run has these classes, and tells
        embeddings, labels = [vectors[val]], [torch.from_numpy(whole.labels[val])]
    elif head is not None and (settings.is_fixed or not settings.epochs):
        embeddings, labels = head.held_out(), _labels_of_folds(task, head)
        unknown = head.unknown()
    rerank = None
    if settings.rerank == "auto":
        rerank = choose_reranking(embeddings, labels, progress=progress)
    if rerank is not None:
        log.debug(rerank.describe())
    return SearchRules(unknown, rerank if rerank is not None and rerank.on else None)


def score(
    task: Task,
    fit: Fit,
    vectors: Tensor,
    x: Tensor | None,
    rules: SearchRules,
    *,
    progress: Progress = silent,
) -> dict[str, Any]:
    """Score on what is unseen beside what needs no training; return what scores.json holds.

    vectors: unit embeddings (N, D) of all items. x: features (N, F) of the untrained backbone. {}
    where nothing can be scored.
    """
    whole, split, seed = task.whole, task.split, task.settings.seed
    if split.by_folds and fit.head is not None and fit.head.outcomes:
        return _score_folds(task, fit.head, x, rules, progress)
    order = None
    if (compared := task.compared) is not None:
        rows, dim = compared.rows, fit.embedder.dim
        beside = untrained(whole, x, fit=split.train, rows=rows, dim=dim)
        order = score_orders(compared, {"kept": vectors[rows]} | beside)
    if not whole.has_classes or not len(split.test):
        if order is None:
            log.info(
                "nothing is held out, so there are no scores; for other data: nofuss evaluate RUN "
                "DATA"
            )
        return order or {}
    test = whole.subset(split.test)
    if not scorable(test.labels):
        log.info("the test classes are too few to score: two are needed, one with two items")
        return {}
    seen = np.sort(np.r_[split.train, split.val])
    columns = {"kept": vectors[split.test]}
    columns |= untrained(whole, x, fit=seen, rows=split.test, dim=fit.embedder.dim)
    found = {}
    for name, each in columns.items():
        queries, labels, options = among_themselves(each, test)
        found[name] = evaluate(queries, labels, ks=KS, seed=seed, progress=progress, **options)
    ours = found.pop("kept")
    scores = ours.as_dict()
    for name, other in [*found.items()][:1]:
        scores["gain"] = gain_over(name, [ours.per_query], [other.per_query])
    if rules.rerank is not None:
        queries, labels, options = among_themselves(columns["kept"], test)
        gallery = options.get("gallery"), options.get("gallery_labels")
        scores["reranked"] = reranked_scores(queries, labels, *gallery, progress=progress).as_dict()
    baselines = {name: other.as_dict() for name, other in found.items()}
    if order is not None:  # the labels' scores come first, then that of the triplets
        scores |= extra_of(order)
        for name, other in order["baselines"].items():
            baselines[name] |= extra_of(other)
    return scores | {"baselines": baselines}


def method_of(fit: Fit, settings: Settings) -> str:
    """Return the name of what is kept: that of the loss, where it was trained."""
    chosen = BEFORE if fit.head is None else fit.head.choice.kept
    if settings.epochs == 0:  # nothing was trained
        return CLOSED if chosen == TRAINED else chosen
    kept = chosen if fit.head is not None and settings.is_fixed else TRAINED
    kept = BEFORE if fit.fell_back else kept
    return settings.loss if kept == TRAINED else kept


def _labels_of_folds(task: Task, head: HeadFit) -> list[Tensor]:
    labels = torch.from_numpy(task.items.labels)
    return [labels[outcome.rows] for outcome in head.outcomes]


def _score_folds(
    task: Task, head: HeadFit, x: Tensor | None, rules: SearchRules, progress: Progress
) -> dict[str, Any]:
    """Return the scores of classes held out in turn, where all were trained on."""
    assert x is not None
    labels, features = _labels_of_folds(task, head), x[task.split.train]
    columns = {f"untrained features, {x.shape[1]}-d": [features[o.rows] for o in head.outcomes]}
    if head.choice.kept == TRAINED:
        columns["closed form"] = [outcome.embeddings[CLOSED] for outcome in head.outcomes]
    found = head.held_out()
    scores = score_folds(found, columns, labels, seed=task.settings.seed, progress=progress)
    if rules.rerank is not None:
        folds = [reranked_scores(z, y) for z, y in zip(found, labels, strict=True)]
        scores["reranked"] = of_folds(folds).as_dict()
    return scores


def untrained(
    collection: Collection, features: Tensor | None, *, fit: Any, rows: Any, dim: int
) -> dict[str, Tensor]:
    """Embeddings of `rows` that nothing was learned for: features as they are, and their PCA.

    The PCA is fitted on the rows `fit`, as the head's start is. Without features (a backbone
    that starts at random) the pixels are the baseline.
    """
    if features is None:
        if collection.images is None:
            return {}
        pixels = collection.images.reshape(len(collection), -1)
        return {"raw pixels": (torch.from_numpy(pixels).float() / 255)[rows]}
    width = features.shape[1]
    baselines = {f"untrained features, {width}-d": features[rows]}
    if dim < width and dim < len(fit):
        baselines[f"their PCA, {dim}-d"] = pca(features[fit], dim)(features[rows])
    return baselines


# Who searches where: items among each other, or queries in a gallery


class Queries(NamedTuple):
    """Arguments of `evaluate`: embeddings, their classes, and the gallery with its classes."""

    embeddings: Tensor
    labels: NDArray[np.generic]
    options: RetrievalOptions


def among_themselves(vectors: Tensor, collection: Collection) -> Queries:
    """Search every item among all others, or items marked query among those marked gallery."""
    check_queries_and_gallery(collection)
    return queries_and_gallery(vectors, collection.known_labels(), collection.split)


def queries_and_gallery(
    vectors: Tensor, labels: NDArray[np.generic], split: NDArray[np.str_] | None
) -> Queries:
    """Search every item among all others, or those marked query among those marked gallery."""
    if split is None or GALLERY not in split:
        return Queries(vectors, labels, {})
    queries, gallery = (np.flatnonzero(split == name) for name in (QUERY, GALLERY))
    options: RetrievalOptions = {"gallery": vectors[gallery], "gallery_labels": labels[gallery]}
    return Queries(vectors[queries], labels[queries], options)


def check_queries_and_gallery(collection: Collection) -> None:
    """Refuse items marked gallery without items marked query, or with none of their classes."""
    split = collection.split
    if split is None or GALLERY not in split:
        return
    if QUERY not in split:
        raise DataError(
            f"{collection.name} has rows of split gallery but none of split query; add some"
        )
    names = names_of(collection)
    check_shared(names[split == QUERY], names[split == GALLERY])


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
