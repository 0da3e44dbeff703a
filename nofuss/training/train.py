"""`nofuss train`, from the data to the report; api.py has the same for Python.

The whole story is `run_training` and `fill_run`; every step returns a value, and only the loop's
state is mutable.
"""

import logging
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from functools import partial
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
from nofuss.data.split import FEWEST_CLASSES, Rows, Split, classes_in, split_of
from nofuss.data.triplets import held_out
from nofuss.distributed import processes
from nofuss.distributed.device import device_of
from nofuss.errors import DataError, RunError, TrainingError, UsageError
from nofuss.files import digest, tensor_parts, write_file
from nofuss.geometry import normalize
from nofuss.losses.proxy_loss import ProxyLoss
from nofuss.model.backbones import Backbone
from nofuss.model.embedder import Embedder, for_inference, through_head
from nofuss.model.encoder import Encoded, Encoder, check_finite
from nofuss.model.features import features_of
from nofuss.model.lora import merge_adapters
from nofuss.model.manifest import clear
from nofuss.model.onnx import cache_graph
from nofuss.model.saved import new_model
from nofuss.progress import Progress
from nofuss.report import read_optional_json, write_report
from nofuss.report.card import write_card
from nofuss.run.directory import FROM_PYTHON, Run, continue_run, create_run, note_fingerprint
from nofuss.run.proxies import RunEmbeddings, RunProxies, sample_by_class
from nofuss.search.search import RERANK
from nofuss.search.update import index_trained
from nofuss.search.verdict import STRANGERS
from nofuss.training.callbacks import (
    Callback,
    Callbacks,
    TensorBoard,
    flat_numbers,
    stop_on_signals,
)
from nofuss.training.criterion import check_loss
from nofuss.training.feed import class_count
from nofuss.training.finetune import Fit, labels_of, train_network
from nofuss.training.head import fit_head
from nofuss.training.loop import Control, NonFiniteLoss
from nofuss.training.network import apply_settings, build_model
from nofuss.training.score import (
    Embedded,
    method_of,
    query_and_gallery,
    score,
    search_rules,
)
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
    options = _completed(options, collection)
    with ExitStack() as held:  # the lock, from before the run is read until all of it is written
        saved = _saved_settings(options, held)
        callbacks = Callbacks(callback, _board(options))
        if saved is not None and _is_finished(saved):
            return _say_finished(saved, options, collection, callbacks.progress)
        opened = _open(options, saved, collection, callbacks.progress)
        asked = saved or options
        data = training_data(opened, asked)
        preset, whole = preset_of(asked, data), data.collection
        embedder = build_model(asked, preset, whole, side=data.side, backbone=backbone)
        if saved is None:
            settings = resolve(options, data, embedder.backbone)
        else:
            settings = agree(saved, options, embedder.backbone.features)
        split = split_of(data, settings)
        apply_settings(settings, embedder)
        _check(settings, data, split, embedder)
        run = _open_run(settings, opened, held, callbacks.progress, is_resumed=saved is not None)
        callbacks.run = run.path
        if backbone is not None:
            _check_module(run, backbone)
        log.info(f"run directory {run.path}, settings: {settings.preset}")
        with _failures_explained(run), closing(callbacks):
            callbacks.here("start", to_json(settings))
            x, data, split, scan = look_at_all(
                embedder, opened, data, split, settings, asked, callbacks.progress
            )
            _describe(run, data, split, scan)
            fill_run(run, embedder, x, data, split, callbacks, resume=saved is not None)
        return run.path


