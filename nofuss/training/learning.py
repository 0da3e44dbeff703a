"""Learn: compute features, decide on folds, run the loop."""

import copy
import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn

from nofuss.data.collection import compact_labels
from nofuss.distributed import processes
from nofuss.distributed.device import device_of
from nofuss.evaluate.intervals import paired_difference
from nofuss.evaluate.protocol import QueryScores, scorable, score_folds
from nofuss.files import read_json
from nofuss.model.activations import embedding_of
from nofuss.model.embedder import Embedder, for_inference
from nofuss.model.features import features_of
from nofuss.model.start import Affine
from nofuss.progress import working
from nofuss.ranking.rerank import rerank_folds
from nofuss.report import read_optional_json
from nofuss.run.choice import CLOSED, TRAINED, Choice
from nofuss.training.callbacks import Kind
from nofuss.training.checkpoint import load_checkpoint
from nofuss.training.checks import check_before_training
from nofuss.training.choice import choice_of, start_of, untrained_choice
from nofuss.training.closed_form import ClosedForm, Pinned
from nofuss.training.fold_results import (
    FoldResult,
    held_out_embeddings,
    run_folds,
    untrained_folds,
)
from nofuss.training.folds import query_scores
from nofuss.training.head import composed, prepare_head
from nofuss.training.job import Job
from nofuss.training.last_head import solve_head
from nofuss.training.loop import Feed, Training, run_loop
from nofuss.training.prepare import prepare
from nofuss.training.search_rules import decide_search, read_search

log = logging.getLogger("nofuss")
CHOICE = "choice.json"


def compute_features(job: Job) -> None:
    """Compute the features that training starts from: the backbone's, or the vectors themselves."""
    if job.preprocessing is None:
        job.features = torch.from_numpy(np.array(job.collection.array, dtype=np.float32))
        return
    if job.fixed or job.config.start != "random":
        # Averages with mirror images are for search. Statistics of the training classes change as
        # little by them as any average over hundreds of pictures (LOG.md).
        is_scored = job.split.by_folds
        if job.embedder.backbone.mirror:
            which = "pictures" if is_scored else "pictures that are scored"
            log.info(f"{which} are averaged with their mirror images; --no-mirror is faster")
        straight = None if is_scored else job.split.train
        if straight is not None and job.compared is not None:  # a triplet may hold training items
            straight = np.setdiff1d(straight, job.compared.rows)
        job.features = features_of(
            for_inference(job.embedder).backbone,
            job.collection,
            straight=straight,
            num_workers=job.config.num_workers,
            progress=job.callbacks.progress,
        ).values


def learn(job: Job, stop: Callable[[], bool]) -> None:
    """Train the embedder of the job in place."""
    if job.config.start == "whitened" and job.collection.is_labelled:
        form, start = _closed_form(job, stop)
        if job.fixed:
            _learn_head(job, form, start, stop)
            return
    _learn_network(job, stop)


def _closed_form(job: Job, stop: Callable[[], bool]) -> tuple[ClosedForm, Affine]:
    """Decide on folds, and set the head to the start that they chose."""
    config, rows = job.config, job.split.train
    assert job.features is not None
    labels = torch.from_numpy(compact_labels(job.collection.labels[rows])[0])
    form = ClosedForm.of(config, job.features[rows], labels)
    found = _decided_before(job) if config.resume else None
    if found is None:
        found = json.loads(processes.from_first(lambda: json.dumps(_decide(job, form, stop))))
        job.run.write(CHOICE, found)
    choice = job.choice = Choice.from_dict(found["choice"])
    job.open_set, job.reranking = read_search(found)
    job.fold_scores = found["scores"]
    for line in choice.describe():
        log.info(line)
    if job.fixed and choice.kept == CLOSED and not choice.folds and config.epochs != 0:
        log.info("not trained: too few classes to say whether that helps; --folds 0 trains")
    with working(job.callbacks.progress, "fitting the head to all items"):
        start = start_of(form, choice)
    # A network's rates are meant for embeddings as long as its features.
    length = 1.0 if job.fixed else float(form.inputs(choice.recipe.root).norm(dim=1).mean())
    job.embedder.set_head(start.times(length), root=choice.recipe.root)
    return form, start


