"""What the commands other than `train` do: evaluate, embed, demo."""

import io
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save as to_safetensors
from torch import Tensor

from nofuss import console, processes
from nofuss.config import TrainConfig
from nofuss.data import open_data
from nofuss.data.collection import Collection
from nofuss.embeddings import load_embeddings, without_sample
from nofuss.encoder import load
from nofuss.errors import DataError, UsageError
from nofuss.evaluate.protocol import evaluate as evaluate_embeddings
from nofuss.files import write_file
from nofuss.galleries import among_themselves, within_gallery
from nofuss.job import by_folds, split
from nofuss.lock import RunLock
from nofuss.pipeline import train
from nofuss.report import read_json, write_report
from nofuss.run import check_same_data, open_run
from nofuss.scoring import KS, scorable, score_table
from nofuss.search import Index
from nofuss.usable import any_pictures, open_usable


def evaluate_run(
    path: Path,
    data: Path | None,
    *,
    ks: Sequence[int],
    seed: int,
    as_json: bool,
    gallery: Path | None = None,
    extended: bool = False,
    device: str = "auto",
) -> None:
    """`nofuss evaluate`: the run's test classes, or all of other data, maybe within a gallery."""
    if gallery is not None and data is None:
        raise UsageError("--gallery needs the queries: nofuss evaluate RUN QUERIES --gallery DIR")
    if not ks or min(ks) < 1:
        raise UsageError(f"--k is {' '.join(map(str, ks))}; expected whole numbers from 1 up")
    with RunLock() as lock:
        if data is None:  # the run keeps the scores
            lock.take(open_run(path).path)
        _evaluate(
            path,
            data,
            gallery=gallery,
            ks=ks,
            extended=extended,
            seed=seed,
            as_json=as_json,
            device=device,
        )


