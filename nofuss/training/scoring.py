"""The scores of a finished training, on what it has not seen; scores.json."""

import logging
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from nofuss.data.collection import GALLERY, QUERY, Collection
from nofuss.data.split import Rows
from nofuss.data.triplets import HeldOut
from nofuss.errors import DataError
from nofuss.evaluate.protocol import KS, Scores, evaluate, gain_over, scorable
from nofuss.evaluate.retrieval import Options
from nofuss.evaluate.triplet_accuracy import (
    Accuracy,
    extra_of,
    pair_accuracy,
    triplet_accuracy,
)
from nofuss.model.embedder import through_head
from nofuss.model.encoder import Encoder
from nofuss.progress import Progress, silent
from nofuss.ranking.rerank import reranked_scores, summary
from nofuss.run.choice import BEFORE, TRAINED
from nofuss.training.baselines import untrained
from nofuss.training.job import Job

log = logging.getLogger("nofuss")


def embed_rows(job: Job, rows: Rows) -> Tensor:
    """Return the trained embeddings of these rows of the collection, of any length."""
    if job.fixed:
        return through_head(job.embedder, job.for_head(rows))
    encoder = Encoder(job.embedder)
    items = job.collection.subset(rows)
    return encoder.embed_collection(items, progress=job.callbacks.progress, unit=False)


def score(job: Job, found: Tensor, compared: Tensor | None) -> dict[str, Any]:
    """Score on what is unseen beside what needs no training; return what scores.json holds.

    found: embeddings of the test items. compared: of the held-out triplets or pairs.
    """
    config, rows = job.config, job.split.test
    if job.fold_scores is not None:
        return _write_scores(job, job.fold_scores)
    if not job.collection.has_classes or not len(rows):
        return _score_order(job, compared)
    labels = job.collection.labels[rows]
    if not scorable(labels):
        log.info("the test classes are too few to score: two are needed, one with two items")
        return {}
    fit = np.sort(np.r_[job.split.train, job.split.val])
    baselines = untrained(job.collection, job.features, fit=fit, rows=rows, dim=job.embedder.dim)
    weighting = job.reranking.weighting if job.reranking is not None else None
    reranked, test = None, job.collection.subset(rows)
    progress = job.callbacks.progress
    columns = score_all({"kept": found} | baselines, test, seed=config.seed, progress=progress)
    if weighting is not None:
        queries, own, options = among_themselves(found, test)
        given = options.get("gallery"), options.get("gallery_labels")
        reranked = reranked_scores(queries, own, (None, weighting), *given, progress=progress)
    ours = columns.pop("kept")
    scores = ours.as_dict()
    for name, other in [*columns.items()][:1]:
        pair = [ours.per_query], [other.per_query]
        scores["gain"] = gain_over(name, *pair)
    beside = {name: other.as_dict() for name, other in columns.items()}
    if weighting is not None and reranked is not None:
        plain, after = reranked
        scores["reranked"] = summary(after, plain)
    if job.compared is not None and compared is not None:
        # The labels' scores come first, then that of the triplets.
        order = _order(job, job.compared, compared)
        scores |= extra_of(order)
        for name, other in order["baselines"].items():
            beside[name] |= extra_of(other)
    return _write_scores(job, scores | {"baselines": beside})


def _score_order(job: Job, compared: Tensor | None) -> dict[str, Any]:
    """Score on held-out triplets or pairs beside what needs no training; write scores.json."""
    if job.compared is None or compared is None:
        log.info(
            "nothing is held out, so there are no scores; for other data: nofuss evaluate RUN DATA"
        )
        return {}
    return _write_scores(job, _order(job, job.compared, compared))


def _order(job: Job, compared: HeldOut, found: Tensor) -> dict[str, Any]:
    """Return how the model, and what needs no training, order held-out triplets or pairs."""
    fit, rows = job.split.train, compared.rows
    baselines = untrained(job.collection, job.features, fit=fit, rows=rows, dim=job.embedder.dim)
    columns = {"kept": found} | baselines
    return score_orders(compared, columns)


def _write_scores(job: Job, scores: dict[str, Any]) -> dict[str, Any]:
    """Write scores.json, which also names the method that was kept."""
    kept = job.choice.kept if job.choice is not None and job.fixed else TRAINED
    kept = BEFORE if job.fell_back else kept
    name = job.config.loss if kept == TRAINED else kept
    job.run.write("scores.json", scores | {"method": name})
    return scores


# Who searches where: items among each other, or queries in a gallery


class Queries(NamedTuple):
    """Arguments of `evaluate`: embeddings, their classes, and the gallery with its classes."""

    embeddings: Tensor
    labels: NDArray[np.generic]
    options: Options


def among_themselves(vectors: Tensor, collection: Collection) -> Queries:
    """Search every item among all others, or items marked query among those marked gallery."""
    labels = collection.known_labels()
    if (sides := query_and_gallery(collection)) is None:
        return Queries(vectors, labels, {})
    query_rows, gallery_rows = sides
    options: Options = {"gallery": vectors[gallery_rows], "gallery_labels": labels[gallery_rows]}
    return Queries(vectors[query_rows], labels[query_rows], options)


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