def fill_run(
    run: Run,
    embedder: Embedder,
    x: Tensor | None,
    data: TrainingData,
    split: Split,
    callbacks: Callbacks,
    *,
    resume: bool,
) -> None:
    """Fit, score, save and report: all that a run holds beside its settings."""
    settings, whole, progress = run.config, data.collection, callbacks.progress
    with stop_on_signals() as stop, _batch_explained(run, data, split):
        control = Control(
            callbacks,
            stop,
            run.checkpoints,
            resume=resume,
            metrics=run.write_metrics,
            device=device_of(embedder),
        )
        is_solved = settings.start == "whitened" and whole.is_labelled
        learn = fit_fixed if settings.is_fixed and is_solved else train_network
        fit = learn(embedder, x, data, split, settings, control)
        if processes.any_true(stop())[0]:  # nothing may have been trained that could stop
            raise KeyboardInterrupt
    features, raw = embed_all(fit, x, data, settings, progress)
    if not processes.leave():  # scores and files need one process; the others are done
        return
    embedded, shown = embed_split(fit, raw, data, split, settings)
    rules = search_rules(fit, embedded.val, data, split, settings, progress=progress)
    chosen = {STRANGERS: rules.strangers, RERANK: rules.rerank and rules.rerank.as_dict()}
    about: dict[str, Any] = {
        "class_names": _class_names(data, split.train),
        "extra": {name: rule for name, rule in chosen.items() if rule is not None},
    }
    with new_model(run.model, fit.embedder, **about) as model:  # in force at the end of the block
        encoder = Encoder(fit.embedder, digest=model, **about)
        found = Encoded(normalize(raw), normalize(features))
        index_trained(run, encoder, whole, found, sides(split, whole), progress=progress)
        shown.kept.save(run.path, model)
    clear(run.index, model)
    cache_graph(fit.embedder, progress=progress)
    scores = score(fit, embedded, x, data, split, settings, rules, progress=progress)
    _write_scores(run, fit, settings, scores)
    write_card(run)
    write_report(run.path, whole, shown, progress=progress)
    callbacks.here("end", flat_numbers(scores))


# The steps


def look_at_all(
    embedder: Embedder,
    opened: Collection,
    data: TrainingData,
    split: Split,
    settings: Settings,
    asked: Options | Settings,
    progress: Progress,
) -> tuple[Tensor | None, TrainingData, Split, ScanReport]:
    """Decode every picture once; return the features of those that can be read, and their split.

    opened: the data with their own labels. asked: by what `data` were made of them.
    """
    features = partial(compute_features, embedder, progress=progress)
    x, scan = features(opened, data, split, settings)
    say_problems(scan)
    found = scan
    while (usable := readable(opened, found)) is not opened:
        opened, data = usable, training_data(usable, asked)
        split = split_of(data, settings)
        _check(settings, data, split, embedder)
        if x is not None and split.by_folds:  # no feature depends on the split
            return x[found.readable], data, split, scan
        x, found = features(opened, data, split, settings)  # most are in the cache
    return x, data, split, scan


def compute_features(
    embedder: Embedder,
    opened: Collection,
    data: TrainingData,
    split: Split,
    settings: Settings,
    *,
    progress: Progress,
) -> tuple[Tensor | None, ScanReport]:
    """Return the features (N, F) that training starts from, and which pictures can't be read.

    Where training starts at random there are none, and a scan finds what can't be read. The rows of
    unreadable pictures have no meaning.

    Averages with mirror images are for search. Statistics of the training classes change as little
    by them as any average over hundreds of pictures (docs/lab).
    """
    whole, backbone = data.collection, embedder.backbone
    if not settings.is_fixed and settings.start == "random":
        with processes.in_turn():
            return None, scan_pictures(opened, progress=progress)
    if backbone.mirror:
        which = "pictures" if split.by_folds else "pictures that are scored"
        log.debug(f"{which} are averaged with their mirror images; --no-mirror is faster")
    straight = None if split.by_folds else split.train
    compared = held_out(data.comparisons, split.test, len(whole))
    if straight is not None and compared is not None:  # a triplet may hold training items
        straight = np.setdiff1d(straight, compared.rows)
    found = features_of(
        for_inference(embedder).backbone,
        whole,
        straight=straight,
        skip_unreadable=True,
        num_workers=settings.num_workers,
        progress=progress,
    )
    return found.values, report_on(opened, found.unreadable)


def fit_fixed(
    embedder: Embedder,
    x: Tensor | None,
    data: TrainingData,
    split: Split,
    settings: Settings,
    control: Control,
) -> Fit:
    """Fit the head to fixed features x (N, F) of the training classes."""
    assert x is not None
    labels = labels_of(data.collection.subset(split.train))
    head = fit_head(x[split.train], labels, settings, control=control)
    for line in head.choice.describe():
        log.debug(line)
    embedder.set_head(head.head, root=head.choice.recipe.root)
    return Fit(embedder, head.criterion, head)


