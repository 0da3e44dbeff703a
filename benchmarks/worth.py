"""What learning a metric is worth: our defaults beside the features as they are, and others.

    OMP_NUM_THREADS=1 python -m benchmarks.worth FOLDER …

A FOLDER is a data set of pictures (CUB_200_2011, class folders) or a file of arrays; of photographs
the features are those that `nofuss train` computes. scikit-learn's digits and vectors whose leading
directions are noise follow. Everything is fitted to the training classes and scored once on the
test classes: the official ones, or half of the classes in three splits. [ ] is the 95% interval
over classes of the difference from the first row, on the same queries; its ends are averaged over
the splits.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits
from sklearn.decomposition import PCA
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.neighbors import NeighborhoodComponentsAnalysis
from torch import Tensor

from nofuss import ProxyEmbedding
from nofuss.config import Options
from nofuss.data.collection import Collection
from nofuss.data.open import TrainingData, open_data
from nofuss.data.readers.arrays import from_arrays
from nofuss.data.split import split_collection
from nofuss.evaluate import paired_difference
from nofuss.evaluate.protocol import QueryScores
from nofuss.model.backbones import build_backbone
from nofuss.model.embedder import for_inference
from nofuss.model.features import features_of
from nofuss.training.folds import query_scores
from nofuss.training.head import HeadFit, fit_head
from nofuss.training.network import apply_settings, build_model
from nofuss.training.settings import DIM, resolve

NCA_ITEMS = 1000
LOSSES = ("proxy-nca", "proxy-nca++", "proxy-anchor", "soft-triple")
Embedding = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Task:
    """Vectors of training classes, and of test classes."""

    name: str
    x: Tensor
    y: Tensor
    test_x: Tensor
    test_y: Tensor


def tasks(path: Path, seeds: int) -> Iterator[Task]:
    """Return a task for the official split, or one for each of several random halves."""
    collection = open_data(path)
    if collection.array is not None:
        features = torch.from_numpy(np.array(collection.array, dtype=np.float32)).flatten(1)
    else:
        features = features_by("efficientnet-lite0", collection)
    labels = torch.from_numpy(collection.labels)
    for seed, train in enumerate(halves(collection, seeds)):
        yield task(f"{path.name} {seed}", features, labels, train)


def halves(collection: Collection, seeds: int) -> Iterator[Tensor]:
    """Return the training rows of the official split, or of each of several random halves."""
    for seed in range(1 if collection.split is not None else seeds):
        yield torch.from_numpy(split_collection(collection, seed=seed)[0])


def features_by(backbone: str, pictures: Collection, *, mirror: bool = True) -> Tensor:
    """Return the features that `nofuss train --backbone` computes of photographs."""
    options = Options(preset="frozen", backbone=backbone, mirror=mirror)
    embedder = build_model(options, "frozen", pictures)
    data = TrainingData(pictures, None, None, "")
    apply_settings(resolve(options, data, embedder.backbone), embedder)
    return features_of(for_inference(embedder).backbone, pictures).values


def task(name: str, x: Tensor, y: Tensor, train: Tensor) -> Task:
    """Make a task with some rows for training and all others for the test."""
    test = torch.ones(len(y), dtype=torch.bool)
    test[train] = False
    compact = torch.unique(y[train], return_inverse=True)[1]
    return Task(name, x[train], compact, x[test], y[test])


def fitted(x: Tensor, y: Tensor) -> HeadFit:
    """Fit a head to features as training does by default."""
    vectors = from_arrays({"vectors": x.numpy(), "labels": y.numpy()}, name="features")
    backbone = build_backbone("identity", channels=x.shape[1])
    settings = resolve(Options(), TrainingData(vectors, None, None, ""), backbone)
    return fit_head(x, y, settings)


def built_in() -> Iterator[Task]:
    """Return scikit-learn's digits, and vectors whose leading directions are noise."""
    x, y = load_digits(return_X_y=True)
    labels = torch.from_numpy(y)
    yield task("digits", torch.from_numpy(x).float(), labels, (labels < 5).nonzero().flatten())
    random = np.random.default_rng(0)
    labels = torch.arange(80).repeat_interleave(20)
    signal = random.normal(size=(80, 54))[labels] + random.normal(size=(1600, 54)) / 3
    mixed = np.concatenate([30 * random.normal(size=(1600, 10)), signal], 1)
    turned = torch.from_numpy(mixed @ np.linalg.qr(random.normal(size=(64, 64)))[0]).float()
    yield task("noisy", turned, labels, (labels < 40).nonzero().flatten())


