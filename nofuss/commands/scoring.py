"""Scores of a run on its own test classes, or on other data: what `nofuss evaluate` prints."""

import logging
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from nofuss.config import from_json
from nofuss.data.collection import Collection
from nofuss.data.open import open_training_data, open_usable
from nofuss.data.readers.folder import labelling_of
from nofuss.data.split import Rows, split_of
from nofuss.data.triplets import held_out
from nofuss.distributed import processes
from nofuss.errors import DataError, NofussError, RunError, UsageError
from nofuss.evaluate.protocol import PerQuery, evaluate, gain_over, scorable
from nofuss.evaluate.retrieval import Options as RetrievalOptions
from nofuss.evaluate.triplet_accuracy import extra_of
from nofuss.model.embedder import for_inference
from nofuss.model.encoder import Encoder, load
from nofuss.model.features import features_of
from nofuss.model.manifest import map_in_force, mapped
from nofuss.progress import Progress, silent
from nofuss.ranking.rerank import Rerank, reranked_scores
from nofuss.report import read_optional_json, write_report
from nofuss.report.card import write_card
from nofuss.run.directory import Run, check_same_data
from nofuss.run.proxies import RunEmbeddings, load_proxies
from nofuss.search.feedback import read_feedback
from nofuss.search.folder import FolderIndex
from nofuss.search.update import items_of
from nofuss.training.network import build_model
from nofuss.training.score import (
    Queries,
    among_themselves,
    check_shared,
    names_of,
    score_order,
    score_orders,
    untrained,
)

log = logging.getLogger("nofuss")
SHOWN = 5e-5
"""Scores that differ by less are printed alike: half of a hundredth of a percent."""


class Asked(NamedTuple):
    """What is to be scored, and how."""

    ks: list[int]
    extended: bool = False
    rerank: str = "auto"
    seed: int = 0

    @property
    def is_usual(self) -> bool:
        """Whether it is what training writes."""
        return self == Asked([1, 2, 4, 8])


class Scored(NamedTuple):
    """Scores as scores.json holds them, and what they are of."""

    title: str
    method: str
    scores: dict[str, Any]
    report: Path | None = None
    """The report that was written again."""


# The run's own test classes


def score_test_classes(
    run: Run, how: Asked, *, device: str, progress: Progress = silent
) -> Scored | None:
    """Score a run on its test classes, and keep the scores; the caller holds the run's lock.

    Of several processes the first returns the scores.
    """
    encoder = load(run.path, device=device)
    with processes.in_turn():
        own = open_training_data(
            run.own_data, run.config, corrections=run.corrections, progress=progress
        )
    processes.check_same("data", own.collection.fingerprint)
    try:
        cure = "restore them, or give DATA to score the run on other data"
        check_same_data(run.path, own.fingerprint, cure=cure)
    except RunError as error:
        if how.is_usual:
            log.warning(f"{error}; these are the stored scores")
        return _stored(run, how, error, otherwise=str(error))
    split, whole = split_of(own, run.config), own.collection
    if split.by_folds:
        if how.is_usual:
            log.info(
                "the run was trained on all classes; each fold was scored by a model that had not "
                "seen its classes"
            )
        refusal = UsageError(
            f"{run.path} was trained on all of its classes, and its scores are those of the folds; "
            "--k, --extended, --rerank and --seed need DATA that it has not seen"
        )
        otherwise = f"{run.path} had too few classes to score; give DATA for it"
        return _stored(run, how, refusal, otherwise=otherwise)
    if not len(split.test):
        raise DataError(f"{run.path} kept no classes for testing; give DATA to score it on")
    test = whole.subset(split.test)
    compared = held_out(own.comparisons, split.test, len(whole))
    has_classes, rows = test.has_classes, split.test if compared is None else compared.rows
    if compared is not None and not has_classes:
        test = replace(whole.subset(rows), comparisons=compared.comparisons)
    log.info(test.describe())
    if compared is None or has_classes:
        check_scorable(test)
    embedded = encoder.embed_collection(whole.subset(rows), progress=progress)
    vectors = embedded[np.isin(rows, split.test)]
    if not processes.leave():  # scores need one process; the others are done
        return None
    content: dict[str, Any] = {}
    if has_classes:
        how = how._replace(ks=sorted({*how.ks, 1, 2, 4, 8}))  # scores.json always has the usual
        content = _score(encoder, among_themselves(vectors, test), how, progress)[0]
    if compared is not None:
        order = score_order(compared, embedded).as_dict()
        content |= extra_of(order) if has_classes else order
    before = read_optional_json(run.path / "scores.json")
    run.write("scores.json", content | still_true(before, content))
    write_card(run)
    shown = _shown(run, encoder, whole, vectors, split.test)
    whole = _as_said(run, whole, encoder.digest)
    report = write_report(run.path, whole, shown, progress=progress)
    return Scored(f"{run.path} on {test.name}", _method(run), content, report)


