"""The learning part of a job: features, a rehearsal without the held-out classes, the loop."""

import copy
import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import torch

from nofuss import console, processes
from nofuss.data.pictures import decode_ahead
from nofuss.encoder import Encoder
from nofuss.features import backbone_features
from nofuss.files import read_json
from nofuss.job import Job, Rows
from nofuss.model.embedder import Embedder
from nofuss.model.inference import through_head
from nofuss.scoring import recall_at_1, scorable, untrained
from nofuss.search.threshold import Threshold, calibrate
from nofuss.train.checkpoint import load_checkpoint
from nofuss.train.checks import check_before_training
from nofuss.train.feed import CollectionFeed
from nofuss.train.loop import Training
from nofuss.train.loop import train as run_loop
from nofuss.train.setup import batch_of, build_criterion, build_training, start_from_data


def compute_features(job: Job) -> None:
    """Features that training starts from: of the backbone, or the vectors themselves."""
    if job.preprocessing is None:
        job.features = torch.from_numpy(np.array(job.collection.array, dtype=np.float32))
        return
    if job.config.start == "data":
        job.features = backbone_features(
            job.embedder, job.collection, job.preprocessing, workers=job.config.workers
        )
    if not job.fixed and job.collection.kind == "pictures":
        count = len(job.collection)
        with processes.in_turn(), console.progress("decoding pictures once", count) as progress:
            job.collection = decode_ahead(
                job.collection, job.preprocessing, progress=lambda done, _: progress(done)
            )


def learn(job: Job, stop: Callable[[], bool]) -> None:
    """Train the embedder of the job in place."""
    config, sides = job.config, job.sides
    rows = sides.train
    held_out = job.collection.subset(sides.held_out)
    tells = held_out.labels is not None and scorable(held_out.labels)
    if job.fixed and len(sides.held_out):
        if config.epochs and tells:
            _rehearse(job, stop)
        rows = np.sort(np.r_[sides.train, sides.held_out])  # then learn from all training classes
    training, feed = prepare(job, job.embedder, rows)
    job.criterion, job.learned = training.criterion, rows
    if config.resume:
        checkpoint = load_checkpoint(job.run.checkpoints, say=console.warn, cut=training.cut)
        if checkpoint is None:
            console.warn("no whole checkpoint to go on from; starting anew")
        else:
            training.restore(checkpoint)
            job.run.write_metrics(training.history)
            console.say(f"going on at epoch {training.epoch + 1}, step {training.step + 1}")
    elif config.epochs:
        first = next(iter(feed(0, 0)))
        job.embedder.freeze_backbone(bool(config.warmup))
        check_before_training(
            training.model, training.criterion, training.optimizer, first, say=console.warn
        )
    watched = not job.fixed and tells

    def validate() -> dict[str, float]:
        found = Encoder(job.embedder, job.preprocessing).embed_collection(held_out)
        return {"held_out_recall@1": recall_at_1(found, held_out.labels)}

    _run(
        job,
        training,
        feed,
        stop,
        validate=validate if watched else None,
        checkpoints=job.run.checkpoints,
    )
    if watched and training.history:
        _tell_what_it_was_worth(job, training.history[-1]["held_out_recall@1"])