def _decide(job: Job, form: ClosedForm, stop: Callable[[], bool]) -> dict[str, Any]:
    """Return what choice.json holds: choice, search settings and scores of held-out classes."""
    config, labels = job.config, form.labels
    results: list[FoldResult] = []
    if config.untrained:
        found = untrained_folds(form)
        choice = untrained_choice(form)
    else:
        pinned = Pinned.of(config)
        results = _try_on_folds(job, form, pinned, stop)
        found = held_out_embeddings(results)
        asked = config if job.fixed else replace(config, epochs=0)  # the network trains later
        choice = choice_of(form, results, pinned, config=asked)
    own = [labels[fold.held_out] for fold in form.folds]
    progress = job.callbacks.progress
    open_set, rerank = decide_search(found, own, config, progress=progress)
    scores, by_class = None, None
    if found and job.split.by_folds:
        columns = {f"untrained features, {form.features.shape[1]}-d": form.held_out_features()}
        if results and choice.kept == TRAINED:
            columns["closed form"] = [result.embeddings[CLOSED] for result in results]
        scores = score_folds(found, columns, own, seed=config.seed, progress=progress)
        if rerank and rerank.by_fold:  # weightings chosen on the classes of other folds
            scores["reranked"] = rerank_folds(found, own, rerank.by_fold)
        by_class = scores.pop("by_class")
    return {
        "choice": choice.as_dict(),
        "open_set": open_set and open_set.as_dict(),
        "rerank": rerank and rerank.as_dict(),
        "scores": scores,
        "by_class": by_class,
    }


def _try_on_folds(
    job: Job, form: ClosedForm, pinned: Pinned, stop: Callable[[], bool]
) -> list[FoldResult]:
    """Compare closed forms, then train a head from the best one (a network would take too long)."""
    if not form.folds:
        return []
    progress = job.callbacks.progress
    with working(progress, "choosing where the head starts, on folds of the classes"):
        form.compare(pinned)
    config = job.config if job.fixed else replace(job.config, epochs=0)
    device = device_of(job.embedder)
    return run_folds(form, config, device=device, progress=progress, stop=stop)


def _decided_before(job: Job) -> dict[str, Any] | None:
    """Return what the folds of this run decided before it was interrupted, if anything."""

    def read() -> str:
        try:
            return json.dumps(read_json(job.run.path / CHOICE))
        except (OSError, ValueError):  # missing or damaged
            return "{}"

    found: dict[str, Any] = json.loads(processes.from_first(read))
    try:
        Choice.from_dict(found["choice"])
        read_search(found)
        return found if isinstance(found["scores"], dict | None) else None
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError):
        return None


def _learn_head(job: Job, form: ClosedForm, start: Affine, stop: Callable[[], bool]) -> None:
    """Train a head on fixed features from its closed form, if the folds say that it helps."""
    assert job.choice is not None
    inputs = start(form.inputs(job.choice.recipe.root))
    config = replace(job.config, dim=job.choice.dim)
    training, feed = prepare_head(config, inputs, form.labels, device=device_of(job.embedder))
    job.criterion = training.criterion  # its proxies stand at the class means until it is trained
    if job.choice.kept != TRAINED:
        return
    _begin(job, training, feed)
    _run(job, training, feed, stop)
    job.embedder.set_head(composed(training.model, start), root=job.choice.recipe.root)


