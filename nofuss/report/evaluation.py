"""Score a run on its test classes, on other data, or in a gallery: `nofuss evaluate`."""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from nofuss.data.collection import Collection
from nofuss.data.comparisons import Compared
from nofuss.data.labelling import Labelling, labelling_of
from nofuss.data.split import Rows, by_folds, sides_of
from nofuss.data.usable import open_usable
from nofuss.distributed import processes
from nofuss.errors import DataError, UsageError
from nofuss.evaluate.order import extra_of
from nofuss.evaluate.protocol import evaluate
from nofuss.evaluate.ranked import ranked_scores, reranking_summary
from nofuss.evaluate.reranking import Reranking
from nofuss.evaluate.side_by_side import KS, scorable
from nofuss.evaluate.smoothing import Weighting
from nofuss.model.encoder import Encoder, load
from nofuss.progress import Progress, silent
from nofuss.report import read_optional_json, write_report
from nofuss.report.card import write_card
from nofuss.report.order import can_compare, held_out_comparisons, score_order
from nofuss.report.queries import among_themselves, within_gallery
from nofuss.report.report import foreign
from nofuss.run.directory import Run, check_same_data
from nofuss.run.embeddings import load_embeddings, without_sample

log = logging.getLogger("nofuss")
SHOWN = 5e-5
"""Scores that differ by less are printed alike: half of a hundredth of a percent."""


class Scored(NamedTuple):
    """Scores as scores.json holds them, and what they are of."""

    title: str
    method: str
    scores: dict[str, Any]
    report: Path | None = None
    """The report that was written again."""


def score_run(
    run: Run,
    data: Path | None,
    *,
    gallery: Path | None,
    ks: list[int],
    extended: bool,
    rerank: str,
    seed: int,
    device: str,
    progress: Progress = silent,
) -> Scored | None:
    """Score a run; without `data` on its test classes, and the scores are kept.

    The caller holds the run's lock where the scores are kept. Of several processes the first
    returns the scores.
    """
    path = run.path
    encoder = load(path, device=device)
    labelling = labelling_of(run.config)
    compared: Compared | None = None
    with processes.in_turn():
        own = run.corrections if data is None else None
        data_path = data or run.own_data
        collection, _ = open_usable(
            data_path, labelling=labelling, corrections=own, progress=progress
        )
    processes.check_same("data", collection.fingerprint)
    if data is None:
        cure = "restore them, or give DATA to score the run on other data"
        check_same_data(path, collection.fingerprint(), cure=cure)
        test = sides_of(collection, run.config).test
        if by_folds(run.config, collection):
            if extended or seed or rerank != "auto" or tuple(ks) != KS:
                raise UsageError(
                    f"{path} was trained on all of its classes, and its scores are those of the "
                    "folds; --k, --extended, --rerank and --seed need DATA that it has not seen"
                )
            if not processes.leave():
                return None
            with foreign(path):
                return _fold_scores(path)
        if not len(test):
            raise DataError(f"{path} kept no classes for testing; give DATA to score it on")
        compared = held_out_comparisons(collection, run.config, test)
        whole, collection = collection, collection.subset(test)
        shown = compared if collection.labels is None else None
        log.info((collection if shown is None else shown.collection).describe())
        ks = sorted({*ks, *KS})  # scores.json always has the usual ones
    if collection.labels is None and gallery is None:
        if data is not None and can_compare(collection):
            compared = Compared(np.arange(len(collection)), collection)
        if compared is not None:
            vectors = encoder.embed_collection(compared.collection, progress=progress)
            if not processes.leave():
                return None
            content = score_order(compared.collection, vectors, seed=seed).as_dict()
            found = _keep(run, collection.name, content, own=data is None)
            if data is None:
                vectors = vectors[np.isin(compared.rows, test)]
                return _keep_vectors(found, run, whole, vectors, test, progress)
            return found
    searched = None if gallery is None else _open_gallery(gallery, labelling, progress)
    if searched is None and (collection.labels is None or not scorable(collection.labels)):
        raise DataError(
            f"{collection.name} can't be scored: it needs two classes, one of them with two items"
        )
    if data is not None:
        warn_of_known(encoder, collection)
    vectors = encoder.embed_collection(collection, progress=progress)
    others = None
    if compared is not None:
        others = encoder.embed_collection(compared.collection, progress=progress)
    if searched is None or gallery is None or data is None:
        queries, labels, options = among_themselves(vectors, collection)
    else:
        same = data.resolve() == gallery.resolve()
        queries, labels, options = within_gallery(
            vectors, collection, searched, encoder, same=same, progress=progress
        )
    if not processes.leave():  # scores need one process; the others are done
        return None
    weighting = _weighting(run, encoder) if rerank == "auto" else None
    scores = evaluate(
        queries,
        np.asarray(labels),
        ks=ks,
        seed=seed,
        extended=extended,
        progress=progress,
        **options,
    )
    content = scores.as_dict()
    if weighting is not None:
        given = (options.get("gallery"), options.get("gallery_labels"), options.get("query_rows"))
        plain, after = ranked_scores(queries, labels, (None, weighting), *given, progress=progress)
        content["reranked"] = reranking_summary(after, plain, seed=seed)
    if compared is not None and others is not None:
        content |= extra_of(score_order(compared.collection, others, seed=seed).as_dict())
    found = _keep(run, collection.name, content, own=data is None)
    return _keep_vectors(found, run, whole, vectors, test, progress) if data is None else found


