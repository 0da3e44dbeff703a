"""`nofuss train`, from the data to the report; api.py has the same for Python.

The story is `run_training`; frozen values pass between its steps, only the loop has a state.
"""

import logging
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from nofuss.config import Options, Settings, to_json
from nofuss.data.collection import GALLERY, QUERY, Collection
from nofuss.data.decode import PictureError
from nofuss.data.open import (
    TrainingData,
    open_corrected,
    readable,
    say_problems,
    training_data,
)
from nofuss.data.readers.folder import check_used, labelling_of
from nofuss.data.scan import ScanReport, report_on, scan_pictures
from nofuss.data.split import FEWEST_CLASSES, Rows, classes_in, split_of
from nofuss.distributed import processes
from nofuss.distributed.device import device_of
from nofuss.errors import DataError, TrainingError, UsageError, one_line
from nofuss.files import write_file
from nofuss.geometry import normalize
from nofuss.losses.proxy_loss import ProxyLoss
from nofuss.model.backbones import LICENCES, Backbone, licences
from nofuss.model.embedder import Embedder, embed_features, for_inference
from nofuss.model.encoder import Encoded, Encoder
from nofuss.model.features import features_of, network_features
from nofuss.model.lora import merge_adapters
from nofuss.model.manifest import clear
from nofuss.model.onnx import cache_graph
from nofuss.model.saved import new_model
from nofuss.progress import Progress
from nofuss.report import write_report
from nofuss.report.card import write_card
from nofuss.run.choice import Networks
from nofuss.run.directory import FROM_PYTHON, Run, continue_run, create_run, note_fingerprint
from nofuss.run.proxies import RunEmbeddings, RunProxies, sample_by_class
from nofuss.search.search import RERANK
from nofuss.search.update import index_trained
from nofuss.search.verdict import UNKNOWN
from nofuss.training.callbacks import (
    Callback,
    Control,
    TensorBoard,
    flat_numbers,
    stop_on_signals,
)
from nofuss.training.choose_networks import choose_networks
from nofuss.training.criterion import check_loss
from nofuss.training.feed import class_count
from nofuss.training.finetune import Fit, Task, fit_fixed, train_network
from nofuss.training.network import apply_settings, build_model
from nofuss.training.score import check_queries_and_gallery, method_of, score, search_rules
from nofuss.training.settings import FREE, agree, head_dim, preset_of, resolve

log = logging.getLogger("nofuss")


def run_training(
    options: Options,
    collection: Collection | None = None,
    *,
    backbone: Backbone | None = None,
    callback: Callback | None = None,
) -> Path:
    """Train, score on unseen classes, write a run directory and return its path.

    collection: data from Python instead of a path. backbone: a module from there, not a name.
    callback: is called with an `Event` after every step and epoch, and while slow work goes on.
    """
    options, board = _completed(options, collection), None
    with ExitStack() as held:  # the lock, from before the run is read until all of it is written
        if options.tensorboard is not None:
            board = held.enter_context(closing(TensorBoard(options.tensorboard)))
        progress = Control(callback, board).progress
        saved = _saved_run(options, held)
        if saved is not None and (saved.path / "report.html").is_file():  # the last of it
            if options.data is not None:  # have they moved?
                opened = _open(saved.config, saved, collection, progress)
                found = readable(opened, scan_pictures(opened, progress=progress))
                continue_run(saved.config, fingerprint=found.fingerprint)
            log.info(f"{saved.path} is finished; nothing is left to do")
            return saved.path
        asked = options if saved is None else saved.config
        opened = _open(asked, saved, collection, progress)
        data = training_data(opened, asked)
        preset = preset_of(asked, data)
        embedder = build_model(asked, preset, data.collection, side=data.side, backbone=backbone)
        settings = resolve(options, data, embedder.backbone) if saved is None else saved.config
        apply_settings(settings, embedder)
        task = _task(data, settings, embedder)
        run = _new_run(settings, opened.name, held) if saved is None else saved
        control = Control(_noting(run), callback, board, run=run, device=device_of(embedder))
        log.info(f"run directory {run.path}, settings: {settings.preset}")
        with _failures_explained(run):
            control.tell("start", to_json(run.config))
            features, task, scan = look_at_all(task, opened, embedder, control.progress)
            if saved is not None:  # RunError where the data are others
                run = continue_run(run.config, fingerprint=lambda: task.data.fingerprint)
            _describe(run, task, scan)
            embedder, x, networks = choose_networks(task, embedder, features, control.progress)
            with stop_on_signals() as control.stop:
                is_solved = settings.start == "whitened" and task.whole.is_labelled
                learn = fit_fixed if settings.is_fixed and is_solved else train_network
                fit = learn(task, embedder, x, control)
                if processes.any_true(control.stop())[0]:  # nothing may have been trained
                    raise KeyboardInterrupt
            now, raw = embed_all(task, fit, x, control.progress)
            if processes.leave():  # scores and files need one process; the others are done
                finish(run, task, fit, x, now, raw, networks, control)
        return run.path


