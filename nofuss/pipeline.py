"""The whole way: data → model → training → scores, as the commands run it.

The rooms do the work; this file says in which order, and tells the user about it.
"""

import contextlib
import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from torch import Tensor, nn

from nofuss import console
from nofuss.config import Preprocessing, TrainConfig, resolve
from nofuss.data.collection import Collection, compact_labels
from nofuss.data.decode import decode
from nofuss.data.pictures import decode_ahead
from nofuss.data.scan import ScanReport
from nofuss.data.split import hold_out, split_collection
from nofuss.embeddings import RunEmbeddings, sample_by_class
from nofuss.encoder import Encoder
from nofuss.errors import DataError, TrainingError, UsageError
from nofuss.features import backbone_features
from nofuss.files import write_file
from nofuss.geometry import normalize
from nofuss.interrupt import stop_on_signals
from nofuss.losses import INSTANCE_LOSSES
from nofuss.losses.proxy_loss import ProxyLoss
from nofuss.model.backbones import PRETRAINED
from nofuss.model.embedder import Embedder, build_embedder
from nofuss.model.weights import save_model
from nofuss.model_card import write_card
from nofuss.report import write_report
from nofuss.run import Run, continue_run, create_run, resume_run
from nofuss.scoring import recall_at_1, scorable, score_all, score_table, untrained
from nofuss.search.threshold import Threshold, calibrate
from nofuss.train.checkpoint import load_checkpoint
from nofuss.train.checks import check_before_training
from nofuss.train.feed import CollectionFeed
from nofuss.train.loop import Interrupted, Training
from nofuss.train.loop import train as run_loop
from nofuss.train.setup import build_criterion, build_training, start_from_data
from nofuss.train.step import NonFiniteLoss
from nofuss.usable import check_supervision, open_usable

Rows = NDArray[np.int64]
SMALL_SIDE = 96
"""Pictures with a shorter side are small: they want the small convnet, not ImageNet's weights."""


@dataclass(frozen=True)
class Sides:
    """Rows of the collection, with no class in common; held_out and test may be empty."""

    train: Rows
    held_out: Rows
    """Training classes kept aside to watch training."""
    test: Rows


@dataclass
class Job:
    """What the steps of one training hand to each other."""

    run: Run
    collection: Collection
    sides: Sides
    embedder: Embedder
    preprocessing: Preprocessing | None
    features: Tensor | None = None
    """(N, F) of a pretrained backbone before training, or the vectors themselves."""
    criterion: nn.Module | None = None
    learned: Rows | None = None
    """The rows that model and criterion were trained on in the end."""
    threshold: Threshold | None = None
    """The distance from which on nothing is alike, where held-out classes could tell it."""

    @property
    def config(self) -> TrainConfig:
        """The resolved configuration."""
        return self.run.config

    @property
    def fixed(self) -> bool:
        """Only the head is trained, on features that stay as they are."""
        return self.config.preset in ("frozen", "vectors")

    def for_head(self, rows: Rows) -> Tensor:
        """The features of these rows as the head takes them."""
        assert self.features is not None
        return self.embedder.to_head(self.features[rows])


def train(config: TrainConfig, collection: Collection | None = None) -> Path:
    """`nofuss train`: learn, score on unseen classes, leave a run directory; returns its path."""
    if config.resume:
        config = resume_run(config, say=console.warn)
    collection, scan = open_usable(config.data if collection is None else collection)
    check_supervision(collection)
    config = _settle(config, collection)
    sides = split(collection, config)
    config = _fit_dim(config, collection, len(sides.train))
    embedder, preprocessing = build_model(config, collection)
    # Refuse bad options before a run exists.
    build_criterion(config, max(2, len(_classes(collection, sides.train))))
    fingerprint = collection.fingerprint()
    if config.resume:
        run = continue_run(config, fingerprint=fingerprint)
    else:
        run = create_run(config, name=collection.name, fingerprint=fingerprint)
    console.say(f"run directory {run.path}, settings: {config.preset}")
    job = Job(run, collection, sides, embedder, preprocessing)
    try:
        _train(job, scan, fingerprint)
        return run.path
    except NonFiniteLoss as error:
        raise _explain_non_finite(job, error) from None
    except (KeyboardInterrupt, Interrupted):
        console.say(f"stopped; go on with: {run.resume_command}")
        raise KeyboardInterrupt from None
    except (OSError, SafetensorError) as error:  # a full or failing disk
        reason = " ".join(str(error).split())
        raise TrainingError(f"{reason}; mend it, then go on with: {run.resume_command}") from error


