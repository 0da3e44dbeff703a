"""Dynamic assignment in several forms: proxies in use and Recall@1 against steps; docs/dynamic.md.

    python -m benchmarks.dynamic [CUB_200_2011] [--only FORM …] [--seeds 3] [--halves 0 1]
                                 [--proxies-per-class 1]

With --seeds 0 test classes are not looked at: it prints Recall@1 on the halves alone. Otherwise
results are added to those of earlier commands in results/dynamic.json.

The settings are those of `nofuss reproduce --budget minutes`: characters from random weights, CUB's
features with a head that starts at their PCA, as many proxies as training classes. Each form gets
its rate by Recall@1 on halves of the *training* classes, both ways; test classes are scored at the
end. From bare triplets as many items are seen as from labels; triplets are drawn from the labels of
the training classes before those are dropped. The losing forms are in
`dynamic_forms.py` and no part of nofuss.
"""

import argparse
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.dynamic_forms import OfTheBatch, Other, Reseeded, Sinkhorn, Soft
from benchmarks.plots import draw_curves
from nofuss.config import Settings
from nofuss.data.collection import Collection
from nofuss.data.split import Rows
from nofuss.evaluate import kmeans, recall_at_k
from nofuss.geometry import normalize
from nofuss.losses.proxy_loss import ProxyLoss
from nofuss.model.encoder import Encoder
from nofuss.paper.sources import Source, bare_triplets, open_source
from nofuss.paper.trials import trial_of
from nofuss.proxies.assignment import Balanced, Dynamic
from nofuss.training.callbacks import Control, Event
from nofuss.training.finetune import prepare
from nofuss.training.loop import NonFiniteLoss, Training, run_loop
from nofuss.training.network import build_model

POINTS = 8
"""Points of a curve, besides the start."""


@dataclass(frozen=True)
class Form:
    """One form: its supervision, and how it chooses."""

    assignment: str = "dynamic"
    bare: bool = True
    other: type[Other] | None = None
    start: bool = False
    """Whether proxies start at the k-means centers of the first embeddings."""


FORMS = {
    "static, from labels": Form("static", bare=False),
    "balanced, from labels": Form("balanced", bare=False),
    "matched, from labels": Form("matched", bare=False),
    "plain, from labels": Form(bare=False),
    "balanced": Form("balanced"),
    "plain (the paper)": Form(),
    "Z: all other proxies": Form(other=Other),
    "Z: proxies of the batch": Form(other=OfTheBatch),
    "Sinkhorn, batch and queue": Form(other=Sinkhorn, start=True),
    "soft, annealed": Form(other=Soft, start=True),
    "k-means start, re-seeded": Form(other=Reseeded, start=True),
}


class Curve:
    """Measures every few steps; that some forms collapse is the result."""

    def __init__(self, every: int, measure: Callable[[], dict[str, float]]) -> None:
        self.every, self.measure = every, measure
        self.points: list[dict[str, float]] = []

    def __call__(self, event: Event) -> None:
        """Record a point where one is due."""
        if event.kind == "step" and self.every and event.step % self.every == 0:
            self.points.append({"step": event.step, **self.measure()})