def finish(
    run: Run,
    task: Task,
    fit: Fit,
    x: Tensor | None,
    features: Tensor,
    raw: Tensor,
    networks: Networks | None,
    control: Control,
) -> None:
    """Save model and index, score, and write the report.

    x: features (N, F) that training started from. features, raw: those of the trained network, and
    embeddings (N, D) of any length, of all items. networks: how they were chosen among several.
    """
    progress, vectors = control.progress, normalize(raw)
    rules, shown = search_rules(task, fit, vectors, progress=progress), to_show(task, fit, raw)
    chosen = {UNKNOWN: rules.unknown, RERANK: rules.rerank and to_json(rules.rerank)}
    chosen[LICENCES] = licences(fit.embedder.backbone) if task.settings.weights is None else None
    about: dict[str, Any] = {
        "class_names": _class_names(task, task.split.train),
        "extra": {name: value for name, value in chosen.items() if value},
    }
    with new_model(run.model, fit.embedder, **about) as model:  # in force at the end of the block
        encoder = Encoder(fit.embedder, digest=model, **about)
        found = Encoded(vectors, normalize(features))
        index_trained(run, encoder, task.whole, found, splits(task), progress=progress)
        shown.proxies.save(run.path, model)
    clear(run.index, model)
    cache_graph(fit.embedder, progress=progress)
    scores = score(task, fit, vectors, x, rules, progress=progress)
    by_class, method = scores.pop("by_class", None), method_of(fit, task.settings)
    head = {} if fit.head is None else {"choice": to_json(fit.head.choice)}
    if networks is not None:
        head["networks"] = asdict(networks)
    run.write("choice.json", {"kept": method, **head, "by_class": by_class, "scores": scores})
    if scores:
        run.write("scores.json", scores | {"method": method})
    write_card(run)
    write_report(run.path, task.whole, shown, progress=progress)
    control.tell("end", flat_numbers(scores))


# The steps


def look_at_all(
    task: Task, opened: Collection, embedder: Embedder, progress: Progress
) -> tuple[list[Tensor], Task, ScanReport]:
    """Decode every picture once; return the features of those that can be read, and their task.

    opened: the data with their own labels.
    """
    found, scan = compute_features(task, opened, embedder, progress)
    say_problems(scan)
    if (usable := readable(opened, scan)) is opened:
        return found, task, scan
    data = replace(training_data(usable, task.settings), notes=task.data.notes)
    task = _task(data, task.settings, embedder)
    return [x[scan.readable] for x in found], task, scan


