"""What training leaves in the run directory: the model, embeddings, scores, card and report."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from nofuss.data.split import classes_in
from nofuss.geometry import normalize
from nofuss.losses.proxy_loss import ProxyLoss
from nofuss.model.encoder import Encoder
from nofuss.model.lora import merge_adapters
from nofuss.model.onnx import cache_graph
from nofuss.model.saved import save_model
from nofuss.report import write_report
from nofuss.report.card import write_card
from nofuss.run.embeddings import RunEmbeddings, sample_by_class
from nofuss.training.callbacks import flat_numbers
from nofuss.training.job import Job
from nofuss.training.scoring import embed_rows, score
from nofuss.training.search_rules import settle_search


@dataclass(frozen=True)
class Embedded:
    """What the model makes of all items that scores and search need."""

    kept: RunEmbeddings
    held_out: Tensor | None
    """Unit vectors of the held-out training classes, where a network was trained."""
    compared: Tensor | None
    """Vectors of the held-out triplets or pairs."""


def embed_items(job: Job) -> Embedded:
    """Embed all that is kept or scored; several processes share the items."""
    merge_adapters(job.embedder)
    held_out = compared = None
    if not job.fixed and len(job.split.val) and not job.collection.by_links:
        data = job.collection.subset(job.split.val)
        progress = job.callbacks.progress
        held_out = Encoder(job.embedder).embed_collection(data, progress=progress)
    if job.compared is not None and job.fold_scores is None:
        compared = embed_rows(job, job.compared.rows)
    return Embedded(_embed_sides(job), held_out, compared)


def keep_model(job: Job, embedded: Embedded) -> None:
    """Write the model with what search needs to know, and the embeddings."""
    settle_search(job, embedded.held_out)
    names = job.collection.class_names
    rules = {"open_set": job.open_set, "rerank": job.reranking}
    save_model(
        job.run.model,
        job.embedder,
        class_names=[names[i] for i in classes_in(job.collection, job.split.train)],
        extra={name: found.as_dict() for name, found in rules.items() if found},
    )
    embedded.kept.save(job.run.path)
    cache_graph(job.embedder, progress=job.callbacks.progress)


def report_scores(job: Job, embedded: Embedded) -> None:
    """Score what was kept on what training has not seen, and write it down for people."""
    kept = embedded.kept
    scores = score(job, torch.from_numpy(kept.test), embedded.compared)
    run = job.run
    write_card(run)
    write_report(run.path, job.collection, kept, progress=job.callbacks.progress)
    job.callbacks.here("end", flat_numbers(scores))


def _embed_sides(job: Job) -> RunEmbeddings:
    """Return unit embeddings of the test items and a sample of the training items, and proxies."""
    learned, folded = job.split.train, job.split.by_folds
    labels = job.collection.subset(learned).labels
    few = sample_by_class(labels, seed=job.config.seed)
    shown = np.arange(len(job.collection)) if folded else job.split.test
    rows = np.r_[shown, learned[few]]
    raw = embed_rows(job, rows)
    unit = normalize(raw)
    test, sample = unit[: len(shown)], unit[len(shown) :]
    proxies, assignment, scale = sample[:0], torch.empty(0, dtype=torch.int64), None
    if isinstance(job.criterion, ProxyLoss):
        job.criterion.cpu()  # training is over
        proxies = normalize(job.criterion.proxies.detach())
        own = torch.from_numpy(labels[few]) if job.collection.is_labelled else None
        # As in training: with free norms the closest proxy is that of the raw vectors.
        assignment = job.criterion.assign(raw[len(shown) :], own)
        if job.criterion.shard is not None:  # no process holds them all: those of the sample
            chosen, assignment = torch.unique(assignment, return_inverse=True)
            proxies = job.criterion.shard.take(proxies, chosen)
        scale = None if job.criterion.scale is None else float(job.criterion.scale)
    return RunEmbeddings(
        fingerprint=job.fingerprint,
        test=test.numpy(),
        test_rows=shown,
        seen=folded,
        sample=sample.numpy(),
        sample_rows=learned[few],
        proxies=proxies.numpy(),
        assignment=assignment.numpy(),
        scale=scale,
    )