def data_of(
    source: Source, settings: Settings, form: Form, rows: Rows, classes: int
) -> tuple[Collection, Settings, Rows]:
    """Return what a form learns from, its settings and its rows."""
    if not form.bare:
        return source.collection, settings, rows
    batch = max(1, settings.batch_size // 3)
    steps = (settings.epochs or 0) * (len(rows) // settings.batch_size)
    data = bare_triplets(source, rows, batch * steps, seed=settings.seed)
    if form.assignment != "balanced":
        return data, replace(settings, batch_size=batch, epochs=1, per_class=0), rows
    assert data.comparisons is not None
    groups = data.comparisons.links(len(data)).groups
    rows = rows[groups[rows] >= 0]
    share = classes / len(np.unique(groups[rows]))  # as many proxies as classes
    names = tuple(map(str, range(groups.max() + 1)))
    grouped = replace(data, labels=groups, class_names=names, by_links=True)
    return grouped, replace(settings, proxies_per_class=share), rows


def train(
    source: Source,
    form: Form,
    rate: float,
    *,
    seed: int,
    fold: int | None,
    curve: bool,
    each: float = 1.0,
) -> dict[str, Any]:
    """Train one form with `each` proxies per class and score it."""
    train_rows, test_rows = source.split(fold)
    classes = len(np.unique(source.labels(train_rows)))
    options: dict[str, Any] = {"assignment": form.assignment, "proxies_per_class": each}
    trial = trial_of(source, "proxy-nca", rate, seed=seed, **options)
    data, settings, rows = data_of(source, trial.settings, form, train_rows, classes)
    embedder = build_model(settings, settings.preset, data, side=source.data.side)
    features = None if source.features is None else source.features[rows]
    training, feed = prepare(settings, embedder, data.subset(rows), features)
    criterion = training.criterion
    assert isinstance(criterion, ProxyLoss)
    steps = len(feed) * training.epochs

    def embed(rows: Rows) -> Tensor:
        items = source.collection.subset(rows)
        return Encoder(embedder).embed_collection(items)

    if form.other is not None:
        first = criterion.proxies.detach()
        if form.start:
            first = torch.as_tensor(kmeans(normalize(embed(rows)), len(first), seed=seed)[0])
        criterion_of = form.other(first.float(), float(criterion.scale or 1), steps)
        training = Training.of(
            settings,
            training.model,
            criterion_of,
            backbone=() if settings.is_fixed else embedder.backbone_parameters(),
            head=embedder.head.parameters(),
        )

    def measure() -> dict[str, float]:
        embedder.eval()
        recall = recall_at_k(embed(test_rows), source.labels(test_rows), ks=(1,))[1]
        embedder.train()
        return {"recall@1": recall, "in_use": in_use(training.criterion)}

    start = measure()
    told = Curve(max(1, steps // POINTS) if curve else 0, measure)
    try:
        run_loop(training, feed, Control(told))
    except NonFiniteLoss:
        return {"recall@1": 0.0, "in_use": 0.0, "start": start["recall@1"], "curve": []}
    curve_points = [{"step": 0, **start}, *told.points]
    return {**measure(), "start": start["recall@1"], "curve": curve_points, "steps": steps}


def in_use(criterion: nn.Module) -> float:
    """Return the fraction of proxies that the last 100 steps chose."""
    if isinstance(criterion, Other):
        return float((criterion.idle < min(100, criterion.step)).float().mean())
    assignment = getattr(criterion, "assignment", None)
    return assignment.fraction_in_use() if isinstance(assignment, Dynamic | Balanced) else 1.0


def at_start(source: Source) -> str:
    """Say which proxies are the closest of some training item before the first step."""
    rate = source.budget.rates[0]
    settings = trial_of(source, "proxy-nca", rate, assignment="dynamic").settings
    rows = source.split(None)[0]
    items = source.collection.subset(rows)
    embedder = build_model(settings, settings.preset, items, side=source.data.side)
    features = None if source.features is None else source.features[rows]
    training, _ = prepare(settings, embedder, items, features)
    x = normalize(Encoder(embedder).embed_collection(items))
    assert isinstance(training.criterion, ProxyLoss)
    chosen = training.criterion.assign(x)
    spread = 1 - float(x.mean(0).square().sum())
    used = len(torch.unique(chosen))
    proxies = len(training.criterion.proxies)
    return f"{used} of {proxies} proxies are the closest of some item; spread {spread:.4f}"


def run(
    source: Source,
    names: Iterable[str],
    *,
    seeds: int,
    halves: Sequence[int] = (0, 1),
    rate: float | None = None,
    each: float = 1.0,
) -> dict[str, Any]:
    """Choose each form's rate on training classes unless it is given; train it with every seed."""
    found = {}
    for name in names:
        form = FORMS[name]
        tried = {
            lr: mean(
                train(source, form, lr, seed=0, fold=fold, curve=False, each=each)["recall@1"]
                for fold in halves
            )
            for lr in (source.budget.rates if rate is None else ())
        }
        best = max(tried, key=lambda lr: tried[lr]) if rate is None else rate
        runs = [
            train(source, form, best, seed=s, fold=None, curve=True, each=each)
            for s in range(seeds)
        ]
        found[name] = {"rate": best, "tried": tried, "runs": runs}
        words = [
            f"{key} {100 * mean(r[key] for r in runs):.2f} "
            f"({', '.join(f'{100 * r[key]:.2f}' for r in runs)})"
            for key in ("start", "recall@1", "in_use")
            if runs
        ]
        words += [f"held out, by rate: {lr:g} {100 * score:.2f}" for lr, score in tried.items()]
        print(f"{source.name:10} {name:26} rate {best:g}  {'  '.join(words)}", flush=True)
    return found


def main() -> None:
    """Run all forms, print a line each, write a JSON file and the figure."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("cub", type=Path, nargs="?")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--halves",
        type=int,
        nargs="*",
        default=[0, 1],
        help="halves of the training classes that rates are chosen on",
    )
    parser.add_argument("--lr", type=float, help="learning rate of all forms, instead of choosing")
    parser.add_argument("--proxies-per-class", type=float, default=1.0)
    parser.add_argument("--only", nargs="*", choices=[*FORMS], default=[*FORMS])
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/dynamic.json"))
    parser.add_argument("--figure", type=Path, default=Path("docs/dynamic.png"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    folders = {"characters": None} | ({"cub": options.cub} if options.cub else {})
    target: Path = options.out
    results = json.loads(target.read_text()) if target.exists() else {}
    for name, folder in folders.items():
        source = open_source(name, folder, "minutes", seeds=None, weights=None)
        print(f"{name}: {at_start(source)}", flush=True)
        found = run(
            source,
            options.only,
            seeds=options.seeds,
            halves=options.halves,
            rate=options.lr,
            each=options.proxies_per_class,
        )
        if not options.seeds:
            continue
        results[name] = results.get(name, {}) | found
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n")
    if options.seeds:
        draw_curves(results, options.figure)


if __name__ == "__main__":
    main()
