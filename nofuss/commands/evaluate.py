"""`nofuss evaluate`: score a run on its test classes, on other data, or in a gallery."""

import json as json_format
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from tyro.conf import Positional, arg

from nofuss.commands import DeviceName, RunPath
from nofuss.data.collection import GALLERY, QUERY, Collection
from nofuss.data.split import by_folds, sides_of
from nofuss.data.usable import open_usable
from nofuss.distributed import processes
from nofuss.errors import DataError, UsageError
from nofuss.evaluate.protocol import evaluate
from nofuss.evaluate.ranked import ranked_scores, summary
from nofuss.evaluate.side_by_side import KS, scorable
from nofuss.evaluate.task import Options
from nofuss.files.lock import RunLock
from nofuss.model.encoder import Encoder, load
from nofuss.report import read_optional_json, write_report
from nofuss.report.card import write_card
from nofuss.run.directory import check_same_data, open_run
from nofuss.run.embeddings import load_embeddings, without_sample
from nofuss.search.ranking import Rerank, kept_reranking
from nofuss.terminal import console
from nofuss.terminal.scores import score_table, with_reranked

SHOWN = 5e-5
"""Scores that differ by less are printed alike: half of a hundredth of a percent."""


def main(
    run: RunPath,
    data: Annotated[
        Path | None,
        Positional,
        arg(metavar="DATA", help_behavior_hint="(default: the run's own test classes)"),
    ] = None,
    *,
    gallery: Annotated[Path | None, arg(metavar="GALLERY", help_behavior_hint="")] = None,
    k: Annotated[tuple[int, ...], arg(metavar="K")] = (1, 2, 4, 8),
    extended: bool = False,
    rerank: Literal["auto", "none"] = "auto",
    seed: int = 0,
    json: bool = False,
    device: DeviceName = "auto",
) -> None:
    """Score a run: Recall@K, MAP@R, R-precision, NMI and AMI on classes it has not seen.

    Without DATA the run keeps the scores: scores.json, report.html and README.md are written anew.

    Args:
        run: A run directory of `nofuss train`.
        data: Other data, all of it; a CSV may mark its rows as query and gallery.
        gallery: Data to search in; DATA are then queries only, and none finds itself.
        k: The K of Recall@K; on the run's own test classes 1, 2, 4 and 8 are added.
        extended: Also print MAP over all ranks, MRR, precision@K, and all scores averaged by class.
        rerank: auto also scores re-ranked results, if the run's folds gained by it.
        seed: Seed for k-means and the bootstrap.
        json: Print the scores as JSON instead of a table.
        device: Where to compute, as for `nofuss train`.
    """
    if gallery is not None and data is None:
        raise UsageError("--gallery needs the queries: nofuss evaluate RUN QUERIES --gallery DIR")
    if not k or min(k) < 1:
        raise UsageError(f"--k is {' '.join(map(str, k))}; expected whole numbers from 1 up")
    with RunLock() as lock:
        if data is None:  # the scores are written into the run
            lock.take(open_run(run).path)
        _evaluate(
            run,
            data,
            gallery=gallery,
            ks=sorted(k),
            extended=extended,
            rerank=rerank,
            seed=seed,
            as_json=json,
            device=device,
        )


def _evaluate(
    path: Path,
    data: Path | None,
    *,
    gallery: Path | None,
    ks: list[int],
    extended: bool,
    rerank: Rerank,
    seed: int,
    as_json: bool,
    device: str,
) -> None:
    run = open_run(path)
    encoder = load(path, device=device)
    say = console.aside if as_json else console.say
    with processes.in_turn():
        collection, _ = open_usable(data or run.config.data, say=say)
    processes.check_same("data", collection.fingerprint)
    if data is None:
        cure = "restore them, or give DATA to score the run on other data"
        check_same_data(path, collection.fingerprint(), cure=cure)
        test = sides_of(collection, run.config).test
        if by_folds(run.config, collection):
            _show_fold_scores(path, as_json=as_json)
            return
        if not len(test):
            raise DataError(f"{path} kept no classes for testing; give DATA to score it on")
        whole, collection = collection, collection.subset(test)
        say(collection.describe())
        ks = sorted({*ks, *KS})  # scores.json always has the usual ones
    searched = None if gallery is None else _open_gallery(gallery, say)
    if searched is None and (collection.labels is None or not scorable(collection.labels)):
        raise DataError(
            f"{collection.name} can't be scored: it needs two classes, one of them with two items"
        )
    vectors = encoder.embed_collection(collection)
    if searched is None or gallery is None or data is None:
        queries, labels, options = among_themselves(vectors, collection)
    else:
        same = data.resolve() == gallery.resolve()
        queries, labels, options = within_gallery(vectors, collection, searched, encoder, same=same)
    scores = evaluate(queries, np.asarray(labels), ks=ks, seed=seed, extended=extended, **options)
    if not processes.first():
        return
    content = scores.as_dict()
    decision = kept_reranking(encoder) if rerank == "auto" else None
    if decision is not None and (weighting := decision.weighting) is not None:
        plain, after = ranked_scores(
            queries,
            labels,
            (None, weighting),
            gallery=options.get("gallery"),
            gallery_labels=options.get("gallery_labels"),
            query_rows=options.get("query_rows"),
        )
        content["reranked"] = summary(after, plain, weighting, seed=seed)
    if as_json:
        console.answer(content)
    before = read_optional_json(path / "scores.json")
    if not as_json:
        method = str(before.get("method", run.config.loss))
        score_table(f"{path} on {collection.name}", with_reranked(method, content))
    if data is None:
        run.write("scores.json", content | still_true(before, content))
        write_card(run)
        kept = load_embeddings(path) or without_sample(whole.fingerprint(), vectors.shape[1])
        kept = replace(kept, test=vectors.numpy(), test_rows=test)
        kept.save(path)
        with processes.alone():
            say(f"report: {write_report(path, whole, kept)}")