def _as_said(run: Run, collection: Collection, model: str) -> Collection:
    """Return the collection with the labels that were corrected on the page since training."""
    feedback = read_feedback(run.path)
    if not feedback.corrections or not collection.has_classes:
        return collection
    said = feedback.labels(FolderIndex.open(run.index, model))
    codes = {name: code for code, name in enumerate(collection.class_names)}
    labels = collection.labels.copy()
    for row, item in enumerate(items_of(collection, run.config.data)):
        labels[row] = codes.get(said.get(item.name, ""), labels[row])
    corrected = replace(collection, labels=labels)
    return corrected.subset(range(len(corrected)))  # a class may have lost its last item


def _shown(
    run: Run, encoder: Encoder, whole: Collection, vectors: Tensor, test: Rows
) -> RunEmbeddings:
    """Return what the report shows: the test items, and the sample of training items."""
    proxies = load_proxies(run.path, encoder.digest, encoder.dim)
    sample = encoder.embed_collection(whole.subset(proxies.sample))
    matrix = map_in_force(run.path, encoder.digest, encoder.dim)
    moved = mapped(torch.from_numpy(proxies.proxies), matrix)
    proxies = replace(proxies, proxies=moved.numpy())
    return RunEmbeddings(vectors.numpy(), test, sample.numpy(), proxies)


def still_true(before: dict[str, Any], scores: dict[str, Any]) -> dict[str, Any]:
    """Return what earlier scores of the run say beyond its own: method, baselines and gain.

    Baselines are of the same queries, whatever the model; the gain is that of the same scores.
    """
    kept = ["method"]
    if all(before.get(name) == scores.get(name) for name in ("protocol", "queries")):
        kept.append("baselines")
        own = [name for name in ("recall@1", "map@r", "ordered") if name in scores]
        if all(abs(before.get(name, inf) - scores[name]) < SHOWN for name in own):
            kept.append("gain")
    return {name: before[name] for name in kept if name in before}


def _stored(run: Run, how: Asked, refusal: NofussError, *, otherwise: str) -> Scored | None:
    """Return the scores that a run has; raise the refusal if others are asked for."""
    if not how.is_usual:
        raise refusal
    if not processes.leave():
        return None
    scores = read_optional_json(run.path / "scores.json")
    if "recall@1" not in scores and "ordered" not in scores:
        raise DataError(otherwise)
    return Scored(str(run.path), str(scores.get("method", "this run")), scores)


def _method(run: Run) -> str:
    """Return the name of what the run keeps."""
    return str(read_optional_json(run.path / "scores.json").get("method", run.config.loss))


# Other data


def score_data(
    run: Run,
    data: Path,
    gallery: Path | None,
    how: Asked,
    *,
    device: str,
    progress: Progress = silent,
) -> Scored | None:
    """Score a run on other data, beside features that nothing was learned for; write nothing."""
    encoder, labelling = load(run.path, device=device), labelling_of(run.config)

    def opened(source: Path, what: str) -> Collection:
        with processes.in_turn():
            found = open_usable(source, labelling=labelling, progress=progress)
        processes.check_same(what, found.fingerprint)
        return found

    collection = searched = opened(data, "data")
    if gallery is not None and gallery != data:
        searched = opened(gallery, "gallery")
    compared = place = None
    if gallery is not None:
        place = _matched(collection, searched)
    elif not collection.has_classes:
        everything = np.arange(len(collection))
        compared = held_out(collection.comparisons, everything, len(collection))
    if compared is None and place is None:
        check_scorable(collection)
    if collection.has_classes:
        warn_of_known(encoder, collection)
    columns = items = _embedded(run, encoder, collection, progress)
    if searched is not collection:
        items = _embedded(run, encoder, searched, progress)
    if not processes.leave():
        return None
    title = f"{run.path} on {collection.name}"
    if compared is not None:
        return Scored(title, _method(run), score_orders(compared, columns))
    found = []
    for name, vectors in columns.items():
        if place is None:
            queries = among_themselves(vectors, collection)
        else:
            options: RetrievalOptions = {**place.options, "gallery": items[name]}
            queries = place._replace(embeddings=vectors, options=options)
        found.append(_score(None if name else encoder, queries, how, progress))
    names, ((ours, queried), *others) = [*columns][1:], found
    ours["baselines"] = {name: scores for name, (scores, _) in zip(names, others, strict=True)}
    if others:
        ours["gain"] = gain_over(names[0], [queried], [others[0][1]])
    return Scored(title, _method(run), ours)