def rows(t: Task) -> Iterator[tuple[str, Embedding]]:
    """Return a name and an embedding for each row of the table."""
    x, y = t.x.numpy(), t.y.numpy()
    most, few = min(DIM, *x.shape), min(64, int(t.y.max()))
    yield "ours, by default", ours(t)
    yield f"as they are, {x.shape[1]}-d", lambda x: x
    yield f"PCA, {most}-d", _of(PCA(most, random_state=0).fit(x).transform)
    least = min(most, int(t.y.max()))
    lda = LinearDiscriminantAnalysis(solver="eigen", shrinkage="auto", n_components=least)
    yield f"LDA, shrunk, {least}-d", _of(lda.fit(x, y).transform)
    some = np.random.default_rng(0).permutation(len(x))[:NCA_ITEMS]
    nca = NeighborhoodComponentsAnalysis(
        min(most, 64), init="pca", max_iter=30, random_state=0
    ).fit(x[some], y[some])
    yield f"NCA, {min(most, 64)}-d, {len(some)} items", _of(nca.transform)
    yield f"ours, {few}-d", ours(t, dim=few)
    for loss in LOSSES:
        yield f"ours, then {loss}", ours(t, head="trained", loss=loss)


def ours(t: Task, **options: Any) -> Embedding:
    """Fit our estimator."""
    found = ProxyEmbedding(**options).fit(t.x.numpy(), t.y.numpy())
    print(*(f"    {line}" for line in found.choice_.describe()), sep="\n")
    return _of(found.transform)


def _of(transform: Callable[..., np.ndarray]) -> Embedding:
    return lambda x: torch.from_numpy(np.ascontiguousarray(transform(x.numpy()))).float()


def show(path_tasks: list[Task]) -> None:
    """Print a row a method: mean Recall@1 and MAP@R, and the difference from ours."""
    found: dict[str, list[tuple[QueryScores, float]]] = {}
    for t in path_tasks:
        began = time.process_time()
        for name, embed in rows(t):
            seconds = time.process_time() - began
            scores = query_scores(embed(t.test_x), t.test_y)
            found.setdefault(name, []).append((scores, seconds))
            means = 100 * float(scores.recall.mean()), 100 * float(scores.map_at_r.mean())
            print(f"    {t.name}: {name}: {means[0]:.2f} / {means[1]:.2f}", flush=True)
            began = time.process_time()
    first = next(iter(found.values()))
    print(f"\n| {path_tasks[0].name.rsplit(' ')[0]} | R@1 | MAP@R | CPU s |\n|---|---|---|---|")
    for name, results in found.items():
        cells = []
        for which in ("recall", "map_at_r"):
            values = [100 * float(getattr(s, which).mean()) for s, _ in results]
            gaps = [
                paired_difference(getattr(s, which), getattr(o, which), o.labels)
                for (s, _), (o, _) in zip(results, first, strict=True)
            ]
            low, high = (100 * np.mean([g[end] for g in gaps]) for end in (1, 2))
            beside = "" if results is first else f" [{low:+.2f}, {high:+.2f}]"
            cells.append(f"{np.mean(values):.2f}{beside}")
        print(f"| {name} | {cells[0]} | {cells[1]} | {np.mean([s for _, s in results]):.0f} |")
    print(flush=True)


def main() -> None:
    """Print a table for each data set."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("data", type=Path, nargs="*")
    parser.add_argument("--seeds", type=int, default=3)
    asked = parser.parse_args()
    for path in asked.data:
        show(list(tasks(path, asked.seeds)))
    for each in built_in():
        show([each])


if __name__ == "__main__":
    main()