def _train(job: Job, scan: ScanReport, fingerprint: str) -> None:
    """Learn, save, score."""
    run, collection, sides = job.run, job.collection, job.sides
    run.write("data.json", _describe(job))
    if scan.problems:
        scan.write_csv(run.path / "scan.csv")
    _compute_features(job)
    with stop_on_signals(console.warn) as stop:
        _learn(job, stop)
    names = [
        collection.class_names[i] for i in _classes(collection, np.r_[sides.train, sides.held_out])
    ]
    _calibrate(job)
    extra = {} if job.threshold is None else job.threshold.as_extra()
    save_model(run.model, job.embedder, job.preprocessing, class_names=names, extra=extra)
    kept = _embed_sides(job, fingerprint)
    kept.save(run.path)
    _score(job, torch.from_numpy(kept.test))
    write_card(run)
    console.say(f"report: {write_report(run.path, job.collection, kept)}")


def split(collection: Collection, config: TrainConfig) -> Sides:
    """The test classes, and those of the training classes that are held out."""
    nothing = np.empty(0, dtype=np.int64)
    everything = np.arange(len(collection))
    if collection.labels is None:
        return Sides(everything, nothing, nothing)
    train_rows, test = everything, nothing
    if collection.split is not None or config.test_share != 0:
        share = 0.5 if config.test_share is None else config.test_share
        train_rows, test = split_collection(
            collection,
            seed=config.seed,
            test_share=share,
            allow_shared=config.allow_shared,
        )
    if len(_classes(collection, train_rows)) < 2:
        raise DataError(
            f"{collection.name} has one class to train on; a distance is learned between two or "
            "more: add classes"
            + ("" if collection.split is not None else ", or lower --test-share")
        )
    share = float(config.holdout or 0)
    if not share or len(_classes(collection, train_rows)) < 8:  # too few to spare any
        return Sides(train_rows, nothing, test)
    assert collection.labels is not None
    inner = hold_out(collection.labels[train_rows], share, config.seed)
    return Sides(train_rows[inner.train], train_rows[inner.test], test)


def build_model(
    config: TrainConfig, collection: Collection
) -> tuple[Embedder, Preprocessing | None]:
    """The embedder at its start, and how its pictures are prepared."""
    assert config.backbone is not None
    channels = _channels(config, collection)
    weights = config.weights or (None if config.backbone == "inception-bn" else PRETRAINED)
    embedder = build_embedder(
        config.backbone,
        dim=config.dim,
        channels=channels,
        weights=weights,
        root=bool(config.root),
        seed=config.seed,
    )
    if config.freeze_batch_norm:
        embedder.freeze_batch_norm()
    preprocessing = embedder.backbone.preprocessing
    if preprocessing is None:
        return embedder, None
    if config.backbone == "convnet":
        side = config.size or max(16, min(_side(collection) or preprocessing.size, 64))
        preprocessing = replace(preprocessing, size=side, resize=side)
    elif config.size:
        resize = round(config.size * preprocessing.resize / preprocessing.size)
        preprocessing = replace(preprocessing, size=config.size, resize=resize)
    return embedder, preprocessing


def _settle(config: TrainConfig, collection: Collection) -> TrainConfig:
    """Resolve what the data decide."""
    kind = "vectors" if collection.kind == "vectors" else "pictures"
    side = _side(collection)
    config = resolve(config, kind=kind, small=side is not None and side < SMALL_SIDE)
    if collection.labels is None and config.loss in INSTANCE_LOSSES:
        raise UsageError(
            f"--loss {config.loss} needs labels, and {collection.name} has triplets only; use a "
            "loss over proxies: proxy-nca, proxy-triplet"
        )
    if collection.labels is None and config.assignment != "dynamic":
        console.say("triplets without labels: assignment is dynamic")
        config = replace(config, assignment="dynamic")
    if config.per_class is None:
        pairs = config.loss in INSTANCE_LOSSES or config.assignment == "dynamic"
        config = replace(config, per_class=(2 if config.loss == "n-pairs" else 4) if pairs else 0)
    return config


def _fit_dim(config: TrainConfig, collection: Collection, count: int) -> TrainConfig:
    """A head that starts at the PCA has no more directions than there are items or features."""
    if config.start != "data":
        return config
    width = config.dim
    if collection.kind == "vectors" and collection.array is not None:
        width = collection.array.shape[1]
    if (most := max(1, min(config.dim, width, count - 1))) < config.dim:
        console.say(f"note: dim is {most} instead of {config.dim}: so few items or features")
    return replace(config, dim=most)