def still_true(before: dict[str, Any], scores: dict[str, Any]) -> dict[str, Any]:
    """Return what earlier scores of the run say beyond its own: baselines, method and gain.

    Baselines are of the same test items, whatever the model. The gain over one of them is left out
    where it is no longer the difference of the scores, as after the model was replaced.
    """
    kept: dict[str, Any] = {n: before[n] for n in ("baselines", "method") if n in before}
    try:
        gain = before["gain"]
        baseline = before["baselines"][gain["over"]]
        gaps = [scores[n] - baseline[n] - gain[n][0] for n in ("recall@1", "map@r")]
    except (KeyError, TypeError, IndexError):  # no gain, or a file that training did not write
        return kept
    return kept | ({"gain": gain} if max(map(abs, gaps)) < SHOWN else {})


def _open_gallery(gallery: Path, say: Callable[[str], None]) -> Collection:
    with processes.in_turn():
        collection, _ = open_usable(gallery, say=say)
    processes.check_same("gallery", collection.fingerprint)
    return collection


def _show_fold_scores(path: Path, *, as_json: bool) -> None:
    """Print the scores of a run that was trained on all of its classes: those of its folds."""
    scores = read_optional_json(path / "scores.json")
    if "recall@1" not in scores:
        raise DataError(f"{path} has no scores; train it again, or give DATA to score it on")
    if as_json:
        print(json_format.dumps(scores, indent=2))
        return
    console.say("the run was trained on all classes; each fold was scored by a model without it")
    columns = with_reranked(scores.get("method", "this run"), scores) | scores["baselines"]
    score_table(str(path), columns)


class Queries(NamedTuple):
    """Arguments of `evaluate`: embeddings, their classes, and the gallery with its classes."""

    embeddings: Tensor
    labels: NDArray[np.generic]
    options: Options


def among_themselves(vectors: Tensor, collection: Collection) -> Queries:
    """Search every item among all others, or items marked query among those marked gallery."""
    labels = collection.labels
    assert labels is not None
    if collection.split is None or GALLERY not in collection.split:
        return Queries(vectors, labels, {})
    query_rows, gallery_rows = (
        np.flatnonzero(collection.split == side) for side in (QUERY, GALLERY)
    )
    if not len(query_rows):
        raise DataError(
            f"{collection.name} has rows of split gallery but none of split query; add some"
        )
    names = _names_of(collection)
    _check_shared(names[query_rows], names[gallery_rows])
    options: Options = {"gallery": vectors[gallery_rows], "gallery_labels": labels[gallery_rows]}
    return Queries(vectors[query_rows], labels[query_rows], options)


def within_gallery(
    vectors: Tensor, collection: Collection, gallery: Collection, encoder: Encoder, *, same: bool
) -> Queries:
    """Search all items in another collection; `same` says that it is their own."""
    labels, others = _names_of(collection), _names_of(gallery)
    _check_shared(labels, others)
    rows = np.arange(len(labels)) if same else _rows_in(collection, gallery)
    relabelled = np.flatnonzero((rows >= 0) & (others[rows] != labels))
    if len(relabelled):
        i = relabelled[0]
        raise DataError(
            f"{collection.names[i]} is {labels[i]} as a query and {others[rows[i]]} in the "
            "gallery; give it the same class in both"
        )
    options: Options = {
        "gallery": vectors if same else encoder.embed_collection(gallery),
        "gallery_labels": others,
        "query_rows": rows,
    }
    return Queries(vectors, labels, options)


def _names_of(collection: Collection) -> NDArray[np.str_]:
    """Return the name of each item's class."""
    if collection.labels is None:
        raise DataError(f"{collection.name} has no labels, so hits can't be counted; add labels")
    return np.asarray(collection.class_names)[collection.labels]


def _rows_in(collection: Collection, gallery: Collection) -> NDArray[np.int64]:
    """Return the row of each item in the gallery, −1 where its file is not in it."""
    if not collection.paths or not gallery.paths:
        return np.full(len(collection), -1)
    place = {Path(path).resolve(): i for i, path in enumerate(gallery.paths)}
    return np.array([place.get(Path(path).resolve(), -1) for path in collection.paths])


def _check_shared(labels: NDArray[np.str_], others: NDArray[np.str_]) -> None:
    if not len(np.intersect1d(labels, others)):
        raise DataError(
            f"queries and gallery share no class ({labels[0]}, … and {others[0]}, …); "
            "give the same class the same name in both"
        )