def embed_all(
    fit: Fit,
    x: Tensor | None,
    data: TrainingData,
    settings: Settings,
    progress: Progress,
) -> tuple[Tensor, Tensor]:
    """Return features (N, F) and embeddings (N, D) of all items; several processes share them.

    Of any length.
    """
    merge_adapters(fit.embedder)
    if not settings.is_fixed:
        backbone = for_inference(fit.embedder).backbone
        x = features_of(backbone, data.collection, cached=False, progress=progress).values
    assert x is not None
    raw = through_head(fit.embedder, fit.embedder.to_head(x))
    check_finite(raw)
    return x, raw


def embed_split(
    fit: Fit, raw: Tensor, data: TrainingData, split: Split, settings: Settings
) -> tuple[Embedded, RunEmbeddings]:
    """Return the embeddings that scores are of, and those that the report shows.

    raw: embeddings (N, D) of all items.
    """
    whole, unit = data.collection, normalize(raw)
    is_watched = not settings.is_fixed and len(split.val) and whole.has_classes
    comparisons = held_out(data.comparisons, split.test, len(whole))
    compared = None if comparisons is None else raw[comparisons.rows]
    labels = whole.subset(split.train).labels
    few = sample_by_class(labels, seed=settings.seed)
    rows = split.train[few]
    own = torch.from_numpy(labels[few]) if whole.is_labelled else None
    proxies, assignment, scale = _proxies(fit.criterion, raw[rows], own)
    kept = RunProxies(proxies.numpy(), rows, assignment.numpy(), scale)
    shown = np.arange(len(whole)) if split.by_folds else split.test
    test = unit[shown]
    embeddings = RunEmbeddings(test.numpy(), shown, unit[rows].numpy(), kept, split.by_folds)
    val = unit[split.val] if is_watched else None
    return Embedded(test, val, compared, comparisons), embeddings


def sides(split: Split, collection: Collection) -> list[str | None]:
    """Return what each item was used for, as the index says it."""
    found: list[str | None] = [None] * len(collection)
    for name in ("train", "val", "test"):
        for row in getattr(split, name).tolist():
            found[row] = name
    if collection.split is not None:
        for row in split.test.tolist():
            if (word := str(collection.split[row])) in (QUERY, GALLERY):
                found[row] = word
    return found


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


def _saved_settings(options: Options, held: ExitStack) -> Settings | None:
    """Return the settings of the run to resume, which is locked from now on; None for a new one."""
    if not options.resume:
        return None
    if options.out is None:
        raise UsageError("--resume needs the run to resume; add --out RUN")
    run = held.enter_context(Run.open(options.out, write=True))
    return replace(agree(run.config, options), out=options.out)


def _board(options: Options) -> TensorBoard | None:
    return None if options.tensorboard is None else TensorBoard(options.tensorboard)


def _open(
    options: Options, saved: Settings | None, collection: Collection | None, progress: Progress
) -> Collection:
    """Open the data as the settings say."""
    source = (saved or options).data if collection is None else collection
    corrections = options.corrections
    if saved is not None and saved.out is not None:  # the run's own copy
        run = Run(saved.out, saved)
        corrections = run.corrections
        if collection is None and str(source).endswith(FROM_PYTHON):
            raise DataError(
                f"the data of {saved.out} were given from Python; give them again: "
                f"{run.resume_command}"
            )
    labelling = labelling_of(saved or options)
    with processes.in_turn():
        opened = open_corrected(
            source, labelling=labelling, corrections=corrections, progress=progress
        )
    check_used(opened, labelling)
    return opened


def _check(settings: Settings, data: TrainingData, split: Split, embedder: Embedder) -> None:
    """Refuse before a run directory exists what training or scoring would refuse later."""
    collection = data.collection
    if len(split.test) and collection.has_classes:
        query_and_gallery(collection.subset(split.test))
    classes = max(2, class_count(collection.subset(split.train)))
    check_loss(settings, classes, head_dim(settings, embedder.backbone.features))
    processes.check_same("kinds of device", lambda: device_of(embedder).type)
    processes.check_same("data", lambda: data.fingerprint)


def _open_run(
    settings: Settings,
    opened: Collection,
    held: ExitStack,
    progress: Progress,
    *,
    is_resumed: bool,
) -> Run:
    """Return the run to resume, or a new one; of several processes the first makes it."""
    if is_resumed:
        return _continue(settings, opened, progress)
    new = partial(create_run, name=opened.name, held=held)
    path = Path(processes.from_first(lambda: str(new(settings).path)))
    return Run(path, replace(settings, out=path))