def compute_features(
    task: Task, opened: Collection, embedder: Embedder, progress: Progress
) -> tuple[list[Tensor], ScanReport]:
    """Return each network's features (N, F) to start from, and which pictures can't be read.

    Where training starts at random there are none, and a scan finds what can't be read. The rows of
    unreadable pictures have no meaning.
    """
    settings = task.settings
    if not settings.is_fixed and settings.start == "random":
        with processes.in_turn():
            return [], scan_pictures(opened, progress=progress)
    found = [
        network_features(
            network,
            task.whole,
            skip_unreadable=True,
            num_workers=settings.num_workers,
            progress=progress,
        )
        for network in for_inference(embedder).backbone.parts
    ]
    unreadable = {row: error for each in found for row, error in each.unreadable.items()}
    return [each.values for each in found], report_on(opened, unreadable)


def embed_all(task: Task, fit: Fit, x: Tensor | None, progress: Progress) -> tuple[Tensor, Tensor]:
    """Return features (N, F) and embeddings (N, D) of all items; several processes share them.

    Of any length.
    """
    merge_adapters(fit.embedder)
    if not task.settings.is_fixed:
        backbone = for_inference(fit.embedder).backbone
        workers = task.settings.num_workers
        found = features_of(
            backbone, task.whole, cached=False, num_workers=workers, progress=progress
        )
        x = found.values
    assert x is not None
    raw = embed_features(fit.embedder, x)
    return x, raw


def to_show(task: Task, fit: Fit, raw: Tensor) -> RunEmbeddings:
    """Return what the report shows: test items, a sample of the training items, and proxies.

    raw: embeddings (N, D) of all items.
    """
    split, labels = task.split, task.items.labels
    few = sample_by_class(labels, seed=task.settings.seed)
    rows = split.train[few]
    own = torch.from_numpy(labels[few]) if task.whole.is_labelled else None
    directions, assignment, scale = _proxies(fit.criterion, raw[rows], own)
    proxies = RunProxies(directions.numpy(), rows, assignment.numpy(), scale)
    shown = np.arange(len(task.whole)) if split.by_folds else split.test
    vectors, sample = (normalize(raw[each]).numpy() for each in (shown, rows))
    return RunEmbeddings(vectors, shown, sample, proxies, split.by_folds)


def _proxies(
    criterion: nn.Module, sample: Tensor, labels: Tensor | None
) -> tuple[Tensor, Tensor, float | None]:
    """Return unit proxies, the row among them of each item of the sample, and the scale."""
    if not isinstance(criterion, ProxyLoss):
        return sample[:0], torch.empty(0, dtype=torch.int64), None
    criterion.cpu()  # training is over
    proxies = normalize(criterion.proxies.detach())
    # As in training: with free norms the closest proxy is that of the raw vectors.
    assignment = criterion.assign(sample, labels)
    if criterion.shard is not None:  # no process holds them all: those of the sample
        chosen, assignment = torch.unique(assignment, return_inverse=True)
        proxies = criterion.shard.take(proxies, chosen)
    return proxies, assignment, None if criterion.scale is None else float(criterion.scale)


def splits(task: Task) -> list[str | None]:
    """Return what each item was used for, as the index says it."""
    found: list[str | None] = [None] * len(task.whole)
    for name in ("train", "val", "test"):
        for row in getattr(task.split, name).tolist():
            word = "" if task.whole.split is None else str(task.whole.split[row])
            found[row] = word if name == "test" and word in (QUERY, GALLERY) else name
    return found


# The run directory


def _completed(options: Options, collection: Collection | None) -> Options:
    """Return the options with what they do not say: data from Python, restarts of torchrun."""
    if collection is not None:
        options = replace(options, data=Path(f"{collection.name}{FROM_PYTHON}"))
    for name in ("corrections", "weights"):
        if (path := getattr(options, name)) is not None:
            options = replace(options, **{name: path.absolute()})
    if processes.may_restart():  # torchrun would repeat the command after a failure
        if options.out is None:
            raise UsageError("--max-restarts needs the run to resume; add --out RUN")
        exists = (options.out / "config.json").is_file()
        options = replace(options, resume=options.resume or exists)
        if exists and processes.restarted():  # its flags are those of the run, repeated
            free = {name: getattr(options, name) for name in FREE}
            options = Options(**free, resume=True)
    return options


