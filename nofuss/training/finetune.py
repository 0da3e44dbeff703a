"""Training a network: the presets finetune, small and paper, and a head from other starts.

Fine-tuning begins with the closed form of the network's features as its head, trains the last
stages (on cached activations of those before) or all of it, and ends with the closed form of the
features that have come out: training leaves the head where it fits the training classes best, and
the closed form fits new classes better (docs/lab). Held-out training classes say whether all of it
helped; if not, the network from before training is kept. The presets small and paper start at
random and keep the head as it was trained.
"""

import copy
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor, nn

from nofuss.config import Settings
from nofuss.data.collection import Collection, compact_labels
from nofuss.data.open import TrainingData
from nofuss.data.split import Split
from nofuss.data.triplets import HeldOut, held_out
from nofuss.distributed import processes
from nofuss.distributed.device import device_of
from nofuss.evaluate.intervals import paired_difference
from nofuss.evaluate.protocol import QueryScores, scorable
from nofuss.geometry import normalize
from nofuss.losses.proxy_loss import ProxyLoss
from nofuss.model.activations import activations_of, embedding_of, top_features
from nofuss.model.embedder import Embedder, embed_features, for_inference
from nofuss.model.features import features_of
from nofuss.model.stages import Top, fixed_count
from nofuss.model.whitening import pca, signed_root, takes_roots
from nofuss.progress import Progress, silent
from nofuss.run.choice import Choice
from nofuss.training.callbacks import Control
from nofuss.training.criterion import build_criterion, place_proxies
from nofuss.training.feed import Batches, class_count
from nofuss.training.folds import query_scores
from nofuss.training.head import HeadFit, fit_head
from nofuss.training.loop import Training, resume_or_begin
from nofuss.training.settings import head_dim

log = logging.getLogger("nofuss")
TRAINED_SHRINKAGE = 0.7
"""Least shrinkage after training: the stages have narrowed the training classes, so what is left of
their scatter says less of how new classes vary than it did at the start."""


@dataclass(frozen=True, eq=False)
class Task:
    """What is learned from and scored on, and how: the same for every step from here on."""

    data: TrainingData
    split: Split
    settings: Settings

    @property
    def whole(self) -> Collection:
        """All items."""
        return self.data.collection

    @cached_property
    def items(self) -> Collection:
        """The items that are trained on."""
        return self.whole.subset(self.split.train)

    @property
    def labels(self) -> Tensor:
        """Their labels (N,), 0…C−1 without gaps."""
        return labels_of(self.items)

    @cached_property
    def compared(self) -> HeldOut | None:
        """The triplets or pairs that are scored."""
        return held_out(self.data.comparisons, self.split.test, len(self.whole))


@dataclass(frozen=True)
class Fit:
    """What training made."""

    embedder: Embedder
    criterion: nn.Module
    head: HeadFit | None = None
    """How the head was chosen: the one that is kept, or that fine-tuning began with."""
    fell_back: bool = False
    """Whether the network from before training is kept, since held-out classes lost by it."""


def fit_fixed(task: Task, embedder: Embedder, x: Tensor | None, control: Control) -> Fit:
    """Fit the head to fixed features x (N, F) of the training classes."""
    assert x is not None
    fit = fit_head(x[task.split.train], task.labels, task.settings, control=control)
    embedder.set_head(fit.head, root=fit.choice.recipe.root)
    return Fit(embedder, fit.criterion, fit)


def train_network(task: Task, embedder: Embedder, x: Tensor | None, control: Control) -> Fit:
    """Train the embedder in place; x (N, F): features it starts from, None for random weights."""
    settings, progress = task.settings, control.progress
    features = None if x is None else x[task.split.train]
    head = None
    if settings.start == "whitened" and task.whole.is_labelled:
        assert features is not None
        head = fit_head(features, task.labels, settings, control=control)
        set_head(embedder, head, features)
    training, feed = prepare(settings, embedder, task.items, features, progress=progress)
    fit = Fit(embedder, training.criterion, head)
    val = task.whole.subset(task.split.val)
    is_watched = scorable(val.known_labels())
    # Groups may be fragments of classes, which pushes their items apart: few links can do harm.
    can_harm = settings.start != "random" or not task.whole.has_classes
    is_compared = is_watched and can_harm and bool(settings.epochs)
    before = copy.deepcopy((embedder, training.criterion)) if is_compared else None
    fixed_stages = fixed_count(embedder.backbone, settings.unfreeze)
    embed = embedding_of(val, embedder, fixed_stages, progress=progress)

    def look(trained: Embedder) -> QueryScores:
        return query_scores(embed(trained), torch.from_numpy(val.labels))

    def validate() -> dict[str, float]:
        return {"held_out_recall@1": float(look(embedder).recall.mean())}

    resume_or_begin(
        training,
        feed,
        control,
        validate=validate if is_watched else None,
        before_epoch=lambda epoch: embedder.freeze_backbone(epoch < settings.warmup),
    )
    if head is not None and settings.epochs:
        _solve_again(fit, head.choice, task, progress)
    if before is not None:
        return _better(fit, before, look)
    if not is_watched and settings.epochs and settings.preset == "finetune":
        log.info("no held-out classes say whether training helped; what it gave is kept")
    return fit