def warn_of_known(encoder: Encoder, data: Collection) -> None:
    """Warn if a model has learned from classes of these names: they tell little of unseen ones."""
    if known := len({*encoder.class_names} & {*data.class_names}):
        which = f"{known:,} of {data.num_classes:,} classes, by their names"
        log.warning(
            f"{encoder.source} has learned from {which}; these scores are not of unseen ones"
        )


def _weighting(run: Run, encoder: Encoder) -> Weighting | None:
    """Return how the run re-ranks, None if it does not."""
    if (stored := encoder.extra.get("rerank")) is None:
        return None
    with foreign(run.path):
        return Reranking.from_dict(stored).weighting


def _keep(run: Run, name: str, scores: dict[str, Any], *, own: bool) -> Scored:
    """Write scores of the run's own test items to it."""
    before = read_optional_json(run.path / "scores.json")
    if own:
        run.write("scores.json", scores | still_true(before, scores))
        write_card(run)
    return Scored(f"{run.path} on {name}", str(before.get("method", run.config.loss)), scores)


def _keep_vectors(
    found: Scored, run: Run, whole: Collection, vectors: Tensor, test: Rows, progress: Progress
) -> Scored:
    """Write the embeddings of the test items and the report into the run."""
    kept = load_embeddings(run.path) or without_sample(whole.fingerprint(), vectors.shape[1])
    kept = replace(kept, test=vectors.numpy(), test_rows=test)
    kept.save(run.path)
    return found._replace(report=write_report(run.path, whole, kept, progress=progress))


def still_true(before: dict[str, Any], scores: dict[str, Any]) -> dict[str, Any]:
    """Return what earlier scores of the run say beyond its own: baselines, method and gain.

    Baselines are of the same queries, whatever the model. The gain over one of them is left out
    where it is no longer the difference of the scores, as after the model was replaced.
    """
    same = all(before.get(name) == scores.get(name) for name in ("protocol", "queries"))
    also = ("baselines",) if same else ()
    kept: dict[str, Any] = {name: before[name] for name in ("method", *also) if name in before}
    if "baselines" not in kept:
        return kept
    try:
        gain = before["gain"]
        baseline = before["baselines"][gain["over"]]
        names = [name for name in ("recall@1", "map@r", "ordered") if name in gain]
        gaps = [scores[n] - baseline[n] - gain[n][0] for n in names]
    except (KeyError, TypeError, IndexError):  # no gain, or a file that training did not write
        return kept
    return kept | ({"gain": gain} if max(map(abs, gaps), default=SHOWN) < SHOWN else {})


def _open_gallery(gallery: Path, labelling: Labelling, progress: Progress) -> Collection:
    with processes.in_turn():
        collection, _ = open_usable(gallery, labelling=labelling, progress=progress)
    processes.check_same("gallery", collection.fingerprint)
    return collection


def _fold_scores(path: Path) -> Scored:
    """Return the scores of a run that was trained on all of its classes: those of its folds."""
    scores = read_optional_json(path / "scores.json")
    if "recall@1" not in scores:
        raise DataError(f"{path} has no scores: its classes were too few; give DATA to score it on")
    log.info("the run was trained on all classes; each fold was scored by a model without it")
    return Scored(str(path), str(scores.get("method", "this run")), scores)