def _compute_features(job: Job) -> None:
    """Features that training starts from: of the backbone, or the vectors themselves."""
    if job.preprocessing is None:
        job.features = torch.from_numpy(np.array(job.collection.array, dtype=np.float32))
        return
    if job.config.start == "data":
        job.features = backbone_features(
            job.embedder, job.collection, job.preprocessing, workers=job.config.workers
        )
    if not job.fixed and job.collection.kind == "pictures":
        with console.progress("decoding pictures once", len(job.collection)) as progress:
            job.collection = decode_ahead(
                job.collection, job.preprocessing, progress=lambda done, _: progress(done)
            )


def _learn(job: Job, stop: Callable[[], bool]) -> None:
    """Train the embedder of the job in place."""
    config, sides = job.config, job.sides
    rows = sides.train
    if job.fixed and len(sides.held_out):
        if config.epochs:
            _rehearse(job, stop)
        rows = np.sort(np.r_[sides.train, sides.held_out])  # then learn from all training classes
    training, feed = _prepare(job, job.embedder, rows)
    job.criterion, job.learned = training.criterion, rows
    if config.resume:
        checkpoint = load_checkpoint(job.run.checkpoints, say=console.warn)
        if checkpoint is None:
            console.warn("no whole checkpoint to go on from; starting anew")
        else:
            training.restore(checkpoint)
            console.say(f"going on at epoch {training.epoch + 1}, step {training.step + 1}")
    elif config.epochs:
        first = next(iter(feed(0, 0)))
        job.embedder.freeze_backbone(bool(config.warmup))
        check_before_training(
            training.model, training.criterion, training.optimizer, first, say=console.warn
        )
    watched = not job.fixed and len(sides.held_out) > 0
    held_out = job.collection.subset(sides.held_out)

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


