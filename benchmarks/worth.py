"""What learning a metric is worth: our defaults and peers on the same fixed features.

    python -m benchmarks.worth peers FOLDER …    pytorch-metric-learning's losses, LDA, NCA
    python -m benchmarks.worth vectors FOLDER …  ProxyEmbedding() beside PCA, LDA, NCA

A FOLDER is a data set of pictures (CUB_200_2011, class folders) or a file of arrays; its features
are those that `nofuss train` computes. Every peer gets the same number of tries, compared on the
same folds of the *training* classes as ours, and the same number of steps; the best is scored once
on the test classes: the official ones, or half of the classes in three splits. [ ] is the 95%
interval over classes of the difference from the first row, on the same queries; its ends are
averaged over the splits.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np
import torch
from pytorch_metric_learning import losses as pml
from sklearn.datasets import load_digits
from sklearn.decomposition import PCA
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.neighbors import NeighborhoodComponentsAnalysis
from torch import Tensor, nn

from nofuss import ProxyEmbedding
from nofuss.config import TrainConfig
from nofuss.data.open import open_data
from nofuss.data.split import split_collection
from nofuss.evaluate import paired_difference
from nofuss.evaluate.protocol import QueryScores
from nofuss.geometry import normalize
from nofuss.model.embedder import for_inference
from nofuss.model.features import features_of
from nofuss.model.start import signed_root
from nofuss.run.choice import Recipe
from nofuss.training.choice import fit_head
from nofuss.training.closed_form import ClosedForm, Pinned
from nofuss.training.folds import class_folds, query_scores
from nofuss.training.job import build_model
from nofuss.training.optim import set_rates
from nofuss.training.presets import DIM, resolve

BATCH, EPOCHS, NCA_ITEMS = 128, 20, 1000
MOVES = (0.5, 1.0, 2.0, 4.0)
"""Rate × steps × √D from our start; from a random one the usual rates are tried."""
RATES = (1e-4, 3e-4, 1e-3, 3e-3)
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
    if collection.kind == "vectors":
        features = torch.from_numpy(np.array(collection.array, dtype=np.float32))
    elif collection.kind == "images":
        features = torch.from_numpy(np.array(collection.array, dtype=np.float32)).flatten(1)
    else:
        config = resolve(TrainConfig(), kind="pictures", small=False)
        backbone = for_inference(build_model(config, collection)).backbone
        features = features_of(backbone, collection).values
    labels = torch.from_numpy(collection.labels)
    for seed in range(1 if collection.split is not None else seeds):
        train, _ = split_collection(collection, seed=seed)
        yield task(f"{path.name} {seed}", features, labels, torch.from_numpy(train))


def task(name: str, x: Tensor, y: Tensor, train: Tensor) -> Task:
    """Make a task with some rows for training and all others for the test."""
    test = torch.ones(len(y), dtype=torch.bool)
    test[train] = False
    compact = torch.unique(y[train], return_inverse=True)[1]
    return Task(name, x[train], compact, x[test], y[test])


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


def ours(t: Task, dim: int | None = None) -> Embedding:
    """Fit with our defaults."""
    found = ProxyEmbedding(dim).fit(t.x.numpy(), t.y.numpy())
    print(f"    {found.choice_.reason()}")
    return lambda x: torch.from_numpy(found.transform(x.numpy()))


def by_scikit_learn(t: Task, dim: int) -> Iterator[tuple[str, Embedding]]:
    """Fit PCA, LDA with shrinkage, and NCA, in `dim` dimensions or as many as they allow."""
    x, y = t.x.numpy(), t.y.numpy()
    most = min(dim, *x.shape)
    pca = PCA(most, random_state=0).fit(x)
    yield f"PCA, {most}-d", _of(pca.transform)
    few = min(dim, len(np.unique(y)) - 1)
    lda = LinearDiscriminantAnalysis(solver="eigen", shrinkage="auto", n_components=few).fit(x, y)
    yield f"LDA, shrunk, {few}-d", _of(lda.transform)
    rows = np.random.default_rng(0).permutation(len(x))[:NCA_ITEMS]
    small = min(most, 64)
    nca = NeighborhoodComponentsAnalysis(small, init="pca", max_iter=30, random_state=0)
    nca.fit(x[rows], y[rows])
    yield f"NCA, {small}-d, {len(rows)} items", _of(nca.transform)


def _of(transform: Callable[..., np.ndarray]) -> Embedding:
    return lambda x: torch.from_numpy(np.ascontiguousarray(transform(x.numpy()))).float()


@dataclass(frozen=True)
class Try:
    """One training of a peer."""

    loss: str
    scale: float
    """Factor of the cosines in the exponent, whatever the loss calls it."""
    speed: float
    """Of MOVES or RATES."""
    start: str


def peer_loss(t: Try, classes: int, dim: int) -> nn.Module:
    """Return a loss of pytorch-metric-learning."""
    made: dict[str, Callable[[], nn.Module]] = {
        "ProxyNCALoss": lambda: pml.ProxyNCALoss(classes, dim, softmax_scale=t.scale / 2),
        "ProxyAnchorLoss": lambda: pml.ProxyAnchorLoss(classes, dim, alpha=t.scale),
        "NormalizedSoftmaxLoss": lambda: pml.NormalizedSoftmaxLoss(
            classes, dim, temperature=1 / t.scale
        ),
        "SoftTripleLoss": lambda: pml.SoftTripleLoss(classes, dim, la=t.scale),
        "MultiSimilarityLoss": lambda: pml.MultiSimilarityLoss(beta=t.scale),
    }
    return made[t.loss]()


PEERS = (
    "ProxyNCALoss",
    "ProxyAnchorLoss",
    "NormalizedSoftmaxLoss",
    "SoftTripleLoss",
    "MultiSimilarityLoss",
)


def train_peer(t: Try, inputs: Tensor, labels: Tensor, *, seed: int = 0) -> nn.Linear:
    """Train a head: D × D from the identity on our closed form, else F × D from random."""
    classes, dim = int(labels.max()) + 1, min(DIM, inputs.shape[1])
    torch.manual_seed(seed)
    head, criterion = nn.Linear(inputs.shape[1], dim), peer_loss(t, classes, dim)
    steps = max(1, len(inputs) // BATCH) * EPOCHS
    rate = t.speed
    if t.start == "ours":
        rate = t.speed / (steps * dim**0.5)
        with torch.no_grad():
            head.weight.copy_(torch.eye(dim))
            head.bias.zero_()
            _at_class_means(criterion, normalize(inputs), labels)
    parameters = [{"params": head.parameters(), "lr": rate, "base_lr": rate}]
    if own := list(criterion.parameters()):
        parameters.append({"params": own, "lr": 10 * rate, "base_lr": 10 * rate})
    optimizer = torch.optim.Adam(parameters, fused=True)
    generator = torch.Generator().manual_seed(seed)
    each = steps // EPOCHS
    for epoch in range(EPOCHS):
        order = torch.randperm(len(inputs), generator=generator)[: each * BATCH]
        for step, rows in enumerate(order.view(each, -1)):
            set_rates(optimizer, "cosine", epoch + step / each, EPOCHS)
            optimizer.zero_grad()
            criterion(head(inputs[rows]), labels[rows]).backward()
            optimizer.step()
    return head


def _at_class_means(criterion: nn.Module, directions: Tensor, labels: Tensor) -> None:
    """Start a peer's proxies at the class means; SoftTriple's several near them."""
    for proxies in criterion.parameters():
        classes = int(labels.max()) + 1
        means = torch.zeros(classes, directions.shape[1]).index_add_(0, labels, directions)
        means = normalize(means)
        if proxies.shape == means.shape:
            proxies.copy_(means)
        elif proxies.shape == means.T.shape:
            proxies.copy_(means.T)
        else:  # (D, centers × C): small differences let the centres separate
            many = means.repeat_interleave(proxies.shape[1] // classes, 0)
            proxies.copy_((many + 0.01 * normalize(torch.randn_like(many))).T)


def best_peer(t: Task, form: ClosedForm, loss: str, start: str) -> tuple[Embedding, Try]:
    """Return the best of eight tries on two of the folds, trained on all training classes."""
    speeds = MOVES if start == "ours" else RATES
    tries = [Try(loss, scale, speed, start) for scale, speed in product((16.0, 32.0), speeds)]
    found = {}
    for one in tries:
        total = 0.0
        for k in (0, len(form.folds) - 1):
            fold = form.folds[k]
            prepare = _start(form, start, without=k)
            own = torch.unique(form.labels[fold.others], return_inverse=True)[1]
            head = train_peer(one, prepare(form.features[fold.others]), own)
            with torch.no_grad():
                held_out = head(prepare(form.features[fold.held_out]))
            total += float(query_scores(held_out, form.labels[fold.held_out]).objective.mean())
        found[one] = total
    best = max(found, key=lambda one: found[one])
    prepare = _start(form, start)
    head = train_peer(best, prepare(t.x), t.y)

    @torch.no_grad()
    def embed(x: Tensor) -> Tensor:
        out: Tensor = head(prepare(x))
        return out

    return embed, best


def _start(form: ClosedForm, start: str, *, without: int | None = None) -> Embedding:
    """Return the inputs of a peer's head: our closed form, or normalized features."""
    if start != "ours":
        return normalize
    recipe = form.best()
    affine = form.fit(recipe, without=without)
    return lambda x: affine(signed_root(x) if recipe.root else x)


