"""One training of an experiment: its settings (`Trial`), and its result (a dict for JSON).

A trial scores its last epoch. Trials that
choose a rate (`fold`) use training classes only.
"""

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from nofuss.config import Options, Settings, to_json
from nofuss.data.collection import Collection
from nofuss.data.split import Rows
from nofuss.evaluate import nmi, ranks_of_first_positive
from nofuss.evaluate.recall import recall_of_ranks
from nofuss.files import digest
from nofuss.losses.proxy_loss import ProxyLoss
from nofuss.model.activations import Embed, embedding_of
from nofuss.model.stages import fixed_count
from nofuss.paper.sources import Source, bare_triplets, raw_features
from nofuss.proxies.bounds import proxy_bounds
from nofuss.ranking.neighbours import neighbours
from nofuss.report.sections import Items, retrieval_grid
from nofuss.training.callbacks import Control
from nofuss.training.finetune import prepare
from nofuss.training.loop import COLLAPSED, NonFiniteLoss, Training, run_loop, spread_of
from nofuss.training.network import apply_settings, build_model
from nofuss.training.score import untrained
from nofuss.training.settings import resolve

FORMAT = 3
"""Increased when the same settings would give other results."""
BOUND_ITEMS, BOUND_TRIPLETS = 1000, 100_000

Result = dict[str, Any]
Record = Literal["curve", "scores", "bounds", "neighbours", "untrained"]


@dataclass(frozen=True)
class Trial:
    """Settings of one training on a data set; equal trials run once."""

    settings: Settings
    fold: int | None = None
    """None: train → test; 0, 1: one half of the training classes → the other."""
    record: Record = "scores"
    """What to store beside the scores."""
    bare: bool = False
    """Train on triplets without labels, with as many items as with labels."""

    def key(self, source: Source) -> str:
        """Return the name of its file, a digest of settings and data."""
        config = to_json(self.settings)
        del config["device"]  # it does not change what is trained
        settings = {"format": FORMAT, "data": source.fingerprint, "config": config}
        settings |= {"fold": self.fold, "record": self.record, "bare": self.bare}
        if self.fold is not None:
            settings["try_classes"] = source.budget.try_classes
        if self.record == "curve":
            settings["curve_items"] = source.budget.curve_items
        return digest(json.dumps(settings, sort_keys=True).encode(), size=10)

    def describe(self) -> str:
        """Return words for the progress line."""
        c = self.settings
        if self.record == "untrained":
            return "what needs no training"
        words = [c.loss, f"lr {c.head_lr:.2g}", f"batch {c.batch_size}"]
        if c.proxies_per_class != 1 or c.assignment != "static":
            words.append(f"{c.proxies_per_class:g} proxies per label, {c.assignment}")
        words += ["triplets"] if self.bare else []
        return ", ".join([*words, f"seed {c.seed}" if self.fold is None else f"try {self.fold}"])


def trial_of(
    source: Source,
    loss: str,
    lr: float,
    *,
    seed: int = 0,
    fold: int | None = None,
    record: Record = "scores",
    bare: bool = False,
    **options: Any,
) -> Trial:
    """Return the training of a method by the budget, with further options of `nofuss train`.

    With another batch than the budget's, the same number of items is seen, and rates are scaled
    by the root of the ratio, as is usual with Adam.
    """
    budget = source.budget
    usual = budget.batch_of(loss)
    lr *= math.sqrt(options.setdefault("batch_size", usual) / usual)
    asked = Options(
        loss=loss,
        lr=None if budget.settings["preset"] == "vectors" else lr,
        head_lr=lr,
        proxy_lr=budget.proxy_factor * lr,
        seed=seed,
        **{**budget.settings, **options},
    )
    return Trial(resolve(asked, source.data, source.backbone), fold, record, bare)


def starts_of(source: Source, record: Record = "scores") -> list[Trial]:
    """Return trainings of no epoch, one per seed: what every method starts from."""
    rate, seeds = source.budget.rates[0], range(source.budget.seeds)
    options: dict[str, Any] = {"record": record, "epochs": 0}
    return [trial_of(source, "proxy-nca", rate, seed=seed, **options) for seed in seeds]


def has_collapsed(result: Result) -> bool:
    """Return whether a training ended with all embeddings in one direction, which had not been."""
    return "spread" in result and result["spread"] < min(COLLAPSED, result["spread_before"])


