"""Features of a fixed backbone, computed once and kept by picture: an epoch takes seconds."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import numpy as np
import PIL
import torch
from numpy.typing import NDArray
from torch import Tensor

from nofuss.cache import Rows, holds_blob
from nofuss.data.collection import Collection
from nofuss.data.items import content_keys
from nofuss.data.loader import batches, on_device
from nofuss.data.sampling import Indices, in_order
from nofuss.distributed.device import device_of
from nofuss.distributed.processes import all_sum, first, world
from nofuss.files import Bytes, array_bytes, digest, tensor_parts
from nofuss.model.backbones import OWN, Backbone
from nofuss.model.embedder import Embedder
from nofuss.model.inference import extract_together, for_inference
from nofuss.model.onnx_backbone import OnnxNetwork, accelerate, can_accelerate, graph_name
from nofuss.progress import Progress, silent, working

log = logging.getLogger("nofuss")

WORTH_EXPORT = 1000
"""Number of pictures from which exporting the backbone to onnxruntime saves time."""
ONNX_BATCH, TORCH_BATCH, GPU_BATCH, VECTOR_BATCH = 8, 16, 64, 4096
"""Items loaded at once; onnxruntime is fastest while a batch fits the processor's cache."""
CHUNK = 2048
"""Pictures whose features are kept at once."""


def backbone_features(
    embedder: Embedder,
    collection: Collection,
    *,
    straight: Indices | None = None,
    num_workers: int = 0,
    progress: Progress = silent,
) -> Tensor:
    """Return features (N, F) of the centre crops; those that are kept are not computed again.

    straight: rows without their mirror images, where the backbone averages both.
    """
    if straight is None or not embedder.backbone.mirror:
        return _features(embedder, collection, len(collection), num_workers, progress)
    features = torch.empty(len(collection), embedder.backbone.features)
    others = np.setdiff1d(np.arange(len(collection)), straight)
    try:
        for rows, mirror in ((straight, False), (others, True)):
            embedder.backbone.mirror = mirror
            part = collection.subset(rows)
            features[rows] = _features(embedder, part, len(collection), num_workers, progress)
    finally:
        embedder.backbone.mirror = True
    return features


def _features(
    embedder: Embedder, collection: Collection, count: int, num_workers: int, progress: Progress
) -> Tensor:
    """Return features of a part of a collection; the whole command computes `count` of them."""
    store = feature_store(embedder.backbone)
    kept = kept_features(store, collection, embedder.backbone.features)
    if not len(kept.missing):
        return kept.values
    backbone = for_inference(embedder).backbone
    label = "computing features once" + (", with mirror images" if backbone.mirror else "")
    accelerate_for(backbone, count, missing=len(kept.missing), progress=progress)
    return completed(kept, backbone, collection, label, num_workers=num_workers, progress=progress)


def feature_store(backbone: Backbone) -> Rows | None:
    """Return where features of this backbone are kept; None if a key can't cover what it does.

    The key covers the network's name, preprocessing, mirroring, versions, the kind of device, the
    precision and every weight, as they are before batch norm is folded.
    """
    if backbone.preprocessing is None or backbone.name == OWN:
        return None

    def parts() -> Iterator[Bytes]:
        yield f"{backbone.name} {backbone.preprocessing} mirror {backbone.mirror}".encode()
        yield f"{torch.__version__} {PIL.__version__}".encode()
        if (kind := device_of(backbone).type) != "cpu":  # a GPU may round its products
            yield kind.encode()
        if backbone.precision != "fp32":
            yield backbone.precision.encode()
        yield from tensor_parts(backbone.state_dict())

    return Rows(f"features-{digest(*parts())}")


def picture_keys(collection: Collection) -> list[bytes]:
    """Return a key for each picture of a collection of files or of arrays, by its content."""
    if collection.array is None:
        return content_keys(collection.paths)
    rows = np.asarray(collection.array)
    shape = f"{rows.dtype}{rows.shape[1:]}".encode()
    return [bytes.fromhex(digest(shape, array_bytes(row))) for row in rows]


def read_features(
    store: Rows, keys: Sequence[bytes], width: int
) -> tuple[Tensor, NDArray[np.bool_]]:
    """Return features (N, width) and which of them are known; the others are zero."""
    values, is_known = np.zeros((len(keys), width), np.float32), np.zeros(len(keys), bool)
    places: dict[bytes, list[int]] = {}
    for i, key in enumerate(keys):
        places.setdefault(key, []).append(i)
    for key, value in store.read(keys):
        if len(value) == values.itemsize * width:
            values[places[key]] = np.frombuffer(value, np.float32)
            is_known[places[key]] = True
    return torch.from_numpy(values), is_known


def write_features(
    store: Rows, keys: Sequence[bytes], collection: Collection, values: Tensor
) -> None:
    """Write features (N, F) of pictures, without those that have changed meanwhile."""
    now = picture_keys(collection)
    rows = [row.tobytes() for row in values.numpy()]
    unchanged = [i for i, key in enumerate(keys) if key == now[i]]
    store.write([keys[i] for i in unchanged], [rows[i] for i in unchanged])


@dataclass(frozen=True)
class KeptFeatures:
    """Features of a collection as far as the store has them."""

    store: Rows | None
    keys: list[bytes]
    """The store's key of each item; none without a store."""
    values: Tensor
    """(N, F), with zeros for those that are missing."""
    missing: Indices