def _always_trained(t: Task, recipe: Recipe, loss: str) -> Embedding:
    """Train a loss of ours from our start, whatever the folds decide."""
    config = TrainConfig(
        loss=loss,
        folds=0,
        root=recipe.root,
        center=recipe.center,
        shrinkage=recipe.shrinkage,
    )
    _, head = fit_head(resolve(config, kind="vectors", small=False), t.x, t.y)
    return lambda x: head(signed_root(x) if recipe.root else x)


def peers(t: Task) -> Iterator[tuple[str, Embedding]]:
    """Return all rows of the table except ours and the untrained features."""
    yield from by_scikit_learn(t, DIM)
    form = ClosedForm(t.x, t.y, class_folds(t.y), dim=min(DIM, t.x.shape[1]))
    form.compare(Pinned())
    yield "our closed form", _start(form, "ours")
    for loss in ("proxy-nca", "proxy-nca++", "proxy-anchor", "soft-triple"):
        yield f"our closed form, then {loss}", _always_trained(t, form.best(), loss)
    for loss, start in product(PEERS, ("random", "ours")):
        embed, best = best_peer(t, form, loss, start)
        yield f"PML {loss}, {start} start; scale {best.scale:g}, {best.speed:g}", embed


def show(path_tasks: list[Task], rows: Callable[[Task], Iterator[tuple[str, Embedding]]]) -> None:
    """Print a row a method: mean Recall@1 and MAP@R, and the difference from ours."""
    found: dict[str, list[tuple[QueryScores, float]]] = {}
    for t in path_tasks:
        began = time.process_time()
        for name, embed in rows(t):
            seconds = time.process_time() - began
            scores = query_scores(embed(t.test_x), t.test_y)
            found.setdefault(name.split("; ")[0], []).append((scores, seconds))
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
    parser.add_argument("which", choices=("peers", "vectors"))
    parser.add_argument("data", type=Path, nargs="*")
    parser.add_argument("--seeds", type=int, default=3)
    asked = parser.parse_args()

    def beside_peers(t: Task) -> Iterator[tuple[str, Embedding]]:
        yield "ours, by default", ours(t)
        yield f"untrained features, {t.x.shape[1]}-d", lambda x: x
        yield from peers(t)

    def beside_scikit_learn(t: Task) -> Iterator[tuple[str, Embedding]]:
        yield "ours, by default", ours(t)
        yield f"the input, {t.x.shape[1]}-d", lambda x: x
        yield from by_scikit_learn(t, min(DIM, t.x.shape[1]))
        few = min(64, int(t.y.max()))
        yield f"ours, {few}-d", ours(t, few)
        for name, embed in by_scikit_learn(t, few):
            yield f"{name} (of {few})", embed

    rows = beside_peers if asked.which == "peers" else beside_scikit_learn
    groups = [list(tasks(path, asked.seeds)) for path in asked.data]
    if asked.which == "vectors":
        groups += [[t] for t in built_in()]
    for group in groups:
        show(group, rows)


if __name__ == "__main__":
    main()
