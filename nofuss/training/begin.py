"""Begin a training: open the data, build the model, check all settings, then make the run.

What can be refused is refused here, before a run directory exists.
"""

import logging
from collections.abc import Container
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

from nofuss.config import TrainConfig
from nofuss.data.collection import Collection
from nofuss.data.open import TrainingData, open_training_data
from nofuss.data.split import FEWEST_CLASSES, Split, classes_in, split_of
from nofuss.data.triplets import held_out
from nofuss.distributed import processes
from nofuss.distributed.device import device_of
from nofuss.errors import DataError, RunError, UsageError, command
from nofuss.files import digest, tensor_parts
from nofuss.model.backbones import Backbone
from nofuss.model.embedder import Embedder
from nofuss.progress import Progress
from nofuss.report import read_optional_json
from nofuss.run.directory import FROM_PYTHON, Run, continue_run, create_run, resume_run
from nofuss.training.callbacks import Callback, Callbacks, TensorBoard
from nofuss.training.job import (
    Job,
    build_model,
    check_dim,
    check_stages,
    settle,
)
from nofuss.training.prepare import class_count
from nofuss.training.presets import head_dim
from nofuss.training.scoring import query_and_gallery
from nofuss.training.setup import check_loss

log = logging.getLogger("nofuss")
MODULE = "backbone.json"


def begin(
    config: TrainConfig,
    data: Collection | None,
    *,
    given: Container[str],
    backbone: Backbone | None,
    callback: Callback | None,
    held: ExitStack,
) -> Job:
    """Return the job, with a run directory that describes its settings and data.

    held: gets the lock of the run.
    """
    config = _settings(config, data, given)
    if config.resume:
        assert config.out is not None
        held.enter_context(Run.open(config.out, write=True))
        _check_taught(config.out)
    board = None if config.tensorboard is None else TensorBoard(config.tensorboard)
    callbacks = Callbacks(callback, board)
    opened = _open(config, data, callbacks.progress)
    collection, fingerprint = opened.collection, opened.fingerprint
    config = settle(config, opened)
    split = split_of(opened, config)
    if len(split.test) and collection.has_classes:  # refused here, not after training
        query_and_gallery(collection.subset(split.test))
    embedder = build_model(config, collection, backbone)
    config = check_stages(check_dim(config, embedder.backbone.features), embedder)
    processes.check_same("kinds of device", lambda: device_of(embedder).type)
    _check_loss(config, collection.subset(split.train), embedder)
    processes.check_same("data", lambda: fingerprint)
    run = _open_run(config, collection, fingerprint, held)
    if backbone is not None:
        _check_module(run, backbone)
    log.info(f"run directory {run.path}, settings: {config.preset}")
    _say_kept_out(config, collection, split)
    scored = held_out(opened.comparisons, split.test, len(collection))
    callbacks.run = run.path
    return Job(
        run, collection, split, embedder, callbacks, fingerprint, opened.scan, compared=scored
    )


def _settings(config: TrainConfig, data: Collection | None, given: Container[str]) -> TrainConfig:
    """Return the configuration, of a resumed run its own."""
    if data is not None:
        config = replace(config, data=Path(f"{data.name}{FROM_PYTHON}"))
    if config.corrections is not None:
        config = replace(config, corrections=config.corrections.absolute())
    if processes.may_restart():  # torchrun would repeat the command after a failure
        if config.out is None:
            raise UsageError("--max-restarts needs the run to resume; add --out RUN")
        exists = (config.out / "config.json").is_file()
        config = replace(config, resume=config.resume or exists)
    if not config.resume:
        return config
    resumed = resume_run(config, explicit=given, restarted=processes.restarted())
    if resumed.tensorboard is not None and config.tensorboard is None:
        # The run may be a stranger's, and the folder anywhere.
        log.info(f"to continue the curves, add {command('--tensorboard', resumed.tensorboard)}")
        resumed = replace(resumed, tensorboard=None)
    return resumed


def _open(config: TrainConfig, data: Collection | None, progress: Progress) -> TrainingData:
    """Open the data as the settings say; refuse what nothing can be learned from."""
    if data is None and str(config.data).endswith(FROM_PYTHON) and config.out is not None:
        cure = Run(config.out, config).resume_command
        raise DataError(f"the data of {config.out} were given from Python; give them again: {cure}")
    corrections = config.corrections
    if config.resume and config.out is not None:  # the run's own copy
        corrections = Run(config.out, config).corrections
    with processes.in_turn():
        source = config.data if data is None else data
        opened = open_training_data(source, config, corrections=corrections, progress=progress)
    for note in opened.notes:
        log.info(note)
    return opened


def _check_loss(config: TrainConfig, data: Collection, embedder: Embedder) -> None:
    dim = head_dim(config, embedder.backbone.features)
    check_loss(replace(config, dim=dim), max(2, class_count(data)))


def _open_run(
    config: TrainConfig, collection: Collection, fingerprint: str, held: ExitStack
) -> Run:
    """Return the run to resume, or a new one; of several processes the first makes it."""
    if config.resume:
        return continue_run(config, fingerprint=fingerprint)
    new = partial(create_run, name=collection.name, fingerprint=fingerprint, held=held)
    path = processes.from_first(lambda: str(new(config).path))
    return Run(Path(path), replace(config, out=Path(path)))


def _check_taught(run: Path) -> None:
    """Refuse to resume a run whose model has learned from marks since: it would be replaced."""
    extra = read_optional_json(run / "model" / "model.json").get("extra")
    if isinstance(extra, dict) and "taught" in extra:
        raise RunError(
            f"the model of {run} has learned from marks on the page, which resuming would undo; "
            "undo the lessons on the page, or train into another --out"
        )


def _check_module(run: Run, backbone: Backbone) -> None:
    """Refuse to resume with a module that has other weights than the run started from.

    They are what training is compared with; those of the module may be half trained by now.
    """
    weights = digest(*tensor_parts(backbone.network.state_dict()))
    started = read_optional_json(run.path / MODULE).get("digest", weights)
    if started != weights:
        raise RunError(
            f"the backbone differs from the one {run.path} was started with; give the module as it "
            "was before training, or train into another --out"
        )
    run.write(MODULE, {"digest": weights})


def _say_kept_out(config: TrainConfig, collection: Collection, split: Split) -> None:
    if collection.split is not None or config.test_fraction is not None:
        return
    if len(split.test):
        out = len(classes_in(collection, split.test))
        log.info(f"{out:,} classes are kept out for the scores; --test-fraction 0 learns from all")
    elif not split.by_folds and collection.num_classes < FEWEST_CLASSES:
        log.info(
            f"training learns from all {collection.num_classes} classes, and there are no scores: "
            f"these need {FEWEST_CLASSES} classes"
        )
