"""The scores of a finished training, on what it has not seen; scores.json."""

import logging
from typing import Any

import numpy as np
from torch import Tensor

from nofuss.data.comparisons import Compared
from nofuss.data.split import Rows
from nofuss.evaluate.order import extra_of
from nofuss.evaluate.ranked import ranked_scores, reranking_summary
from nofuss.evaluate.side_by_side import gain_over, scorable
from nofuss.model.encoder import Encoder
from nofuss.model.inference import through_head
from nofuss.report.order import score_orders
from nofuss.report.queries import among_themselves, score_all
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
    config, rows = job.config, job.sides.test
    if job.fold_scores is not None:
        return _write_scores(job, job.fold_scores)
    if job.collection.labels is None or job.collection.by_links or not len(rows):
        return _score_order(job, compared)
    labels = np.asarray(job.collection.labels)[rows]
    if not scorable(labels):
        log.info("the test classes are too few to score: two are needed, one with two items")
        return {}
    fit = np.sort(np.r_[job.sides.train, job.sides.held_out])
    baselines = untrained(job.collection, job.features, fit=fit, rows=rows, dim=job.embedder.dim)
    weighting = job.reranking.weighting if job.reranking is not None else None
    reranked, test = None, job.collection.subset(rows)
    progress = job.callbacks.progress
    columns = score_all({"kept": found} | baselines, test, seed=config.seed, progress=progress)
    if weighting is not None:
        queries, own, options = among_themselves(found, test)
        given = options.get("gallery"), options.get("gallery_labels")
        reranked = ranked_scores(queries, own, (None, weighting), *given, progress=progress)
    ours = columns.pop("kept")
    scores = ours.as_dict()
    for name, other in [*columns.items()][:1]:
        pair = [ours.per_query], [other.per_query]
        scores["gain"] = gain_over(name, *pair, seed=config.seed)
    beside = {name: other.as_dict() for name, other in columns.items()}
    if weighting is not None and reranked is not None:
        plain, after = reranked
        scores["reranked"] = reranking_summary(after, plain, seed=config.seed)
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


def _order(job: Job, compared: Compared, found: Tensor) -> dict[str, Any]:
    """Return how the model, and what needs no training, order held-out triplets or pairs."""
    fit, rows = job.sides.train, compared.rows
    baselines = untrained(job.collection, job.features, fit=fit, rows=rows, dim=job.embedder.dim)
    columns = {"kept": found} | baselines
    return score_orders(compared.collection, columns, seed=job.config.seed)


def _write_scores(job: Job, scores: dict[str, Any]) -> dict[str, Any]:
    """Write scores.json, which also names the method that was kept."""
    kept = job.choice.kept if job.choice is not None and job.fixed else TRAINED
    kept = BEFORE if job.fell_back else kept
    name = job.config.loss if kept == TRAINED else kept
    job.run.write("scores.json", scores | {"method": name})
    return scores