def _continue(settings: Settings, opened: Collection, progress: Progress) -> Run:
    """Return the run to resume; RunError where its data are others."""

    def fingerprint() -> str:
        """Return that of what can be read: the cache knows most of it."""
        with processes.in_turn():
            report = scan_pictures(opened, progress=progress)
        return readable(opened, report).fingerprint()

    return continue_run(settings, fingerprint=fingerprint)


def _check_module(run: Run, backbone: Backbone) -> None:
    """Refuse to resume with a module that has other weights than the run started from.

    They are what training is compared with; a module that was trained in place has lost them.
    """
    weights = digest(*tensor_parts(backbone.network.state_dict()))
    started = read_optional_json(run.path / "backbone.json").get("digest", weights)
    if started != weights:
        raise RunError(
            f"the backbone differs from the one {run.path} was started with; give the module as it "
            "was before training, or train into another --out"
        )
    run.write("backbone.json", {"digest": weights})


def _is_finished(settings: Settings) -> bool:
    """Return whether all of the run is written: the report is the last of it."""
    return settings.out is not None and (settings.out / "report.html").is_file()


def _say_finished(
    saved: Settings, options: Options, collection: Collection | None, progress: Progress
) -> Path:
    """Say that a run is finished, or raise RunError where its data have changed since."""
    assert saved.out is not None
    try:
        _continue(saved, _open(options, saved, collection, progress), progress)
    except DataError:
        if options.data is not None:
            raise  # else they are gone, and were needed for nothing
    log.info(f"{saved.out} is finished; nothing is left to do")
    return saved.out


def _describe(run: Run, data: TrainingData, split: Split, scan: ScanReport) -> None:
    """Write data.json, and scan.csv if the scan found anything; say what is kept out."""
    c, settings = data.collection, run.config
    note_fingerprint(run, data.fingerprint)
    parts = {"train": split.train, "val": split.val, "test": split.test}
    described = {
        "description": c.describe(),
        "items": {name: len(rows) for name, rows in parts.items() if len(rows)},
        "classes": {name: _class_names(data, rows) for name, rows in parts.items() if len(rows)},
    }
    run.write("data.json", described | ({"by_links": True} if c.by_links else {}))
    if scan.problems and processes.first():
        write_file(run.path / "scan.csv", scan.as_csv())
    for note in data.notes:
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


def _class_names(data: TrainingData, rows: Rows) -> list[str]:
    return [data.collection.class_names[i] for i in classes_in(data.collection, rows)]


def _write_scores(run: Run, fit: Fit, settings: Settings, scores: dict[str, Any]) -> None:
    """Write choice.json, and scores.json with the name of the method that was kept."""
    by_class, method = scores.pop("by_class", None), method_of(fit, settings)
    chosen = {} if fit.head is None else {"choice": fit.head.choice.as_dict()}
    run.write("choice.json", {"kept": method, **chosen, "by_class": by_class, "scores": scores})
    if scores:
        run.write("scores.json", scores | {"method": method})


@contextmanager
def _failures_explained(run: Run) -> Iterator[None]:
    """Say how to resume whatever ends a training that has a run directory."""
    try:
        yield
    except KeyboardInterrupt:
        log.info(f"stopped; resume with: {run.resume_command}")
        raise
    except PictureError as error:  # it was readable when training began
        raise TrainingError(
            f"{error}; restore it, then resume with: {run.resume_command}"
        ) from None
    except (OSError, SafetensorError) as error:  # a full or failing disk
        reason = " ".join(str(error).split())
        raise TrainingError(f"{reason}; fix it, then resume with: {run.resume_command}") from error


@contextmanager
def _batch_explained(run: Run, data: TrainingData, split: Split) -> Iterator[None]:
    """Write the names of a batch's items whose loss is not finite, and suggest what to try."""
    try:
        yield
    except NonFiniteLoss as error:
        file = run.path / "non_finite_batch.txt"
        names = [data.collection.names[split.train[i]] for i in error.indices.tolist()]
        where = f"the batch's items are in {file}"
        try:
            if processes.first():
                write_file(file, "".join(f"{name}\n" for name in names))
        except OSError as failure:
            where = f"the batch's items could not be written ({failure.strerror})"
        saved = ", the last checkpoint is whole" if run.checkpoints.is_dir() else ""
        raise TrainingError(
            f"{error}; nothing was updated{saved}; {where}; try lower rates, or a lower scale"
        ) from None