def _saved_run(options: Options, held: ExitStack) -> Run | None:
    """Return the run to resume, which is locked from now on; None for a new one."""
    if not options.resume:
        return None
    if options.out is None:
        raise UsageError("--resume needs the run to resume; add --out RUN")
    run = held.enter_context(Run.open(options.out, write=True))
    return Run(run.path, replace(agree(run.config, options), out=run.path))


def _new_run(settings: Settings, name: str, held: ExitStack) -> Run:
    """Make a run directory; of several processes the first does."""
    path = processes.from_first(lambda: str(create_run(settings, name=name, held=held).path))
    return Run(Path(path), replace(settings, out=Path(path)))


def _noting(run: Run) -> Callback:
    return lambda event: run.note_epoch(event.values) if event.kind == "epoch" else None


def _open(
    asked: Options | Settings, saved: Run | None, collection: Collection | None, progress: Progress
) -> Collection:
    """Open the data as the settings say; a run has its own copy of the corrections."""
    if saved is not None and collection is None and str(asked.data).endswith(FROM_PYTHON):
        raise DataError(
            f"the data of {saved.path} were given from Python; give them again: "
            f"{saved.resume_command}"
        )
    corrections = asked.corrections if saved is None else saved.corrections
    labelling, source = labelling_of(asked), asked.data if collection is None else collection
    with processes.in_turn():
        opened = open_corrected(
            source, labelling=labelling, corrections=corrections, progress=progress
        )
    check_used(opened, labelling)
    return opened


def _task(data: TrainingData, settings: Settings, embedder: Embedder) -> Task:
    """Split the data; refuse before a run exists what training or scoring would refuse later."""
    task = Task(data, split_of(data, settings), settings)
    if len(task.split.test) and task.whole.has_classes:
        check_queries_and_gallery(task.whole.subset(task.split.test))
    classes = max(2, class_count(task.items))
    check_loss(settings, classes, head_dim(settings, embedder.backbone.features))
    processes.check_same("kinds of device", lambda: device_of(embedder).type)
    processes.check_same("data", lambda: data.fingerprint)
    return task


def _describe(run: Run, task: Task, scan: ScanReport) -> None:
    """Write data.json, and scan.csv if the scan found anything; say what is kept out."""
    c, split, settings = task.whole, task.split, task.settings
    note_fingerprint(run, task.data.fingerprint)
    parts = {"train": split.train, "val": split.val, "test": split.test}
    described = {
        "description": c.describe(),
        "items": {name: len(rows) for name, rows in parts.items() if len(rows)},
        "classes": {name: _class_names(task, rows) for name, rows in parts.items() if len(rows)},
    }
    run.write("data.json", described | ({"by_links": True} if c.by_links else {}))
    if scan.problems and processes.first():
        write_file(run.path / "scan.csv", scan.as_csv())
    for note in task.data.notes:
        log.info(note)
    if c.split is not None or settings.test_fraction is not None:
        return
    if len(split.test):
        out = len(classes_in(c, split.test))
        log.info(f"{out:,} classes are kept out for the scores; --test-fraction 0 learns from all")
    elif not split.by_folds and c.num_classes < FEWEST_CLASSES:
        log.info(
            f"training learns from all {c.num_classes} classes, and there are no scores: these "
            f"need {FEWEST_CLASSES} classes"
        )


def _class_names(task: Task, rows: Rows) -> list[str]:
    return [task.whole.class_names[i] for i in classes_in(task.whole, rows)]


@contextmanager
def _failures_explained(run: Run) -> Iterator[None]:
    """Say how to resume whatever ends a training that has a run directory."""
    try:
        yield
    except KeyboardInterrupt:
        log.info(f"stopped; resume with: {run.resume_command}")
        raise
    except (PictureError, OSError, SafetensorError) as error:  # gone, or a full or failing disk
        reason = one_line(error)
        raise TrainingError(f"{reason}; fix it, then resume with: {run.resume_command}") from error