def _embedded(
    run: Run, encoder: Encoder, collection: Collection, progress: Progress
) -> dict[str, Tensor]:
    """Embed items by the run, named "", and without training: features as they are, or pixels."""
    vectors = encoder.embed_collection(collection, progress=progress)
    features, preset = None, run.config.preset
    if preset in ("frozen", "vectors", "finetune"):
        backbone = encoder.embedder.backbone
        if preset == "finetune":
            backbone = for_inference(build_model(run.config, preset, collection)).backbone
        features = features_of(backbone, collection, progress=progress).values
    return {"": vectors} | untrained(collection, features, fit=[], rows=slice(None), dim=0)


def _matched(collection: Collection, gallery: Collection) -> Queries:
    """Match queries with another collection by names of classes and files."""
    labels, others = names_of(collection), names_of(gallery)
    check_shared(labels, others)
    rows = np.full(len(labels), -1)  # of each query in the gallery, where its file is there
    if collection is gallery:
        rows = np.arange(len(labels))
    elif collection.paths and gallery.paths:
        place = {Path(path).resolve(): i for i, path in enumerate(gallery.paths)}
        rows = np.array([place.get(Path(path).resolve(), -1) for path in collection.paths])
    relabelled = np.flatnonzero((rows >= 0) & (others[rows] != labels))
    if len(relabelled):
        i = relabelled[0]
        raise DataError(
            f"{collection.names[i]} is {labels[i]} as a query and {others[rows[i]]} in the "
            "gallery; give it the same class in both"
        )
    if missing := sorted({*labels.tolist()} - {*others.tolist()}):
        number = int(np.isin(labels, missing).sum())
        log.warning(
            f"{number:,} of {len(labels):,} queries are left out: the gallery has no item of their "
            f"classes ({', '.join(missing[:3])}{', …' if len(missing) > 3 else ''})"
        )
    return Queries(torch.empty(0), labels, {"gallery_labels": others, "query_rows": rows})


def warn_of_known(encoder: Encoder, data: Collection) -> None:
    """Warn if a model has learned from classes of these names: they tell little of unseen ones."""
    if known := len({*encoder.class_names} & {*data.class_names}):
        log.warning(
            f"{encoder.source} was trained on classes of the same names as {known:,} of these "
            f"{data.num_classes:,}; scores on them are not scores on unseen classes"
        )


# Both


def check_scorable(collection: Collection) -> None:
    """Refuse data without two classes, one of them with two items."""
    if not (collection.has_classes and scorable(collection.labels)):
        raise DataError(
            f"{collection.name} can't be scored: it needs two classes, one of them with two items"
        )


def _score(
    encoder: Encoder | None, queries: Queries, how: Asked, progress: Progress
) -> tuple[dict[str, Any], PerQuery]:
    """Return the scores of some queries, and those of each; re-ranked too if the run does so.

    encoder: says whether it re-ranks; None for embeddings that are not the run's.
    """
    x, labels, options = queries
    scores = evaluate(
        x, labels, ks=how.ks, seed=how.seed, extended=how.extended, progress=progress, **options
    )
    content, stored = scores.as_dict(), encoder and encoder.extra.get("rerank")
    where = "model.json's rerank"
    if how.rerank == "auto" and stored and from_json(Rerank, stored, where=where).on:
        given = options.get("gallery"), options.get("gallery_labels"), options.get("query_rows")
        content["reranked"] = reranked_scores(x, labels, *given, progress=progress).as_dict()
    return content, scores.per_query
