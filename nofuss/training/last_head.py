"""The head of a fine-tuned network: its closed form again, on the features that it gives now.

Training moves the head together with the last stages, and leaves it where it fits the training
classes best. The closed form of the features that have come out of it fits new classes better, in
few dimensions much better (LOG.md). So a head is trained in `DIM` dimensions, however few are asked
for, and solved again at the end in as many as are asked for.
"""

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from nofuss.data.collection import Collection, compact_labels
from nofuss.geometry import normalize
from nofuss.model.features import backbone_features
from nofuss.model.inference import through_head
from nofuss.model.trunk import activations_of, top_features
from nofuss.terminal import console
from nofuss.training.choice import start_of
from nofuss.training.closed_form import ClosedForm
from nofuss.training.job import Job
from nofuss.training.prepare import class_count
from nofuss.training.presets import DIM
from nofuss.training.setup import build_criterion, place_proxies


def widen_head(job: Job) -> None:
    """Give the embedder the same start in the dimensions that it is trained in."""
    assert job.choice is not None
    assert job.features is not None
    width = min(DIM, job.embedder.backbone.features)
    if job.choice.dim < width:
        _solve(job, job.features[job.sides.train], width)


def solve_head(job: Job) -> None:
    """Replace head and proxies by the closed form of what the trained network gives."""
    assert job.choice is not None
    data = job.collection.subset(job.sides.train)
    with console.busy("the head again, in closed form"):
        features = _features(job, data)
        _solve(job, features, job.choice.dim)
        place_criterion(job, features)


def place_criterion(job: Job, features: Tensor) -> None:
    """Give the job a loss whose proxies lie where the head puts the training classes."""
    data = job.collection.subset(job.sides.train)
    criterion = build_criterion(replace(job.config, dim=job.embedder.dim), class_count(data))
    directions = normalize(through_head(job.embedder, job.embedder.to_head(features)))
    place_proxies(criterion, directions, _labels(data), seed=job.config.seed)
    job.criterion = criterion


def _solve(job: Job, features: Tensor, dim: int) -> None:
    """Set the head to the closed form of features (N, F), by the recipe that folds have chosen."""
    assert job.choice is not None
    labels, root = _labels(job.collection.subset(job.sides.train)), job.choice.recipe.root
    form = ClosedForm(features, labels, (), dim=dim)
    length = float(form.inputs(root).norm(dim=1).mean())  # as at the start: see `learning`
    job.embedder.set_head(start_of(form, replace(job.choice, dim=dim)).times(length), root=root)


def _features(job: Job, data: Collection) -> Tensor:
    """Return the features (N, F) of the centre crops, as the network gives them now."""
    if not job.fixed_stages:
        rows = np.arange(len(data))
        return backbone_features(job.embedder, data, straight=rows, workers=job.config.workers)
    kept = activations_of(job.embedder, job.fixed_stages, data, views=1, augmented=False)
    return top_features(job.embedder, job.fixed_stages, kept)


def _labels(data: Collection) -> Tensor:
    return torch.from_numpy(compact_labels(np.asarray(data.labels))[0])