def run_trial(source: Source, trial: Trial, control: Control | None = None) -> Result:
    """Train and score; a try that diverges has a score of 0."""
    control = control or Control()
    settings, data = trial.settings, source.collection
    train_rows, test_rows = source.split(trial.fold)
    test_labels = source.labels(test_rows)
    if trial.record == "untrained":
        raw, dim = raw_features(source), int(settings.dim or 0)
        found = untrained(source.pictures, raw, fit=train_rows, rows=test_rows, dim=dim)
        scores = {name: scores_of(x, test_labels, source, trial) for name, x in found.items()}
        return {"baselines": scores}
    if trial.bare:
        data, settings = _without_labels(source, settings, train_rows)
    embedder = build_model(settings, settings.preset, data, side=source.data.side)
    apply_settings(settings, embedder)
    fixed_stages = fixed_count(embedder.backbone, settings.unfreeze)
    features = None if source.features is None else source.features[train_rows]
    training, feed = prepare(
        settings, embedder, data.subset(train_rows), features, progress=control.progress
    )
    embeds: dict[bytes, Embed] = {}  # activations of the fixed stages are computed once

    def embed(rows: Rows) -> Tensor:
        if (key := rows.tobytes()) not in embeds:
            items = source.collection.subset(rows)
            embeds[key] = embedding_of(items, embedder, fixed_stages, progress=control.progress)
        return embeds[key](embedder)

    result: Result = {"steps": training.epochs * len(feed)}
    result["spread_before"] = spread_of(embed(test_rows))
    measure = _measure(source, trial, training, embed)
    start = measure() if measure else {}
    if control.checkpoints is not None:
        training.resume(control.checkpoints)
    try:
        run_loop(
            training,
            feed,
            control,
            validate=measure,
            before_epoch=lambda epoch: embedder.freeze_backbone(epoch < settings.warmup),
        )
    except NonFiniteLoss as error:
        if trial.fold is None:
            raise
        return {"diverged": str(error), "recall@1": 0.0}
    embedder.eval()
    if measure:
        rows = [{"epoch": 0, "seconds": 0.0, **start}, *training.history]
        result["curve"] = [{"step": row["epoch"] * len(feed), **row} for row in rows]
    if training.history and "proxies_in_use" in training.history[-1]:
        result["proxies_in_use"] = training.history[-1]["proxies_in_use"]
    vectors = embed(test_rows)
    result |= scores_of(vectors, test_labels, source, trial)
    if trial.record == "neighbours":
        nearest = neighbours(vectors.numpy(), seed=0)
        result["grid"] = retrieval_grid(Items(source.pictures, test_rows), nearest)
    return result


def scores_of(vectors: Tensor, labels: Rows, source: Source, trial: Trial) -> Result:
    """Return Recall@K and spread; for test classes also NMI, and hits by class for intervals."""
    ranks = ranks_of_first_positive(vectors, labels)
    result: Result = {f"recall@{k}": v for k, v in recall_of_ranks(ranks, source.ks).items()}
    result["spread"] = spread_of(vectors)
    if trial.fold is not None:
        return result
    result["nmi"] = nmi(vectors, labels, seed=trial.settings.seed)
    query = (ranks > 0).cpu().numpy()
    classes = np.unique(labels, return_inverse=True)[1][query]
    result["queries"] = np.bincount(classes).tolist()
    result["hits"] = np.bincount(classes, (ranks == 1).cpu().numpy()[query]).astype(int).tolist()
    return result


def _measure(
    source: Source, trial: Trial, training: Training, embed: Callable[[Rows], Tensor]
) -> Callable[[], dict[str, Any]] | None:
    """Return what measures the model after every epoch; None if the trial records no curve."""
    train_rows, test_rows = source.split(trial.fold)
    some = _whole_classes(source, test_rows, source.budget.curve_items)
    sample = np.sort(np.random.default_rng(0).permutation(len(train_rows))[:BOUND_ITEMS])

    def recall() -> dict[str, Any]:
        ranks = ranks_of_first_positive(embed(some), source.labels(some))
        return {"recall@1": recall_of_ranks(ranks, (1,))[1]}

    def bounds() -> dict[str, Any]:
        criterion = training.criterion
        assert isinstance(criterion, ProxyLoss)
        labels = np.unique(source.labels(train_rows), return_inverse=True)[1]
        compact, vectors = torch.from_numpy(labels[sample]), embed(train_rows[sample])
        assigned = criterion.assign(vectors.to(criterion.proxies.device), compact).cpu()
        norm = (float(criterion.scale or 2) / 2) ** 0.5  # free norms: on the unit sphere
        proxies = criterion.proxies.detach().cpu()
        options = {"norm_x": norm, "norm_p": norm, "max_triplets": BOUND_TRIPLETS}
        measure = partial(proxy_bounds, vectors, compact, proxies, assigned, **options)
        return {
            name: asdict(measure(printed=printed))
            for name, printed in (("corrected", False), ("printed", True))
        }

    return {"curve": recall, "bounds": bounds}.get(trial.record)


def _whole_classes(source: Source, rows: Rows, most: int) -> Rows:
    """Return rows of random classes, as many as fit into `most` items."""
    labels = source.labels(rows)
    classes, sizes = np.unique(labels, return_counts=True)
    order = np.random.default_rng(0).permutation(len(classes))
    kept = order[np.cumsum(sizes[order]) <= most]
    return rows[np.isin(labels, classes[kept])]


def _without_labels(source: Source, settings: Settings, rows: Rows) -> tuple[Collection, Settings]:
    """Return triplets that hold as many items as the labelled training sees, and their settings."""
    batch = max(1, settings.batch_size // 3)
    steps = (settings.epochs or 0) * (len(rows) // settings.batch_size)
    data = bare_triplets(source, rows, max(1, batch * steps), seed=settings.seed)
    return data, replace(settings, batch_size=batch, epochs=1, per_class=0)