def prepare(
    settings: Settings,
    embedder: Embedder,
    data: Collection,
    features: Tensor | None,
    *,
    progress: Progress = silent,
) -> tuple[Training, Batches]:
    """Connect embedder, criterion, optimizer and batches of all items of `data`.

    features: (N, F) that the head and the proxies start from; None where they start at random. A
    head of the start "pca" is set here. Stages that are not trained have their activations cached.
    """
    preprocessing, directions, activations = embedder.backbone.preprocessing, None, None
    model: nn.Module = embedder
    if settings.start != "random":
        assert features is not None
        x = embedder.to_head(features)
        if settings.start == "pca":
            # The mean of features that are hardly ever negative is left where it is.
            start = pca(x, head_dim(settings, x.shape[1]), center=not takes_roots(x))
            embedder.set_head(start, root=embedder.root)
        directions = normalize(embed_features(embedder, features))
    criterion = build_criterion(settings, class_count(data), embedder.dim)
    if directions is not None:
        labels = torch.from_numpy(data.known_labels()) if data.is_labelled else None
        place_proxies(criterion, directions, labels, seed=settings.seed)
    if settings.is_fixed:
        assert features is not None
        vectors = embedder.to_head(features).numpy()
        data, preprocessing, model = replace(data, array=vectors, paths=()), None, embedder.head
    elif fixed_stages := fixed_count(embedder.backbone, settings.unfreeze):
        model = Top(embedder, fixed_stages)
        activations = activations_of(
            embedder,
            fixed_stages,
            data,
            views=settings.views,
            augmented=True,
            seed=settings.seed,
            progress=progress,
        )
    device = device_of(embedder)
    training = Training.of(
        settings,
        model,
        criterion.to(device),
        backbone=() if settings.is_fixed else embedder.backbone_parameters(),
        head=embedder.head.parameters(),
    )
    pin = device.type == "cuda"
    return training, Batches(data, preprocessing, settings, activations, pin=pin)


def set_head(embedder: Embedder, fit: HeadFit, features: Tensor) -> None:
    """Set a network's head: its rates are meant for embeddings as long as its features."""
    root = fit.choice.recipe.root
    length = float((signed_root(features) if root else features).norm(dim=1).mean())
    embedder.set_head(fit.head.times(length), root=root)


def labels_of(items: Collection) -> Tensor:
    """Return the labels (N,) of items, 0…C−1 without gaps."""
    return torch.from_numpy(compact_labels(np.asarray(items.labels))[0])


def after_training(choice: Choice) -> Choice:
    """Return the choice for the features of the trained network."""
    shrinkage = max(choice.recipe.shrinkage, TRAINED_SHRINKAGE)
    return replace(choice, recipe=replace(choice.recipe, shrinkage=shrinkage))


def _solve_again(fit: Fit, choice: Choice, task: Task, progress: Progress) -> None:
    """Replace head and proxies by the closed form of what the trained network gives."""
    embedder, criterion = fit.embedder, fit.criterion
    features = _features(embedder, task.items, task.settings, progress)
    trained = embed_features(embedder, features)
    solved = fit_head(features, task.labels, task.settings, decided=after_training(choice))
    set_head(embedder, solved, features)
    if not isinstance(criterion, ProxyLoss):
        return
    # Each proxy moves to the mean direction of the items that it stood for.
    criterion.cpu()
    own, directions = criterion.assign(trained, task.labels), solved.embed(features)
    # One that stands for no item is nowhere in particular: in the middle of all.
    middle = directions.mean(0).expand(criterion.assignment.num_proxies, -1)
    sums = torch.zeros_like(middle).index_add_(0, own, directions)
    moved = normalize(torch.where(sums.any(1, keepdim=True), sums, middle))
    held = moved if criterion.shard is None else moved[criterion.shard.rows]
    criterion.proxies = nn.Parameter(held.contiguous())


def _features(
    embedder: Embedder, items: Collection, settings: Settings, progress: Progress
) -> Tensor:
    """Return the features (N, F) of the centre crops, as the network gives them now."""
    rows, fixed_stages = np.arange(len(items)), fixed_count(embedder.backbone, settings.unfreeze)
    if not fixed_stages:
        backbone, workers = for_inference(embedder).backbone, settings.num_workers
        backbone.mirror = False
        return features_of(backbone, items, num_workers=workers, progress=progress).values
    own = items.subset(rows[processes.share(len(items))])
    cached = activations_of(
        embedder, fixed_stages, own, views=1, augmented=False, progress=progress
    )
    features = top_features(embedder, fixed_stages, cached, progress=progress)
    return processes.gather_rows(features, len(items))


def _better(
    fit: Fit, before: tuple[Embedder, nn.Module], look: Callable[[Embedder], QueryScores]
) -> Fit:
    """Return what scored higher on held-out classes, with the embedder's weights as they were."""
    embedder, criterion = before
    old, new = look(embedder), look(fit.embedder)
    gain = paired_difference(new.objective, old.objective, new.labels)
    log.info(
        f"{len(torch.unique(new.labels))} held-out training classes: Recall@1 "
        f"{old.recall.mean():.3f} before and {new.recall.mean():.3f} after training, MAP@R "
        f"{old.map_at_r.mean():.3f} and {new.map_at_r.mean():.3f}"
    )
    (fell_back,) = processes.any_true(bool(gain.mean < 0))  # rounding may differ by machine
    if not fell_back:
        return fit
    log.warning("training lowered their mean, so the run keeps the network from before training")
    fit.embedder.load_state_dict(embedder.state_dict())
    return Fit(fit.embedder, criterion, fit.head, fell_back=True)