def _learn_network(job: Job, stop: Callable[[], bool]) -> None:
    """Train backbone and head, or a head from another start than the closed form."""
    split = job.split
    held_out = job.collection.subset(split.val)
    watched = scorable(held_out.known_labels())
    solved = job.choice is not None and bool(job.config.epochs)
    # Groups may be fragments of classes, which pushes their items apart: few links can do harm.
    can_harm = job.config.start != "random" or job.collection.by_links
    compared = watched and can_harm and bool(job.config.epochs)
    training, feed = prepare(
        job.config,
        job.collection.subset(split.train),
        None if job.features is None else job.features[split.train],
        embedder=job.embedder,
        fixed_stages=job.fixed_stages,
        progress=job.callbacks.progress,
    )
    job.criterion = training.criterion
    before = copy.deepcopy((job.embedder, job.criterion)) if compared else None
    embed_held_out = embedding_of(
        held_out, job.embedder, job.fixed_stages, progress=job.callbacks.progress
    )

    def look(embedder: Embedder) -> QueryScores:
        labels = torch.from_numpy(held_out.labels)
        return query_scores(embed_held_out(embedder), labels)

    def validate() -> dict[str, float]:
        return {"held_out_recall@1": float(look(job.embedder).recall.mean())}

    _begin(job, training, feed)
    _run(job, training, feed, stop, validate=validate if watched else None)
    if solved:
        solve_head(job)
    if before is not None:
        _keep_the_better(job, before, look)
    elif not watched and job.config.epochs and job.config.preset == "finetune":
        log.info("no held-out classes say whether training helped; what it gave is kept")


def _keep_the_better(
    job: Job, before: tuple[Embedder, nn.Module | None], look: Callable[[Embedder], QueryScores]
) -> None:
    """Restore embedder and proxies from before training if that scored higher on held-out ones."""
    old, new = look(before[0]), look(job.embedder)
    gain = paired_difference(new.objective, old.objective, new.labels)
    classes = len(torch.unique(new.labels))
    log.info(
        f"{classes} held-out training classes: Recall@1 {old.recall.mean():.3f} before and "
        f"{new.recall.mean():.3f} after training, MAP@R {old.map_at_r.mean():.3f} and "
        f"{new.map_at_r.mean():.3f}"
    )
    (job.fell_back,) = processes.any_true(bool(gain.mean < 0))  # rounding may differ by machine
    job.run.write(CHOICE, read_optional_json(job.run.path / CHOICE) | {"fell_back": job.fell_back})
    if job.fell_back:
        job.embedder.load_state_dict(before[0].state_dict())
        job.criterion = before[1]
        log.warning(
            "training lowered their mean, so the run keeps the network from before training"
        )


def _begin(job: Job, t: Training, feed: Feed) -> None:
    """Restore the run's checkpoint, or check on one batch that training can work."""
    if job.config.resume:
        checkpoint = load_checkpoint(job.run.checkpoints, sharded=t.sharded)
        if checkpoint is None:
            log.warning("no intact checkpoint to resume from; training starts from the beginning")
            return
        t.restore(checkpoint)
        job.callbacks.step, job.callbacks.epoch = t.epoch * len(feed) + t.step, t.epoch
        job.run.write_metrics(t.history)
        log.info(f"resuming at epoch {t.epoch + 1}, step {t.step + 1}")
    elif t.epochs:
        job.embedder.freeze_backbone(bool(job.config.warmup))
        with working(job.callbacks.progress, "checking that the loss falls on one batch"):
            first = next(iter(feed(0, 0)))
            check_before_training(t.model, t.criterion, t.optimizer, first)


def _run(
    job: Job,
    training: Training,
    feed: Feed,
    stop: Callable[[], bool],
    *,
    validate: Callable[[], dict[str, float]] | None = None,
) -> None:
    """Run the loop; write metrics.jsonl and tell everybody who listens."""
    config, callbacks = job.config, job.callbacks
    total, epochs = training.epochs * len(feed), training.epochs
    what = f"training, {epochs} epoch{'' if epochs == 1 else 's'}"

    def tell(kind: Kind, step: int, epoch: int, values: Mapping[str, Any]) -> None:
        if kind == "epoch":
            job.run.write_metrics(training.history)
        callbacks.tell(kind, step, epoch, values)
        if kind == "epoch" or step < total:  # the last step ends with its epoch
            callbacks.progress(what, step, total)

    callbacks.progress(what, callbacks.step, total)
    run_loop(
        training,
        feed,
        tell=tell,
        validate=validate,
        before_epoch=lambda epoch: job.embedder.freeze_backbone(epoch < (config.warmup or 0)),
        checkpoints=job.run.checkpoints,
        stop=stop,
    )
