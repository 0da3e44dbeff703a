"""The head of a fine-tuned network: its closed form again, on the features that it gives now.

Training moves the head together with the last stages, and leaves it where it fits the training
classes best. The closed form of the features that have come out of it fits new classes better
(LOG.md), so it replaces the trained head at the end, in as many dimensions.
"""

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

from nofuss.data.collection import Collection, compact_labels
from nofuss.distributed import processes
from nofuss.geometry import normalize
from nofuss.losses.proxy_loss import ProxyLoss
from nofuss.model.activations import activations_of, top_features
from nofuss.model.embedder import for_inference, through_head
from nofuss.model.features import features_of
from nofuss.run.choice import Recipe
from nofuss.training.choice import start_of
from nofuss.training.closed_form import ClosedForm
from nofuss.training.job import Job

TRAINED_SHRINKAGE = 0.85
"""Least shrinkage after training: the stages have narrowed the training classes, so what is left of
their scatter says less of how new classes vary than it did at the start."""


def solve_head(job: Job) -> None:
    """Replace head and proxies by the closed form of what the trained network gives."""
    features = _features(job, job.collection.subset(job.split.train))
    trained = _embedded(job, features)
    _solve(job, features)
    _move_proxies(job, trained, _embedded(job, features))


def after_training(recipe: Recipe) -> Recipe:
    """Return the recipe for the features of the trained network."""
    return replace(recipe, shrinkage=max(recipe.shrinkage, TRAINED_SHRINKAGE))


def _move_proxies(job: Job, before: Tensor, after: Tensor) -> None:
    """Put each proxy at the mean direction of the items that it stood for.

    before, after: (N, D) embeddings of the training items, by the trained head and by the new one.
    """
    criterion = job.criterion
    if not isinstance(criterion, ProxyLoss):
        return
    criterion.cpu()
    own = criterion.assign(before, _labels(job.collection.subset(job.split.train)))
    directions = normalize(after)
    # One that stands for no item is nowhere in particular: in the middle of all.
    middle = directions.mean(0).expand(criterion.assignment.num_proxies, -1)
    sums = torch.zeros_like(middle).index_add_(0, own, directions)
    whole = normalize(torch.where(sums.any(1, keepdim=True), sums, middle))
    held = whole if criterion.shard is None else whole[criterion.shard.rows]
    criterion.proxies = nn.Parameter(held.contiguous())


def _solve(job: Job, features: Tensor) -> None:
    """Set the head to the closed form of features (N, F), by the recipe that folds have chosen."""
    assert job.choice is not None
    choice = job.choice
    if job.config.shrinkage is None:
        choice = replace(choice, recipe=after_training(choice.recipe))
    labels, root = _labels(job.collection.subset(job.split.train)), choice.recipe.root
    form = ClosedForm(features, labels, (), dim=choice.dim)
    length = float(form.inputs(root).norm(dim=1).mean())  # as at the start: see `learning`
    job.embedder.set_head(start_of(form, choice).times(length), root=root)


def _features(job: Job, data: Collection) -> Tensor:
    """Return the features (N, F) of the centre crops, as the network gives them now."""
    rows = np.arange(len(data))
    if not job.fixed_stages:
        return features_of(
            for_inference(job.embedder).backbone,
            data,
            straight=rows,
            num_workers=job.config.num_workers,
            progress=job.callbacks.progress,
        ).values
    own, count = processes.share(len(data)), job.fixed_stages
    part, progress = data.subset(rows[own]), job.callbacks.progress
    kept = activations_of(job.embedder, count, part, views=1, augmented=False, progress=progress)
    features = torch.zeros(len(data), job.embedder.backbone.features, dtype=torch.float32)
    features[own] = top_features(job.embedder, count, kept, progress=progress)
    return processes.merge_rows(features, own)


def _embedded(job: Job, features: Tensor) -> Tensor:
    """Return what the head makes of features, (N, dim)."""
    return through_head(job.embedder, job.embedder.to_head(features))


def _labels(data: Collection) -> Tensor:
    return torch.from_numpy(compact_labels(np.asarray(data.labels))[0])