def _evaluate(
    path: Path,
    data: Path | None,
    *,
    gallery: Path | None,
    ks: Sequence[int],
    extended: bool,
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
        cure = "restore them, or score it on what is there now: give DATA"
        check_same_data(path, collection.fingerprint(), cure=cure)
        test = split(collection, run.config).test
        if by_folds(run.config, collection):
            _show_fold_scores(path, as_json=as_json)
            return
        if not len(test):
            raise DataError(f"{path} kept no classes for testing; give DATA to score it on")
        whole, collection = collection, collection.subset(test)
        say(collection.describe())
        ks = sorted({*ks, *KS})  # what the run keeps has the usual ones, whatever was asked for
    searched = None if gallery is None else _open_gallery(gallery, say)
    if searched is None and (collection.labels is None or not scorable(collection.labels)):
        raise DataError(
            f"{collection.name} can't be scored: two classes are needed, one with two items"
        )
    found = encoder.embed_collection(collection)
    if searched is None or gallery is None or data is None:
        queries, labels, options = among_themselves(found, collection)
    else:
        same = data.resolve() == gallery.resolve()
        queries, labels, options = within_gallery(found, collection, searched, encoder, same=same)
    scores = evaluate_embeddings(
        queries, np.asarray(labels), ks=ks, seed=seed, extended=extended, **options
    )
    if not processes.first():
        return
    content = scores.as_dict()
    if as_json:
        console.answer(content)
    else:
        score_table(f"{path} on {collection.name}", {run.config.loss: content})
    if data is None:
        before = read_json(path / "scores.json")
        kept_before = {k: before[k] for k in ("baselines", "gain", "method") if k in before}
        run.write("scores.json", content | kept_before)
        kept = load_embeddings(path) or without_sample(whole.fingerprint(), found.shape[1])
        kept = replace(kept, test=found.numpy(), test_rows=test)
        kept.save(path)
        with processes.alone():
            say(f"report: {write_report(path, whole, kept)}")


def _open_gallery(gallery: Path, say: Callable[[str], None]) -> Collection:
    with processes.in_turn():
        collection, _ = open_usable(gallery, say=say)
    processes.check_same("gallery", collection.fingerprint)
    return collection


def _show_fold_scores(path: Path, *, as_json: bool) -> None:
    """The scores of a run that has learned from all of its classes: those of its folds."""
    scores = read_json(path / "scores.json")
    if "recall@1" not in scores:
        raise DataError(f"{path} has no scores; train it again, or give DATA to score it on")
    if as_json:
        print(json.dumps(scores, indent=2))
        return
    console.say("all classes were learned from; these scores are of models that had not seen them")
    score_table(str(path), {scores.get("method", "this run"): scores} | scores["baselines"])


def embed(path: Path, data: Path, out: Path, *, device: str = "auto") -> None:
    """`nofuss embed`: vectors, names and labels to a file."""
    if out.suffix not in (".npz", ".safetensors"):
        raise UsageError(f"--out is {out}; expected a name ending in .npz or .safetensors")
    if out.exists():
        raise UsageError(f"{out} exists and is never overwritten; give another --out")
    if not out.parent.is_dir():
        raise UsageError(f"there is no folder {out.parent} for --out {out.name}; make it first")
    encoder = load(path, device=device)
    with processes.in_turn():
        collection, _ = open_usable(any_pictures(data))
    processes.check_same("data", collection.fingerprint)
    with console.progress("embedding", len(collection)) as progress:
        vectors = encoder.embed_collection(collection, progress=progress)
    if processes.first():
        write_embeddings(out, vectors, collection)
    console.say(f"{len(vectors):,} vectors of {vectors.shape[1]} dimensions in {out}")


def demo(out: Path | None, *, epochs: int, seed: int) -> Path:
    """`nofuss demo`: the built-in characters, half of them never seen in training."""
    console.say(
        "The built-in set: characters in the typefaces of matplotlib; a class is a character."
    )
    console.say(
        "Half of the characters are for training. The other half is never seen until the end."
    )
    path = train(TrainConfig(out=out, epochs=epochs, seed=seed))
    if not processes.first():
        return path
    with processes.alone():
        _show_what_it_learned(path, seed=seed)
    return path


def _show_what_it_learned(path: Path, *, seed: int) -> None:
    _show_a_search(path, seed=seed)
    console.say(f"Everything is in {path}. Your own pictures: nofuss train FOLDER")
    console.say(f"Look at what it learned: {path / 'report.html'}")


def _show_a_search(run: Path, *, seed: int) -> None:
    """The neighbours of a few characters that training has not seen."""
    kept, characters = load_embeddings(run), open_data(None)
    assert kept is not None
    assert characters.labels is not None
    labels = [characters.class_names[i] for i in characters.labels[kept.test_rows]]
    index = Index.build(kept.test, names=[str(i) for i in range(len(labels))], labels=labels)
    queries = np.random.default_rng(seed).choice(len(labels), 5, replace=False)
    _, rows = index.search(kept.test[queries], 9)
    console.say(
        f"a search among {len(labels):,} pictures of unseen characters, one in each typeface:"
    )
    for query, found in zip(queries, rows.tolist(), strict=True):
        others = " ".join(labels[row] for row in found if row != query)
        console.say(f"  {labels[query]}  →  {others}")


def write_embeddings(out: Path, vectors: Tensor, collection: Collection) -> None:
    """Vectors, labels and names; class names as a second array (.npz) or metadata."""
    arrays: dict[str, Any] = {"vectors": vectors.numpy()}
    if collection.labels is not None:
        arrays["labels"] = collection.labels
    if out.suffix == ".npz":
        arrays |= {"names": np.array(collection.names), "classes": np.array(collection.class_names)}
        with io.BytesIO() as buffer:
            np.savez(buffer, **arrays)
            write_file(out, buffer.getvalue())
    else:
        text = {
            "names": json.dumps(collection.names),
            "classes": json.dumps(collection.class_names),
        }
        write_file(out, to_safetensors(arrays, metadata=text))