def prepare(job: Job, embedder: Embedder, rows: Rows) -> tuple[Training, CollectionFeed]:
    """Criterion, optimizer and batches for training on these rows."""
    config, data = job.config, job.collection.subset(rows)
    if job.fixed:
        data = replace(
            data, kind="vectors", array=job.for_head(rows).numpy(), paths=(), decoded=None
        )
    classes = data.num_classes or max(2, min(1000, len(data) // 5))
    criterion = build_criterion(config, classes)
    if config.start == "data":
        labels = None if data.labels is None else torch.from_numpy(data.labels)
        start_from_data(
            embedder.head,
            criterion,
            job.for_head(rows),
            labels,
            center=bool(config.center),
            seed=config.seed,
        )
    if data.labels is None:
        config = replace(config, per_class=0)
    feed = CollectionFeed(
        data,
        None if job.fixed else job.preprocessing,
        batch_of(config, len(data), classes),
        per_class=int(config.per_class or 0),
        seed=config.seed,
        workers=config.workers,
    )
    return build_training(config, embedder, criterion), feed


def _rehearse(job: Job, stop: Callable[[], bool]) -> None:
    """Train without the held-out classes, to see on them whether training pays."""
    if job.config.resume and not job.config.force and (before := _rehearsed(job)):
        curve, job.threshold = before
        _tell_what_it_was_worth(job, curve[-1])
        return
    held_out = job.sides.held_out
    labels = np.asarray(job.collection.labels)[held_out]
    embedder = copy.deepcopy(job.embedder)
    training, feed = prepare(job, embedder, job.sides.train)
    x = job.for_head(held_out)

    def validate() -> dict[str, float]:
        return {"held_out_recall@1": recall_at_1(through_head(embedder, x), labels)}

    start = validate()["held_out_recall@1"]
    _run(job, training, feed, stop, validate=validate, checkpoints=None)
    curve = [start, *(row["held_out_recall@1"] for row in training.history)]
    job.threshold = calibrate(through_head(embedder, x), labels)
    threshold = None if job.threshold is None else asdict(job.threshold)
    job.run.write("holdout.json", {"recall@1": curve, "threshold": threshold})
    _tell_what_it_was_worth(job, curve[-1])
    console.say("now with all training classes")


def _rehearsed(job: Job) -> tuple[list[float], Threshold | None] | None:
    """What a rehearsal of the same run found before it was interrupted."""

    def read() -> str:
        try:
            return json.dumps(read_json(job.run.path / "holdout.json"))
        except (OSError, ValueError):  # not there, or damaged
            return "{}"

    found = json.loads(processes.on_first(read))
    try:
        threshold = found["threshold"]
        return list(found["recall@1"]), None if threshold is None else Threshold(**threshold)
    except (KeyError, TypeError):
        return None


def _tell_what_it_was_worth(job: Job, trained: float) -> None:
    """Recall@1 on held-out training classes beside what needs no training."""
    rows = job.sides.held_out
    labels = np.asarray(job.collection.labels)[rows]
    baselines = {
        name: recall_at_1(found, labels)
        for name, found in untrained(
            job.collection, job.features, fit=job.sides.train, rows=rows, dim=job.config.dim
        ).items()
    }
    beside = "".join(f"; {name}: {value:.3f}" for name, value in baselines.items())
    classes = len(np.unique(labels))
    console.say(f"Recall@1 on {classes} held-out training classes: trained {trained:.3f}{beside}")
    if any(trained <= value for name, value in baselines.items() if "PCA" in name):
        console.warn(
            "training does not beat the untrained PCA on held-out training classes; "
            "--epochs 0 keeps the untrained one"
        )
    elif baselines and trained <= max(baselines.values()):
        console.warn(
            "the untrained features, longer as they are, find held-out training classes no "
            "worse; a larger --dim may help"
        )


def _run(
    job: Job,
    training: Training,
    feed: CollectionFeed,
    stop: Callable[[], bool],
    *,
    validate: Callable[[], dict[str, float]] | None,
    checkpoints: Path | None,
) -> None:
    """The loop, with its display."""
    config = job.config
    what = "vectors" if job.fixed else "images"
    record = job.run.write_metrics if checkpoints else None
    with console.TrainingDisplay(training.epochs, what=what, record=record) as display:
        run_loop(
            training,
            feed,
            watch=display,
            validate=validate,
            before_epoch=lambda epoch: job.embedder.freeze_backbone(epoch < (config.warmup or 0)),
            checkpoints=checkpoints,
            checkpoint_seconds=config.checkpoint_seconds,
            stop=stop,
        )
