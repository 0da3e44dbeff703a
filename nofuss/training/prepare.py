"""Wire a training: criterion, proxies at their places, optimizer and batches, from plain parts.

The commands, the estimator and the paper's experiments all come through here.
"""

from dataclasses import replace

import torch
from torch import Tensor, nn

from nofuss.config import Preprocessing, TrainConfig
from nofuss.data.collection import Collection
from nofuss.distributed.device import device_of
from nofuss.geometry import normalize
from nofuss.model.activations import activations_of
from nofuss.model.embedder import Embedder, through_head
from nofuss.model.stages import Top
from nofuss.model.start import pca_head
from nofuss.progress import Progress, silent
from nofuss.training.feed import ActivationFeed, CollectionFeed
from nofuss.training.loop import Feed, Training
from nofuss.training.presets import head_dim
from nofuss.training.setup import batch_of, build_criterion, build_training, place_proxies


def class_count(data: Collection) -> int:
    """Return how many classes the proxies stand for; without labels, a fifth of the items."""
    return data.num_classes or max(2, min(1000, len(data) // 5))


def prepare(
    config: TrainConfig,
    data: Collection,
    features: Tensor | None,
    *,
    embedder: Embedder,
    fixed_stages: int = 0,
    progress: Progress = silent,
) -> tuple[Training, Feed]:
    """Prepare an embedder for training on all items of `data`; its head may get its start here.

    features: (N, F), of a backbone that stays fixed, or of the one that training starts from.
        None with `--start random`. fixed_stages: of the backbone, whose activations are kept.
    """
    fixed, preprocessing = config.preset in ("frozen", "vectors"), embedder.backbone.preprocessing
    directions = None
    if config.start != "random":
        assert features is not None
        x = embedder.to_head(features)
        if config.start == "pca":
            start = pca_head(x, head_dim(config, x.shape[1]), center=bool(config.center))
            embedder.set_head(start, root=embedder.root)
        directions = normalize(through_head(embedder, x))
    config = replace(config, dim=embedder.dim)
    if fixed:
        assert features is not None
        vectors = embedder.to_head(features).numpy()
        data = replace(data, kind="vectors", array=vectors, paths=())
    if not fixed_stages:
        return wire(config, embedder, data, None if fixed else preprocessing, directions)
    training, feed = wire(config, Top(embedder, fixed_stages), data, preprocessing, directions)
    activations = activations_of(
        embedder,
        fixed_stages,
        data,
        views=int(config.views or 1),
        augmented=True,
        seed=config.seed,
        progress=progress,
    )
    return training, ActivationFeed(feed, activations)


def wire(
    config: TrainConfig,
    model: nn.Module,
    data: Collection,
    preprocessing: Preprocessing | None,
    directions: Tensor | None,
) -> tuple[Training, CollectionFeed]:
    """Connect model, criterion, optimizer and batches.

    directions: (N, D) unit vectors of the items, where proxies start from them.
    """
    classes = class_count(data)
    criterion = build_criterion(config, classes)
    if directions is not None:
        labels = torch.from_numpy(data.known_labels()) if data.is_labelled else None
        place_proxies(criterion, directions, labels, seed=config.seed)
    if not data.is_labelled:
        config = replace(config, per_class=0)
    feed = CollectionFeed(
        data,
        preprocessing,
        batch_of(config, len(data), classes),
        per_class=int(config.per_class or 0),
        seed=config.seed,
        num_workers=config.num_workers,
        pin=device_of(model).type == "cuda",
    )
    return build_training(config, model, criterion), feed