def _prepare(job: Job, embedder: Embedder, rows: Rows) -> tuple[Training, CollectionFeed]:
    """Criterion, optimizer and batches for training on these rows."""
    config, data = job.config, job.collection.subset(rows)
    if job.fixed:
        data = replace(
            data, kind="vectors", array=job.for_head(rows).numpy(), paths=(), decoded=None
        )
    classes = data.num_classes if data.labels is not None else max(2, min(1000, len(data) // 5))
    criterion = build_criterion(config, classes)
    if config.start == "data":
        labels = None if data.labels is None else torch.from_numpy(data.labels)
        start_from_data(
            embedder.head, criterion, job.for_head(rows), labels, center=bool(config.center)
        )
    batch, per_class = min(int(config.batch or 1), len(data)), int(config.per_class or 0)
    if per_class and data.labels is not None:
        batch = per_class * max(2, min(batch // per_class, classes))
    feed = CollectionFeed(
        data,
        None if job.fixed else job.preprocessing,
        batch,
        per_class=per_class,
        seed=config.seed,
        workers=config.workers,
    )
    return build_training(config, embedder, criterion), feed


def _rehearse(job: Job, stop: Callable[[], bool]) -> None:
    """Train without the held-out classes, to see on them whether training pays."""
    held_out = job.sides.held_out
    labels = np.asarray(job.collection.labels)[held_out]
    embedder = copy.deepcopy(job.embedder)
    training, feed = _prepare(job, embedder, job.sides.train)
    x = job.for_head(held_out)

    @torch.no_grad()
    def validate() -> dict[str, float]:
        return {"held_out_recall@1": recall_at_1(embedder.head(x), labels)}

    start = validate()["held_out_recall@1"]
    _run(job, training, feed, stop, validate=validate, checkpoints=None)
    curve = [start, *(row["held_out_recall@1"] for row in training.history)]
    job.run.write("holdout.json", {"recall@1": curve})
    with torch.no_grad():
        job.threshold = calibrate(embedder.head(x), labels)
    _tell_what_it_was_worth(job, curve[-1])
    console.say("now with all training classes")


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


def _calibrate(job: Job) -> None:
    """Find the threshold on held-out training classes.

    With fixed features it is there already: the classes have since been learned from.
    """
    if not job.fixed and len(job.sides.held_out):
        held_out = job.collection.subset(job.sides.held_out)
        assert held_out.labels is not None
        encoder = Encoder(job.embedder, job.preprocessing)
        job.threshold = calibrate(encoder.embed_collection(held_out), held_out.labels)
    if job.threshold is not None:
        console.say(job.threshold.describe())


def _embed_sides(job: Job, fingerprint: str) -> RunEmbeddings:
    """Unit embeddings of the test items and of a sample of the training items, with proxies."""
    assert job.learned is not None
    labels = None
    if job.collection.labels is not None:
        labels = compact_labels(job.collection.labels[job.learned])[0]
    few = sample_by_class(labels, len(job.learned), seed=job.config.seed)
    rows = np.r_[job.sides.test, job.learned[few]]
    if job.fixed:
        assert job.features is not None
        with torch.no_grad():
            found = normalize(job.embedder.head(job.for_head(rows)))
    else:
        encoder = Encoder(job.embedder, job.preprocessing)
        with console.progress("embedding", len(rows)) as progress:
            found = encoder.embed_collection(job.collection.subset(rows), progress=progress)
    test, sample = found[: len(job.sides.test)], found[len(job.sides.test) :]
    proxies, assignment, scale = sample[:0], torch.empty(0, dtype=torch.int64), None
    if isinstance(job.criterion, ProxyLoss):
        proxies = normalize(job.criterion.proxies.detach())
        own = None if labels is None else torch.from_numpy(labels[few])
        assignment = job.criterion.assignment.of(sample, own, proxies)
        scale = None if job.criterion.scale is None else float(job.criterion.scale)
    return RunEmbeddings(
        fingerprint=fingerprint,
        test=test.numpy(),
        test_rows=job.sides.test,
        sample=sample.numpy(),
        sample_rows=job.learned[few],
        proxies=proxies.numpy(),
        assignment=assignment.numpy(),
        scale=scale,
    )


def _score(job: Job, found: Tensor) -> None:
    """Scores on the test classes, beside what needed no training; scores.json."""
    config, rows = job.config, job.sides.test
    if job.collection.labels is None or not len(rows):
        console.say("no test classes, so no scores; try it: nofuss evaluate RUN DATA")
        return
    labels = np.asarray(job.collection.labels)[rows]
    if not scorable(labels):
        console.say("the test classes are too few to score: two are needed, one with two items")
        return
    fit = np.sort(np.r_[job.sides.train, job.sides.held_out])
    baselines = untrained(job.collection, job.features, fit=fit, rows=rows, dim=config.dim)
    scores = score_all({config.loss: found} | baselines, labels, ks=(1, 2, 4, 8), seed=config.seed)
    score_table("unseen classes, last epoch", scores)
    content = scores[config.loss].as_dict()
    content["baselines"] = {name: scores[name].as_dict() for name in baselines}
    job.run.write("scores.json", content)


def _explain_non_finite(job: Job, error: NonFiniteLoss) -> TrainingError:
    """Name the batch's items in a file, and say what to try."""
    file = job.run.path / "non_finite_batch.txt"
    rows = job.sides.train if job.learned is None else job.learned
    names = [job.collection.names[rows[i]] for i in error.indices.tolist()]
    write_file(file, "".join(f"{name}\n" for name in names))
    return TrainingError(
        f"{error}; nothing was updated, the last checkpoint is whole; the batch's items are in "
        f"{file}; try lower rates, or a lower scale"
    )


def _describe(job: Job) -> dict[str, Any]:
    """What data.json holds."""
    c, s = job.collection, job.sides
    counts = {side: len(getattr(s, side)) for side in ("train", "held_out", "test")}
    classes = {side: [c.class_names[i] for i in _classes(c, getattr(s, side))] for side in counts}
    return {"description": c.describe(), "items": counts, "classes": classes}


def _classes(collection: Collection, rows: Rows) -> Rows:
    """The classes of these rows, ascending."""
    if collection.labels is None:
        return np.empty(0, dtype=np.int64)
    return np.unique(collection.labels[rows])


def _side(collection: Collection) -> int | None:
    """The pictures' short side: of the arrays, or the median of a few files."""
    if collection.kind == "images" and collection.array is not None:
        return int(min(collection.array.shape[1:3]))
    if collection.kind == "pictures":
        few = collection.paths[:: max(1, len(collection.paths) // 20)]
        sides = []
        for path in few:
            with contextlib.suppress(DataError):
                sides.append(min(decode(path, at_least=SMALL_SIDE).size))
        return int(np.median(sides)) if sides else None
    return None


def _channels(config: TrainConfig, collection: Collection) -> int | None:
    """Width of vectors; 1 for gray arrays into the small convnet, 3 for other pictures."""
    if collection.kind == "vectors":
        assert collection.array is not None
        return int(collection.array.shape[1])
    if config.backbone == "convnet":
        gray = collection.array is not None and collection.array.ndim == 3
        return 1 if gray else 3
    return None
