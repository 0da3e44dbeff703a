"""The fixed stages of a network that is being fine-tuned: run once a view, their output kept."""

import copy
import logging
from collections.abc import Callable, Iterator

import numpy as np
import PIL
import torch
from torch import Tensor

from nofuss.config import Preprocessing
from nofuss.data.collection import Collection
from nofuss.data.loader import batches
from nofuss.data.sampling import Indices
from nofuss.distributed.device import device_of
from nofuss.files import Bytes, digest, tensor_parts
from nofuss.geometry import normalize
from nofuss.model.activations import Activations
from nofuss.model.backbones import OWN, Backbone
from nofuss.model.embedder import Embedder
from nofuss.model.encoder import Encoder, check_finite
from nofuss.model.features import accelerate_for, picture_keys
from nofuss.model.inference import for_inference, through_head
from nofuss.model.stages import Top, Trunk
from nofuss.progress import Progress, silent

log = logging.getLogger("nofuss")

Embed = Callable[[Embedder], Tensor]


def fixed_stages(
    embedder: Embedder,
    count: int,
    preprocessing: Preprocessing,
    *,
    pictures: int,
    progress: Progress = silent,
) -> Backbone:
    """Return a copy of the first `count` stages for inference, as a backbone of its own.

    pictures: how often it will run, which decides on the runtime.
    """
    ready = for_inference(embedder).backbone
    trunk = Backbone(
        ready.name if ready.name == OWN else f"{ready.name}, first {count} stages",
        Trunk(ready, count),
        features=0,
        channels=ready.channels,
        preprocessing=preprocessing,
    ).eval()
    trunk.precision = ready.precision
    accelerate_for(trunk, pictures, progress=progress)
    return trunk


@torch.no_grad()
def activations_of(
    embedder: Embedder,
    count: int,
    collection: Collection,
    *,
    views: int,
    augmented: bool,
    seed: int = 0,
    progress: Progress = silent,
) -> Activations:
    """Return the activations behind the first `count` stages, of views of a collection's pictures.

    augmented: random views as training takes them; else the centre crop and its mirror image.
    """
    preprocessing = embedder.backbone.preprocessing
    assert preprocessing is not None
    if augmented:
        preprocessing = preprocessing.in_training()
    pictures = views * len(collection)
    trunk = fixed_stages(embedder, count, preprocessing, pictures=pictures, progress=progress)
    device = device_of(trunk)
    example = torch.zeros(1, trunk.channels, preprocessing.size, preprocessing.size)
    shape = tuple(trunk.in_precision(trunk.network, example.to(device)).shape[1:])

    @torch.no_grad()
    def compute(view: int, rows: Indices) -> Tensor:
        loaded = next(
            batches(collection, preprocessing, [rows], train=augmented, seed=seed, epoch=view)
        )
        inputs = loaded.inputs.flip(-1) if view and not augmented else loaded.inputs
        return trunk.in_precision(trunk.network, inputs.to(device)).cpu()

    def parts() -> Iterator[Bytes]:
        how = (augmented, seed, preprocessing.zoom, preprocessing.light) if augmented else ()
        yield f"{embedder.backbone.name} {preprocessing} {how} {count} {views} {shape}".encode()
        yield f"{torch.__version__} {PIL.__version__}".encode()
        if device.type != "cpu":
            yield device.type.encode()
        if trunk.precision != "fp32":
            yield trunk.precision.encode()
        yield from tensor_parts(Trunk(embedder.backbone, count).state_dict())
        yield from picture_keys(collection)

    name = None
    if collection.kind != "dataset" and embedder.backbone.name != OWN:
        name = f"activations-{digest(*parts())}"
    return Activations(
        compute, shape=shape, count=len(collection), views=views, name=name, say=log.info
    )


def embedding_of(
    collection: Collection, embedder: Embedder, count: int, *, progress: Progress = silent
) -> Embed:
    """Return a function that gives the unit embeddings (N, dim) of a collection.

    count: stages that stay as `embedder` has them, whose activations are then kept; 0 for none.
    """
    if not count or not len(collection):
        return lambda trained: Encoder(trained).embed_collection(collection, progress=progress)
    views = 2 if embedder.backbone.mirror else 1
    kept = activations_of(
        embedder, count, collection, views=views, augmented=False, progress=progress
    )

    def embed(trained: Embedder) -> Tensor:
        features = top_features(trained, count, kept, progress=progress)
        embeddings = through_head(trained, trained.to_head(features))
        check_finite(embeddings)
        return normalize(embeddings)

    return embed


@torch.no_grad()
def top_features(
    embedder: Embedder,
    count: int,
    kept: Activations,
    batch: int = 32,
    *,
    progress: Progress = silent,
) -> Tensor:
    """Return the features (N, F) of all pictures, averaged over the views that are kept."""
    top = Top(copy.deepcopy(embedder).eval(), count)
    device, found = device_of(embedder), []
    progress("embedding", 0, kept.count)
    for rows in np.array_split(np.arange(kept.count), -(-kept.count // batch) or 1):
        views = [top.features(kept.take(view, rows).to(device)).cpu() for view in range(kept.views)]
        found.append(torch.stack(views).mean(0))
        progress("embedding", int(rows[-1]) + 1 if len(rows) else 0, kept.count)
    return torch.cat(found)
