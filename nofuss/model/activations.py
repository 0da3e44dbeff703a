"""The fixed stages of a network that is being fine-tuned: run once per view, their output cached.

The key in the cache covers the weights of the fixed stages, the preprocessing, the seed and the
pictures. A record is written when its view is first needed, and read from then on; after a kill,
the records that are whole are used. Views for which the cache has no room are computed every time.
"""

import copy
import logging
from collections.abc import Callable
from functools import cache

import numpy as np
import torch
from torch import Tensor, nn

from nofuss.cache import Records, name_of, room
from nofuss.config import Preprocessing
from nofuss.data.collection import Collection
from nofuss.data.loader import batches
from nofuss.data.sampling import Indices
from nofuss.distributed.device import device_of
from nofuss.geometry import normalize
from nofuss.model.backbones import Backbone, inference_key
from nofuss.model.embedder import Embedder, embed_features, for_inference
from nofuss.model.encoder import Encoder
from nofuss.model.onnx import WORTH_EXPORT, accelerate
from nofuss.model.stages import Top, Trunk
from nofuss.progress import Progress, silent

log = logging.getLogger("nofuss")

Compute = Callable[[int, Indices], Tensor]
"""View and rows → activations (B, …) of these pictures."""
Embed = Callable[[Embedder], Tensor]
"""Embedder → unit embeddings (N, dim) of a collection."""


class Activations:
    """Activations of `views` views of `count` pictures, read from the cache or computed.

    shape: of one picture's activations. name: in the cache, None to cache nothing.
    """

    def __init__(
        self, compute: Compute, *, shape: tuple[int, ...], count: int, views: int, name: str | None
    ) -> None:
        self.compute, self.count, self.views = compute, count, views
        self._records: Records | None = None
        self._views_cached = 0
        if name is None:
            return
        one_view = count * Records.kind_of(shape).itemsize
        self._views_cached = min(views, room() // one_view)
        try:
            if self._views_cached:
                self._records = Records(name, shape, self._views_cached * count)
        except OSError as error:
            self._stop(error)
        else:
            if self._views_cached < views:
                log.info(
                    f"the cache has room for activations of {self._views_cached} of {views} views, "
                    f"{one_view / 2**30:.1f} GB each; the others are computed again in every "
                    "epoch; NOFUSS_CACHE names another folder"
                )

    def take(self, view: int, rows: Indices) -> Tensor:
        """Return activations (B, …) of some pictures in a view, in single precision.

        They are rounded to half precision whether or not they are cached, so that the result does
        not depend on the room in the cache.
        """
        records = self._records if view < self._views_cached else None
        places = view * self.count + rows
        values = None if records is None else records.read(places)
        if values is None:
            values = self.compute(view, rows).numpy().astype(np.float16)
            try:
                if records is not None:
                    records.write(places, values)
            except OSError as error:
                self._stop(error)
        return torch.from_numpy(values.astype(np.float32))

    def _stop(self, error: OSError) -> None:
        """Do without the cache."""
        self._records = None
        log.info(
            f"activations can't be cached ({error.strerror or error}), so the fixed stages run "
            "again in every epoch; free the disk, or set NOFUSS_CACHE to another folder"
        )


def fixed_stages(embedder: Embedder, count: int, preprocessing: Preprocessing) -> Backbone:
    """Return a copy of the first `count` stages for inference, as a backbone of its own."""
    ready = for_inference(embedder).backbone
    trunk = Backbone(
        ready.name,
        Trunk(ready, count),
        0,
        channels=ready.channels,
        preprocessing=preprocessing,
    ).eval()
    trunk.precision = ready.precision
    trunk.key = inference_key(trunk)
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
    trunk = fixed_stages(embedder, count, preprocessing)
    device, total = device_of(trunk), views * len(collection)
    example = torch.zeros(1, trunk.channels, preprocessing.size, preprocessing.size)
    shape = tuple(trunk.in_precision(trunk.network, example.to(device)).shape[1:])

    @cache
    def network() -> nn.Module:
        if total >= WORTH_EXPORT:  # whatever the cache has: the bits do not depend on it
            accelerate(trunk, total, progress=progress)
        return trunk.network

    @torch.no_grad()
    def compute(view: int, rows: Indices) -> Tensor:
        loaded = next(
            batches(collection, preprocessing, [rows], train=augmented, seed=seed, epoch=view)
        )
        inputs = loaded.inputs.flip(-1) if view and not augmented else loaded.inputs
        return trunk.in_precision(network(), inputs.to(device)).cpu()

    name = None
    if trunk.key is not None and (keys := collection.keys()) is not None:
        how = (augmented, seed, preprocessing.zoom, preprocessing.light) if augmented else ()
        made_of = f"{trunk.key} {how} {views} {shape}".encode()
        name = name_of("activations", made_of, *keys)
    return Activations(compute, shape=shape, count=len(collection), views=views, name=name)


def embedding_of(
    collection: Collection, embedder: Embedder, count: int, *, progress: Progress = silent
) -> Embed:
    """Return a function that gives the unit embeddings (N, dim) of a collection.

    count: stages that stay as `embedder` has them, whose activations are then cached; 0 for none.
    """
    if not count or not len(collection):
        return lambda trained: Encoder(trained).embed_collection(collection, progress=progress)
    views = embedder.backbone.views
    activations = activations_of(
        embedder, count, collection, views=views, augmented=False, progress=progress
    )

    def embed(trained: Embedder) -> Tensor:
        features = top_features(trained, count, activations, progress=progress)
        embeddings = embed_features(trained, features)
        return normalize(embeddings)

    return embed


@torch.no_grad()
def top_features(
    embedder: Embedder,
    count: int,
    activations: Activations,
    batch: int = 32,
    *,
    progress: Progress = silent,
) -> Tensor:
    """Return the features (N, F) of all pictures, averaged over their views."""
    top = Top(copy.deepcopy(embedder).eval(), count)
    device, pictures, found = device_of(embedder), activations.count, list[Tensor]()
    progress("embedding", 0, pictures)
    for rows in np.array_split(np.arange(pictures), -(-pictures // batch) or 1):
        taken = (activations.take(view, rows) for view in range(activations.views))
        found.append(torch.stack([top.features(each.to(device)).cpu() for each in taken]).mean(0))
        progress("embedding", int(rows[-1]) + 1 if len(rows) else 0, pictures)
    return torch.cat(found)
