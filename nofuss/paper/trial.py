"""One training of an experiment: what is asked (`Trial`), and what came of it (a dict for JSON).

A trial scores its last epoch. Those for choosing a rate (`fold`) see training classes only.
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
from nofuss.evaluate import nmi, ranks_of_first_positive
from nofuss.evaluate.recall import recall_of_ranks
from nofuss.files.checksum import digest_of
from nofuss.losses.proxy_loss import ProxyLoss
from nofuss.model.encoder import Encoder
from nofuss.paper.sources import Source, bare_triplets
from nofuss.proxies.bounds import proxy_bounds
from nofuss.report.findings import neighbours
from nofuss.report.grids import GridGroup, Items, retrieval_grid
from nofuss.training.checkpoint import load_checkpoint
from nofuss.training.job import build_model
from nofuss.training.loop import Training, Watch
from nofuss.training.loop import train as run_loop
from nofuss.training.prepare import prepare
from nofuss.training.step import NonFiniteLoss

FORMAT = 1
"""Raised when the same settings would give other results."""
GRID_FORMAT = 2
"""Of stored neighbours: data for a template; 1 was HTML."""
CURVE_ITEMS = 6000
"""Test items that a curve is drawn from; the last epoch is scored on all."""
BOUND_ITEMS, BOUND_TRIPLETS = 1000, 100_000

Record = Literal["curve", "scores", "bounds", "neighbours"]
Result = dict[str, Any]


@dataclass(frozen=True)
class Trial:
    """Settings of one training on a data set; equal trials are one."""

    config: TrainConfig
    fold: int | None = None
    """None: train → test. 0, 1: one half of the training classes → the other."""
    record: Record = "scores"
    """What to keep beside the scores."""
    bare: bool = False
    """Learn from triplets without labels, as many items as with them."""

    def key(self, source: Source) -> str:
        """The name of its file: settings and data, nothing else."""
        config = to_json(self.config)
        del config["device"]  # where, not what
        asked = {"format": FORMAT, "data": source.fingerprint, "config": config}
        asked |= {"fold": self.fold, "record": self.record, "bare": self.bare}
        if self.record == "neighbours":
            asked["grid"] = GRID_FORMAT
        text = json.dumps(asked, sort_keys=True)
        return digest_of([text.encode()], size=10)

    def cost(self, source: Source) -> float:
        """Items seen: what its time grows with."""
        return (self.config.epochs or 0) * len(source.sides(self.fold)[0])

    def describe(self) -> str:
        """What a progress line says."""
        c = self.config
        words = [c.loss, f"rate {c.head_rate:.2g}"]
        words += [f"batch {c.batch}"]
        if c.proxies_per_class != 1 or c.assignment == "dynamic":
            words.append(f"{c.proxies_per_class:g} proxies a label, {c.assignment}")
        words += ["triplets"] if self.bare else []
        return ", ".join([*words, f"seed {c.seed}" if self.fold is None else f"try {self.fold}"])


def run_trial(
    source: Source,
    trial: Trial,
    *,
    watch: Watch,
    stop: Callable[[], bool] = lambda: False,
    checkpoints: Path | None = None,
) -> Result:
    """Train and score; a try that diverges scores nothing."""
    config = trial.config
    train, test = source.sides(trial.fold)
    data = source.collection
    if trial.bare:
        data, config = _without_labels(source, trial, train)
    embedder, preprocessing = build_model(config, data)
    training, feed = prepare(
        config,
        data.subset(train),
        None if source.features is None else source.features[train],
        embedder=embedder,
        preprocessing=preprocessing,
    )

    def embed(rows: Rows) -> Tensor:
        found = source.collection.subset(rows)
        return Encoder(embedder, preprocessing).embed_collection(found)

    look = _looker(source, trial, training, embed, train, test)
    start = look() if look else {}
    if checkpoints is not None and (saved := load_checkpoint(checkpoints, say=watch.say)):
        training.restore(saved)
    try:
        run_loop(
            training,
            feed,
            watch=watch,
            validate=look,
            before_epoch=lambda epoch: embedder.freeze_backbone(epoch < (config.warmup or 0)),
            checkpoints=checkpoints,
            checkpoint_seconds=config.checkpoint_seconds,
            stop=stop,
        )
    except NonFiniteLoss as error:
        if trial.fold is None:
            raise
        return {"diverged": str(error), "recall@1": 0.0, "seconds": 0.0}
    embedder.eval()
    seconds = float(sum(row["seconds"] for row in training.history))
    result: Result = {"seconds": seconds, "steps": config.epochs and config.epochs * len(feed)}
    if look:
        rows = [{"epoch": 0, "seconds": 0.0, **start}, *training.history]
        result["curve"] = [{"step": row["epoch"] * len(feed), **row} for row in rows]
    if training.history and "proxies_in_use" in training.history[-1]:
        result["proxies_in_use"] = training.history[-1]["proxies_in_use"]
    vectors = embed(test)
    result |= scores(vectors, source.labels(test), source, trial)
    if trial.record == "neighbours":
        result["grid"] = _grid(source, vectors, test)
    return result


def scores(vectors: Tensor, labels: Rows, source: Source, trial: Trial | None = None) -> Result:
    """Recall@K; for test classes also NMI, and the hits of each class, to resample classes."""
    ranks = ranks_of_first_positive(vectors, labels)
    found: Result = {f"recall@{k}": v for k, v in recall_of_ranks(ranks, source.ks).items()}
    if trial is not None and trial.fold is not None:
        return found
    found["nmi"] = nmi(vectors, labels, seed=0 if trial is None else trial.config.seed)
    query = (ranks > 0).cpu().numpy()
    own = np.unique(labels, return_inverse=True)[1][query]
    found["queries"] = np.bincount(own).tolist()
    found["hits"] = np.bincount(own, (ranks == 1).cpu().numpy()[query]).astype(int).tolist()
    return found


def _looker(
    source: Source,
    trial: Trial,
    training: Training,
    embed: Callable[[Rows], Tensor],
    train: Rows,
    test: Rows,
) -> Callable[[], dict[str, Any]] | None:
    """What is looked at after every epoch."""
    random = np.random.default_rng(0)
    if trial.record == "curve":
        some = _whole_classes(source, test, CURVE_ITEMS)

        def recall() -> dict[str, Any]:
            ranks = ranks_of_first_positive(embed(some), source.labels(some))
            return {"recall@1": recall_of_ranks(ranks, (1,))[1]}

        return recall
    if trial.record == "bounds":
        labels = source.labels(train)
        sample = np.sort(random.permutation(len(train))[:BOUND_ITEMS])
        compact = torch.from_numpy(np.unique(labels, return_inverse=True)[1][sample])

        def bounds() -> dict[str, Any]:
            criterion = training.criterion
            assert isinstance(criterion, ProxyLoss)
            vectors = embed(train[sample])
            own = criterion.assign(vectors.to(criterion.proxies.device), compact).cpu()
            norm = (float(criterion.scale or 18) / 2) ** 0.5
            proxies = criterion.proxies.detach().cpu()
            found = {
                name: proxy_bounds(
                    vectors,
                    compact,
                    proxies,
                    own,
                    norm_x=norm,
                    norm_p=norm,
                    printed=printed,
                    max_triplets=BOUND_TRIPLETS,
                )
                for name, printed in (("corrected", False), ("printed", True))
            }
            return {name: _as_dict(value) for name, value in found.items()}

        return bounds
    return None


def _as_dict(bounds: Any) -> dict[str, Any]:
    values = dict(vars(bounds))
    return {k: v if isinstance(v, float) else dict(vars(v)) for k, v in values.items()}


def _whole_classes(source: Source, rows: Rows, most: int) -> Rows:
    """Rows of as many classes as fit into `most` items, drawn once."""
    labels = source.labels(rows)
    classes, sizes = np.unique(labels, return_counts=True)
    order = np.random.default_rng(0).permutation(len(classes))
    kept = order[np.cumsum(sizes[order]) <= most]
    return rows[np.isin(labels, classes[kept])]


def _without_labels(source: Source, trial: Trial, rows: Rows) -> tuple[Any, TrainConfig]:
    """As many triplets as the labelled training has thirds of items, each seen once."""
    config = trial.config
    batch = max(1, int(config.batch or 1) // 3)
    steps = (config.epochs or 0) * (len(rows) // int(config.batch or 1))
    data = bare_triplets(source, rows, max(1, batch * steps), seed=config.seed)
    return data, replace(config, batch=batch, epochs=1, per_class=0)


def _grid(source: Source, vectors: Tensor, rows: Rows) -> list[GridGroup]:
    """Return queries and their neighbours, pictures included, as data for the report."""
    return retrieval_grid(Items(source.pictures, rows), neighbours(vectors.numpy(), seed=0))
