"""Run a whole training: data → model → training → scores → report.

Other modules do the work; this one puts it in order and reports to the user.
"""

import shlex
from collections.abc import Container
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError

from nofuss.config import TrainConfig
from nofuss.data.collection import Collection, compact_labels
from nofuss.data.comparisons import without_groups
from nofuss.data.decode import PictureError
from nofuss.data.labelling import check_used, labelling_of
from nofuss.data.scan import ScanReport
from nofuss.data.split import by_folds, classes_in, sides_of
from nofuss.data.usable import check_supervision, open_usable
from nofuss.distributed import processes
from nofuss.distributed.device import device_of
from nofuss.errors import TrainingError, UsageError
from nofuss.evaluate.strangers import ENOUGH_CLASSES, ENOUGH_IN_FOLD, ENOUGH_ITEMS
from nofuss.files.atomic import write_file
from nofuss.files.lock import RunLock, check_in_place
from nofuss.geometry import normalize
from nofuss.losses.proxy_loss import ProxyLoss
from nofuss.model.backbones import Backbone
from nofuss.model.encoder import Encoder
from nofuss.model.lora import merge_adapters
from nofuss.model.saved import save_model
from nofuss.report import write_report
from nofuss.report.card import write_card
from nofuss.report.order import held_out_comparisons
from nofuss.run.directory import Run, continue_run, create_run, resume_run
from nofuss.run.embeddings import RunEmbeddings, sample_by_class
from nofuss.run.events import Callback
from nofuss.terminal import console
from nofuss.terminal.interrupt import stop_on_signals
from nofuss.training.comparisons import learnable
from nofuss.training.finding import decide_search
from nofuss.training.job import (
    Job,
    build_model,
    check_dim,
    check_stages,
    describe_sides,
    settle,
)
from nofuss.training.learning import compute_features, learn
from nofuss.training.listeners import Listeners
from nofuss.training.loop import Interrupted
from nofuss.training.prepare import class_count
from nofuss.training.presets import head_dim
from nofuss.training.scoring import embed_rows, score
from nofuss.training.setup import check_loss
from nofuss.training.step import NonFiniteLoss


def run_training(
    config: TrainConfig,
    collection: Collection | None = None,
    *,
    given: Container[str] = (),
    backbone: Backbone | None = None,
    callback: Callback | None = None,
) -> Path:
    """Train, score on unseen classes, write a run directory and return its path.

    given: names of settings that the user set; a resumed run must agree with them.
    backbone: a module from Python instead of a backbone by name.
    callback: is called with an `Event` after every step and epoch.
    """
    with RunLock() as lock:  # from before the run is read until all of it is written
        return _train_locked(config, collection, given, lock, backbone, callback)


def _train_locked(
    config: TrainConfig,
    collection: Collection | None,
    given: Container[str],
    lock: RunLock,
    backbone: Backbone | None,
    callback: Callback | None,
) -> Path:
    if collection is not None:
        config = replace(config, data=Path(f"{collection.name} (given from Python)"))
    if config.corrections is not None:
        config = replace(config, corrections=config.corrections.absolute())
    config = _come_back(config)
    if config.force and not config.resume:
        raise UsageError("--force is for resuming a run; add --resume, or leave it out")
    if config.resume:
        config = resume_run(config, explicit=given, restarted=processes.restarted())
        assert config.out is not None
        lock.take(config.out)
    listeners = Listeners(config, callback)
    corrections = config.corrections
    if config.resume and config.out is not None:  # the run's own copy
        corrections = Run(config.out, config).corrections
    with processes.in_turn():
        labelling, data = labelling_of(config), collection or config.data
        collection, scan = open_usable(data, labelling=labelling, corrections=corrections)
        check_used(collection, labelling)
    check_supervision(collection)
    config = settle(config, collection)
    fingerprint = collection.fingerprint()
    given_data, collection = collection, learnable(collection, config)
    sides = sides_of(given_data, config)
    embedder = build_model(config, collection, backbone)
    config = check_stages(check_dim(config, embedder.backbone.features), embedder)
    processes.check_same("kinds of device", lambda: device_of(embedder).type)
    dim = head_dim(config, embedder.backbone.features)
    check_loss(replace(config, dim=dim), max(2, class_count(collection.subset(sides.train))))
    processes.check_same("data", lambda: fingerprint)
    if config.resume:
        run = continue_run(config, fingerprint=fingerprint, show=_show_differences)
    else:
        new = partial(create_run, name=collection.name, fingerprint=fingerprint, lock=lock)
        path = processes.on_first(lambda: str(new(config).path))
        run = Run(Path(path), replace(config, out=Path(path)))
    console.say(f"run directory {run.path}, settings: {config.preset}")
    if collection.split is None and config.test_share is None and len(sides.test):
        out = len(classes_in(collection, sides.test))
        console.say(f"{out:,} classes are kept out for the scores; --test-share 0 learns from all")
    job = Job(run, collection, sides, embedder, listeners)
    job.compared = held_out_comparisons(given_data, config, sides.test)
    try:
        with listeners:
            _train(job, scan, fingerprint)
        return run.path
    except NonFiniteLoss as error:
        raise _explain_non_finite(job, error) from None
    except (KeyboardInterrupt, Interrupted):
        console.say(f"stopped; resume with: {run.resume_command}")
        raise KeyboardInterrupt from None
    except PictureError as error:  # it was readable when training began
        raise TrainingError(
            f"{error}; restore it, then resume with: {run.resume_command}"
        ) from None
    except (OSError, SafetensorError) as error:  # a full or failing disk
        check_in_place(run.path)
        reason = " ".join(str(error).split())
        raise TrainingError(f"{reason}; fix it, then resume with: {run.resume_command}") from error


