"""One training of an experiment: its settings (`Trial`), and its result (a dict for JSON).

A trial scores its last epoch. Trials that choose a rate (`fold`) use training classes only.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from nofuss.config import TrainConfig, to_json
from nofuss.data.split import Rows
from nofuss.distributed import processes
from nofuss.evaluate import nmi, ranks_of_first_positive
from nofuss.evaluate.recall import recall_of_ranks
from nofuss.files import digest
from nofuss.losses.proxy_loss import ProxyLoss
from nofuss.model.stages import fixed_count
from nofuss.model.trunk import Embed, embedding_of
from nofuss.paper.sources import Source, bare_triplets, raw_features
from nofuss.paper.stopwatch import Stopwatch, peak_memory
from nofuss.progress import Progress, silent
from nofuss.proxies.bounds import proxy_bounds
from nofuss.report.findings import neighbours
from nofuss.report.grids import GridGroup, Items, retrieval_grid
from nofuss.training.baselines import untrained
from nofuss.training.callbacks import as_progress
from nofuss.training.checkpoint import load_checkpoint
from nofuss.training.job import build_model, check_stages
from nofuss.training.loop import Training, run_loop
from nofuss.training.prepare import prepare
from nofuss.training.step import NonFiniteLoss

FORMAT = 1
"""Increased when the same settings would give other results."""
GRID_FORMAT = 2
"""Of stored neighbours: data for a template; 1 was HTML."""
BOUND_ITEMS, BOUND_TRIPLETS = 1000, 100_000

Record = Literal["curve", "scores", "bounds", "neighbours", "untrained"]
Result = dict[str, Any]


@dataclass(frozen=True)
class Trial:
    """Settings of one training on a data set; equal trials run once."""

    config: TrainConfig
    fold: int | None = None
    """None: train → test; 0, 1: one half of the training classes → the other."""
    record: Record = "scores"
    """What to store beside the scores."""
    bare: bool = False
    """Train on triplets without labels, with as many items as with labels."""

    def key(self, source: Source) -> str:
        """Return the name of its file, a digest of settings and data."""
        config = to_json(self.config)
        del config["device"]  # it does not change what is trained
        settings = {"format": FORMAT, "data": source.fingerprint, "config": config}
        settings |= {"fold": self.fold, "record": self.record, "bare": self.bare}
        if self.fold is not None and source.budget.try_classes is not None:
            settings["try_classes"] = source.budget.try_classes
        if self.record == "curve":
            settings["curve_items"] = source.budget.curve_items
        if self.record == "neighbours":
            settings["grid"] = GRID_FORMAT
        text = json.dumps(settings, sort_keys=True)
        return digest(text.encode(), size=10)

    def describe(self) -> str:
        """Return words for the progress line."""
        c = self.config
        if self.record == "untrained":
            return "what needs no training"
        words = [c.loss, f"lr {c.head_lr:.2g}"]
        words += [f"scale {c.scale:g}"] if c.scale else []
        words += [f"batch {c.batch_size}"]
        if c.proxies_per_class != 1 or c.assignment == "dynamic":
            words.append(f"{c.proxies_per_class:g} proxies a label, {c.assignment}")
        words += ["triplets"] if self.bare else []
        return ", ".join([*words, f"seed {c.seed}" if self.fold is None else f"try {self.fold}"])


def run_trial(
    source: Source,
    trial: Trial,
    *,
    what: str = "training",
    progress: Progress = silent,
    stop: Callable[[], bool] = lambda: False,
    checkpoints: Path | None = None,
) -> Result:
    """Train and score; a try that diverges has a score of 0.

    what: in words, for `progress`.
    """
    if trial.record == "untrained":
        return {"baselines": _untrained_scores(source, int(trial.config.dim or 0))}
    config, clock = trial.config, Stopwatch()
    train_rows, test_rows = source.sides(trial.fold)
    data = source.collection
    if trial.bare:
        data, config = _without_labels(source, trial, train_rows)
    embedder = build_model(config, data)
    config = check_stages(config, embedder)
    fixed_stages = fixed_count(embedder.backbone, config.unfreeze)
    training, feed = prepare(
        config,
        data.subset(train_rows),
        None if source.features is None else source.features[train_rows],
        embedder=embedder,
        fixed_stages=fixed_stages,
        progress=progress,
    )

    embeds: dict[bytes, Embed] = {}

    def embed(rows: Rows) -> Tensor:
        if (key := rows.tobytes()) not in embeds:
            items = source.collection.subset(rows)
            embeds[key] = embedding_of(items, embedder, fixed_stages, progress=progress)
        return embeds[key](embedder)

    measure = _measure(source, trial, training, embed, train_rows, test_rows)
    clock.stop("prepare")
    start = measure() if measure else {}
    if checkpoints is not None and (
        saved := load_checkpoint(checkpoints, sharded=training.sharded)
    ):
        training.restore(saved)
    try:
        run_loop(
            training,
            feed,
            tell=as_progress(progress, what, training.epochs * len(feed)),
            validate=measure,
            before_epoch=lambda epoch: embedder.freeze_backbone(epoch < (config.warmup or 0)),
            checkpoints=checkpoints,
            stop=stop,
        )
    except NonFiniteLoss as error:
        if trial.fold is None:
            raise
        return {"diverged": str(error), "recall@1": 0.0, "seconds": 0.0}
    embedder.eval()
    seconds = float(sum(row["seconds"] for row in training.history))
    result: Result = {"seconds": seconds, "steps": config.epochs and config.epochs * len(feed)}
    if measure:
        rows = [{"epoch": 0, "seconds": 0.0, **start}, *training.history]
        result["curve"] = [{"step": row["epoch"] * len(feed), **row} for row in rows]
    if training.history and "proxies_in_use" in training.history[-1]:
        result["proxies_in_use"] = training.history[-1]["proxies_in_use"]
    clock.start()
    vectors = embed(test_rows)
    clock.stop("embed")
    labels = source.labels(test_rows)
    result |= _from_first(lambda: scores_of(vectors, labels, source, trial, clock=clock))
    result["stages"] = clock.seconds | {"train": seconds}
    result["peak_bytes"] = peak_memory()
    if trial.record == "neighbours":
        result["grid"] = _grid(source, vectors, test_rows)
    return result


def scores_of(
    vectors: Tensor,
    labels: Rows,
    source: Source,
    trial: Trial | None = None,
    *,
    clock: Stopwatch | None = None,
) -> Result:
    """Return Recall@K; for test classes also NMI, and hits by class for the bootstrap."""
    clock = clock or Stopwatch()
    ranks = ranks_of_first_positive(vectors, labels)
    clock.stop("recall")
    result: Result = {f"recall@{k}": v for k, v in recall_of_ranks(ranks, source.ks).items()}
    if trial is not None and trial.fold is not None:
        return result
    result["nmi"] = nmi(vectors, labels, seed=0 if trial is None else trial.config.seed)
    clock.stop("nmi")
    query = (ranks > 0).cpu().numpy()
    classes = np.unique(labels, return_inverse=True)[1][query]
    result["queries"] = np.bincount(classes).tolist()
    result["hits"] = np.bincount(classes, (ranks == 1).cpu().numpy()[query]).astype(int).tolist()
    return result


def _untrained_scores(source: Source, dim: int) -> dict[str, Result]:
    """Return the scores of the features as they are, of their PCA, or of the pixels."""
    found = untrained(
        source.pictures, raw_features(source), fit=source.train_rows, rows=source.test_rows, dim=dim
    )
    labels = source.labels(source.test_rows)
    return _from_first(
        lambda: {name: scores_of(vectors, labels, source) for name, vectors in found.items()}
    )


def _from_first(score: Callable[[], Result]) -> Result:
    """Return scores that the first of several processes computes."""
    result: Result = json.loads(processes.from_first(lambda: json.dumps(score())))
    return result


def _measure(
    source: Source,
    trial: Trial,
    training: Training,
    embed: Callable[[Rows], Tensor],
    train_rows: Rows,
    test_rows: Rows,
) -> Callable[[], dict[str, Any]] | None:
    """Return what measures the model after every epoch; None if the trial records no curve."""
    random = np.random.default_rng(0)
    if trial.record == "curve":
        some = _whole_classes(source, test_rows, source.budget.curve_items)

        def recall() -> dict[str, Any]:
            ranks = ranks_of_first_positive(embed(some), source.labels(some))
            return {"recall@1": recall_of_ranks(ranks, (1,))[1]}

        return recall
    if trial.record == "bounds":
        labels = source.labels(train_rows)
        sample = np.sort(random.permutation(len(train_rows))[:BOUND_ITEMS])
        compact = torch.from_numpy(np.unique(labels, return_inverse=True)[1][sample])

        def bounds() -> dict[str, Any]:
            criterion = training.criterion
            assert isinstance(criterion, ProxyLoss)
            vectors = embed(train_rows[sample])
            assigned = criterion.assign(vectors.to(criterion.proxies.device), compact).cpu()
            norm = (float(criterion.scale or 18) / 2) ** 0.5
            proxies = criterion.proxies.detach().cpu()
            measured = {
                name: proxy_bounds(
                    vectors,
                    compact,
                    proxies,
                    assigned,
                    norm_x=norm,
                    norm_p=norm,
                    printed=printed,
                    max_triplets=BOUND_TRIPLETS,
                )
                for name, printed in (("corrected", False), ("printed", True))
            }
            return {name: _as_dict(value) for name, value in measured.items()}

        return bounds
    return None


def _as_dict(bounds: Any) -> dict[str, Any]:
    values = dict(vars(bounds))
    return {k: v if isinstance(v, float) else dict(vars(v)) for k, v in values.items()}


def _whole_classes(source: Source, rows: Rows, most: int) -> Rows:
    """Return rows of random classes, as many as fit into `most` items."""
    labels = source.labels(rows)
    classes, sizes = np.unique(labels, return_counts=True)
    order = np.random.default_rng(0).permutation(len(classes))
    kept = order[np.cumsum(sizes[order]) <= most]
    return rows[np.isin(labels, classes[kept])]


def _without_labels(source: Source, trial: Trial, rows: Rows) -> tuple[Any, TrainConfig]:
    """Return triplets that hold as many items as the labelled training sees, and their settings."""
    config = trial.config
    batch = max(1, int(config.batch_size or 1) // 3)
    steps = (config.epochs or 0) * (len(rows) // int(config.batch_size or 1))
    data = bare_triplets(source, rows, max(1, batch * steps), seed=config.seed)
    return data, replace(config, batch_size=batch, epochs=1, per_class=0)


def _grid(source: Source, vectors: Tensor, rows: Rows) -> list[GridGroup]:
    """Return queries and their neighbours, pictures included, as data for the report."""
    return retrieval_grid(Items(source.pictures, rows), neighbours(vectors.numpy(), seed=0))