def kept_features(store: Rows | None, collection: Collection, width: int) -> KeptFeatures:
    """Read what `store` has of a collection's features (N, width)."""
    count = len(collection)
    if store is None or collection.kind == "dataset":  # whose pixels can't be known beforehand
        return KeptFeatures(None, [], torch.zeros(count, width), np.arange(count))
    keys = picture_keys(collection)
    values, is_known = read_features(store, keys, width)
    # Of several processes one may have read before another has written.
    everywhere = all_sum(torch.from_numpy(is_known).int()) == world()
    missing = np.flatnonzero(~everywhere.numpy())
    return KeptFeatures(store, keys, values, missing)


def features_of(
    backbone: Backbone,
    collection: Collection,
    *,
    store: Rows | None,
    num_workers: int = 0,
    progress: Progress = silent,
) -> Tensor:
    """Return features (N, F) of all items: what `store` has, else computed and put there."""
    kept = kept_features(store, collection, backbone.features)
    if len(kept.missing):
        accelerate_for(backbone, len(collection), missing=len(kept.missing), progress=progress)
    return completed(
        kept, backbone, collection, "embedding", num_workers=num_workers, progress=progress
    )


def completed(
    kept: KeptFeatures,
    backbone: Backbone,
    collection: Collection,
    what: str,
    *,
    num_workers: int = 0,
    progress: Progress = silent,
) -> Tensor:
    """Compute what is missing, and return all.

    what: in words, for `progress`. Features are kept chunk by chunk, so that a killed command
    continues where it was.
    """
    total, start = len(kept.missing), 0
    progress(what, 0, total)

    def advance(_: str, done: int, __: int) -> None:
        progress(what, start + done, total)

    for start in range(0, total, CHUNK):
        rows = kept.missing[start : start + CHUNK]
        pictures = collection.subset(rows)
        part = run_over(
            backbone,
            pictures,
            num_workers=num_workers,
            progress=advance,
        )
        kept.values[rows] = part
        if kept.store is not None and first():
            write_features(kept.store, [kept.keys[i] for i in rows], pictures, part)
    return kept.values


def run_over(
    model: Embedder | Backbone,
    collection: Collection,
    *,
    num_workers: int = 0,
    progress: Progress = silent,
) -> Tensor:
    """Return the features (of a Backbone) or raw embeddings (of an Embedder) of all items."""
    backbone = model.backbone if isinstance(model, Embedder) else model
    preprocessing = backbone.preprocessing
    in_onnx = isinstance(backbone.network, OnnxNetwork)
    device = device_of(backbone)
    if in_onnx or device.type != "cpu":  # pictures are decoded while the last ones are computed
        num_workers = max(1, num_workers)
    batch = ONNX_BATCH if in_onnx else TORCH_BATCH if device.type == "cpu" else GPU_BATCH
    if preprocessing is None:
        batch = VECTOR_BATCH

    def load(chosen: Sequence[Indices]) -> Iterator[Tensor]:
        pin = device.type == "cuda"
        loaded = batches(
            collection, preprocessing, chosen, train=False, num_workers=num_workers, pin=pin
        )
        inputs = (batch.inputs for batch in on_device(loaded, device))
        return map(_by_planes, inputs) if in_onnx else inputs

    chosen = in_order(len(collection), batch)
    if preprocessing is not None and len(chosen):
        # All batches have one size: a picture's features do not depend on what else is missing.
        padding = np.full(batch - len(chosen[-1]), chosen[-1][-1])
        chosen[-1] = np.concatenate([chosen[-1], padding])

    def tell(what: str, done: int, _: int) -> None:
        progress(what, min(done, len(collection)), len(collection))

    tell("embedding", 0, 0)
    threads = torch.get_num_threads() if in_onnx else 0  # so that no thread waits for a batch's end
    with one_torch_thread() if in_onnx else nullcontext():
        found = extract_together(model, load, chosen, progress=tell, threads=threads)
    return found[: len(collection)]


def _by_planes(views: Tensor) -> Tensor:
    """Return views channel after channel in memory, as onnxruntime takes them.

    Before mirroring, which would copy them in the other order; numpy takes half of torch's time.
    """
    return torch.from_numpy(np.ascontiguousarray(views.numpy()))


@contextmanager
def one_torch_thread() -> Iterator[None]:
    """Use one torch thread, so that onnxruntime has the cores: waiting torch threads spin."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def accelerate_for(
    backbone: Backbone, count: int, *, missing: int | None = None, progress: Progress = silent
) -> None:
    """Let onnxruntime run a backbone on `count` pictures, if that saves time.

    missing: how many of them are to be computed; for a few of many, only a graph that is kept is
    used. The number of pictures decides, so that the same command, with an empty cache or its own,
    gives the same bits again.
    """
    if count < WORTH_EXPORT or not can_accelerate(backbone):
        return
    is_kept = holds_blob(graph_name(backbone))
    if missing is not None and missing < WORTH_EXPORT and not is_kept:
        return
    with working(progress, "exporting the network to onnxruntime"):
        is_faster = accelerate(backbone)
    if is_faster:
        log.info(f"{backbone.name} runs in onnxruntime (NOFUSS_RUNTIME=torch: in torch)")