def _come_back(config: TrainConfig) -> TrainConfig:
    """Resume the run if it exists and torchrun may restart the processes."""
    if not processes.may_restart():
        return config
    if config.out is None:
        raise UsageError("--max-restarts needs the run to resume; add --out RUN")
    return replace(config, resume=config.resume or (config.out / "config.json").is_file())


def _train(job: Job, scan: ScanReport, fingerprint: str) -> None:
    """Train, save the model, score it, write the report."""
    run, collection, sides = job.run, job.collection, job.sides
    run.write("data.json", describe_sides(job))
    if scan.problems and processes.first():
        write_file(run.path / "scan.csv", scan.as_csv())
    job.listeners.start(run)
    compute_features(job)
    with stop_on_signals(console.warn) as stop:
        learn(job, stop)
    merge_adapters(job.embedder)
    names = [collection.class_names[i] for i in classes_in(collection, sides.train)]
    _calibrate(job)
    for_search = {"strangers": job.strangers, "rerank": job.reranking}
    extra = {name: found.as_dict() for name, found in for_search.items() if found}
    if processes.first():
        save_model(run.model, job.embedder, class_names=names, extra=extra)
    kept = _embed_sides(job, fingerprint)
    if processes.first():
        kept.save(run.path)
    scores = score(job, torch.from_numpy(kept.test))
    if processes.first():
        with processes.alone():
            write_card(run)
            with console.busy("writing the report"):
                report = write_report(run.path, without_groups(job.collection), kept)
            console.say(f"report: {report}")
            console.say(f"look at it: nofuss serve {shlex.quote(str(run.path))}")
            job.listeners.end(run, scores, kept, without_groups(job.collection))


def _calibrate(job: Job) -> None:
    """Decide on held-out training classes how to search; on fixed features the folds have."""
    if job.collection.by_links:  # two groups may be of one class, so no distance tells them apart
        job.strangers = job.reranking = None
        console.say('search will not say "nothing like this": that needs labels')
        return
    if not job.fixed and len(job.sides.held_out):
        held_out = job.collection.subset(job.sides.held_out)
        assert held_out.labels is not None
        encoder = Encoder(job.embedder)
        found, labels = encoder.embed_collection(held_out), torch.from_numpy(held_out.labels)
        job.strangers, job.reranking = decide_search([found], [labels], job.config)
    if job.reranking is not None:
        console.say(job.reranking.describe())
    if job.strangers is not None:
        console.say(job.strangers.describe())
    elif job.collection.labels is not None:
        rows = job.sides.train if job.fixed else job.sides.held_out
        classes = len(classes_in(job.collection, rows))
        console.say(
            f'search will not say "nothing like this": that needs {ENOUGH_ITEMS} items of '
            f"{ENOUGH_CLASSES} held-out classes, {ENOUGH_IN_FOLD} in a fold; of {classes} classes "
            f"with {len(rows)} items too few could be compared"
            + ("" if job.fixed else "; raise --holdout")
        )


def _embed_sides(job: Job, fingerprint: str) -> RunEmbeddings:
    """Return unit embeddings of the test items and a sample of the training items, and proxies."""
    assert job.learned is not None
    labels = None
    if job.collection.labels is not None:
        labels = compact_labels(job.collection.labels[job.learned])[0]
    few = sample_by_class(labels, len(job.learned), seed=job.config.seed)
    folded = by_folds(job.config, job.collection)
    shown = np.arange(len(job.collection)) if folded else job.sides.test
    rows = np.r_[shown, job.learned[few]]
    raw = embed_rows(job, rows)
    unit = normalize(raw)
    test, sample = unit[: len(shown)], unit[len(shown) :]
    proxies, assignment, scale = sample[:0], torch.empty(0, dtype=torch.int64), None
    if isinstance(job.criterion, ProxyLoss):
        job.criterion.cpu()  # training is over
        proxies = normalize(job.criterion.proxies.detach())
        own = None if labels is None else torch.from_numpy(labels[few])
        # As in training: with free norms the closest proxy is that of the raw vectors.
        assignment = job.criterion.assign(raw[len(shown) :], own)
        if job.criterion.shard is not None:  # no process holds them all: those of the sample
            chosen, assignment = torch.unique(assignment, return_inverse=True)
            proxies = job.criterion.shard.take(proxies, chosen)
        scale = None if job.criterion.scale is None else float(job.criterion.scale)
    return RunEmbeddings(
        fingerprint=fingerprint,
        test=test.numpy(),
        test_rows=shown,
        seen=folded,
        sample=sample.numpy(),
        sample_rows=job.learned[few],
        proxies=proxies.numpy(),
        assignment=assignment.numpy(),
        scale=scale,
    )


def _show_differences(rows: list[list[str]]) -> None:
    console.table("settings that differ", ["", "of the run", "now"], rows)


def _explain_non_finite(job: Job, error: NonFiniteLoss) -> TrainingError:
    """Write the names of the batch's items to a file and suggest what to try."""
    file = job.run.path / "non_finite_batch.txt"
    rows = job.sides.train if job.learned is None else job.learned
    names = [job.collection.names[rows[i]] for i in error.indices.tolist()]
    where = f"the batch's items are in {file}"
    try:
        if processes.first():
            write_file(file, "".join(f"{name}\n" for name in names))
    except OSError as failure:
        where = f"the batch's items could not be written ({failure.strerror})"
    return TrainingError(
        f"{error}; nothing was updated, the last checkpoint is whole; {where}; "
        "try lower rates, or a lower scale"
    )
