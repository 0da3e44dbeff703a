"""Features of a fixed backbone, computed once and cached by picture: an epoch takes seconds."""

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext

import numpy as np
import PIL
import torch
from torch import Tensor

from nofuss.cache import Rows
from nofuss.data.collection import Collection
from nofuss.data.items import content_keys
from nofuss.data.loader import ahead, batches, on_device
from nofuss.data.sampling import Indices, in_order
from nofuss.distributed import processes
from nofuss.distributed.device import device_of
from nofuss.files import Bytes, array_bytes, digest, tensor_parts
from nofuss.model.backbones import OWN, Backbone, evaluating
from nofuss.model.embedder import Embedder, for_inference
from nofuss.model.onnx import OnnxNetwork, accelerate
from nofuss.progress import Progress, silent

ONNX_BATCH, TORCH_BATCH, GPU_BATCH, VECTOR_BATCH = 8, 16, 64, 4096
"""Items loaded at once; onnxruntime is fastest while a batch fits the processor's cache."""
CHUNK = 2048
"""Pictures whose features are written to the cache at once."""
Unreadable = dict[int, str]
"""Row of each picture that can't be decoded, with the reason."""


def backbone_features(
    embedder: Embedder,
    collection: Collection,
    *,
    straight: Indices | None = None,
    num_workers: int = 0,
    progress: Progress = silent,
) -> Tensor:
    """Return features (N, F) of the centre crops; those in the cache are not computed again.

    straight: rows without their mirror images, where the backbone averages both.
    """
    original, ready = embedder.backbone, for_inference(embedder).backbone
    all_rows = np.arange(len(collection))
    plain = np.empty(0, np.int64) if straight is None or not original.mirror else straight
    features = torch.empty(len(collection), original.features)
    for rows, mirror in ((plain, False), (np.setdiff1d(all_rows, plain), original.mirror)):
        if not len(rows):
            continue
        ready.mirror = mirror
        features[rows] = features_of(
            ready,
            collection.subset(rows),
            cache=feature_cache(original, mirror=mirror),
            what="computing features once" + (", with mirror images" if mirror else ""),
            num_workers=num_workers,
            progress=progress,
        )
    return features


def features_of(
    backbone: Backbone,
    collection: Collection,
    *,
    cache: Rows | None,
    what: str = "embedding",
    unreadable: Unreadable | None = None,
    num_workers: int = 0,
    progress: Progress = silent,
) -> Tensor:
    """Return features (N, F) of all items: what `cache` has, else computed and written there.

    backbone: as `for_inference` returns it. what: in words, for `progress`. unreadable: is filled
    with the pictures that can't be decoded, whose features have no meaning; without it they are an
    error. Features are written chunk by chunk, so that a killed command continues where it was.
    """
    values = torch.zeros(len(collection), backbone.features)
    is_known, keys = np.zeros(len(collection), bool), list[bytes]()
    if collection.kind == "dataset":
        cache = None  # its pixels can't be known beforehand
    if cache is not None:
        keys = picture_keys(collection)
        places: dict[bytes, list[int]] = {}
        for row, key in enumerate(keys):
            places.setdefault(key, []).append(row)
        for key, value in cache.read(keys):
            if len(value) == 4 * backbone.features:
                values.numpy()[places[key]] = np.frombuffer(value, np.float32)
                is_known[places[key]] = True
        # Of several processes one may have read before another has written.
        counts = processes.all_sum(torch.from_numpy(is_known).int())
        is_known = counts.numpy() == processes.world()
    missing = np.flatnonzero(~is_known)
    if len(missing):
        accelerate(backbone, len(missing), progress=progress)
        progress(what, 0, len(missing))
    for start in range(0, len(missing), CHUNK):
        rows = missing[start : start + CHUNK]
        items, failed = collection.subset(rows), Unreadable()

        def advance(_: str, done: int, __: int, start: int = start) -> None:
            progress(what, start + done, len(missing))

        part = run_over(
            backbone,
            items,
            unreadable=None if unreadable is None else failed,
            num_workers=num_workers,
            progress=advance,
        )
        values[rows] = part
        if unreadable is not None:
            unreadable |= {int(rows[i]): reason for i, reason in failed.items()}
        if cache is not None and processes.first():
            # A picture that changed while it was decoded has features of another content.
            now = picture_keys(items)
            same = [i for i, row in enumerate(rows) if keys[row] == now[i] and i not in failed]
            cache.write([now[i] for i in same], [part[i].numpy().tobytes() for i in same])
    return values


def feature_cache(backbone: Backbone, *, mirror: bool | None = None) -> Rows | None:
    """Return where features of this backbone are cached; None if a key can't cover what it does.

    The key covers the network's name, preprocessing, mirroring, versions, the kind of device, the
    precision and every weight, as they are before batch norm is folded.
    """
    if backbone.preprocessing is None or backbone.name == OWN:
        return None
    mirror = backbone.mirror if mirror is None else mirror

    def parts() -> Iterator[Bytes]:
        yield f"{backbone.name} {backbone.preprocessing} mirror {mirror}".encode()
        yield from numerics(backbone)
        yield from tensor_parts(backbone.state_dict())

    return Rows(f"features-{digest(*parts())}")


def numerics(backbone: Backbone) -> Iterator[bytes]:
    """Return what else decides on the bits of a result: versions, kind of device, precision."""
    yield f"{torch.__version__} {PIL.__version__}".encode()
    if (kind := device_of(backbone).type) != "cpu":  # a GPU may round its products
        yield kind.encode()
    if backbone.precision != "fp32":
        yield backbone.precision.encode()


def picture_keys(collection: Collection) -> list[bytes]:
    """Return a key for each picture of a collection of files or of arrays, by its content."""
    if collection.array is None:
        return content_keys(collection.paths)
    rows = np.asarray(collection.array)
    shape = f"{rows.dtype}{rows.shape[1:]}".encode()
    return [bytes.fromhex(digest(shape, array_bytes(row))) for row in rows]


# Running a network over items


def run_over(
    model: Embedder | Backbone,
    collection: Collection,
    *,
    unreadable: Unreadable | None = None,
    num_workers: int = 0,
    progress: Progress = silent,
) -> Tensor:
    """Return the features (of a Backbone) or raw embeddings (of an Embedder) of all items.

    Several processes share the items. unreadable: as for `features_of`.
    """
    backbone = model.backbone if isinstance(model, Embedder) else model
    preprocessing, device = backbone.preprocessing, device_of(backbone)
    in_onnx = isinstance(backbone.network, OnnxNetwork)
    if in_onnx or device.type != "cpu":  # pictures are decoded while the last ones are computed
        num_workers = max(1, num_workers)
    batch = batch_size(backbone)
    chosen = in_order(len(collection), batch)
    if preprocessing is not None and len(chosen):
        # All batches have one size: a picture's features do not depend on what else is missing.
        padding = np.full(batch - len(chosen[-1]), chosen[-1][-1])
        chosen[-1] = np.concatenate([chosen[-1], padding])
    own = processes.share(len(chosen))  # the batches of this process
    before, count = sum(map(len, chosen[: own.start])), sum(map(len, chosen[own]))
    loaded = batches(
        collection,
        preprocessing,
        chosen[own],
        train=False,
        unreadable=unreadable,
        num_workers=num_workers,
        pin=device.type == "cuda",
    )

    def tell(what: str, done: int, _: int) -> None:  # other processes are about as far
        progress(what, min(done * processes.world(), len(collection)), len(collection))

    tell("embedding", 0, 0)
    inputs = (each.inputs for each in on_device(loaded, device))
    part = extract(model, inputs, count=count, progress=tell)
    if processes.world() == 1:
        return part[: len(collection)]
    whole = part.new_zeros(sum(map(len, chosen)), part.shape[1])
    whole[before : before + count] = part
    if unreadable is not None:
        for text in processes.exchange(json.dumps(unreadable)):
            unreadable |= {int(row): reason for row, reason in json.loads(text).items()}
    return processes.merge_rows(whole, slice(before, before + count))[: len(collection)]


def batch_size(backbone: Backbone) -> int:
    """Return how many items are loaded at once."""
    if backbone.preprocessing is None:
        return VECTOR_BATCH
    if isinstance(backbone.network, OnnxNetwork):
        return ONNX_BATCH
    return TORCH_BATCH if device_of(backbone).type == "cpu" else GPU_BATCH


def extract(
    model: Embedder | Backbone,
    batches: Iterable[Tensor],
    *,
    count: int,
    progress: Progress = silent,
) -> Tensor:
    """Return embeddings (of an Embedder) or features (of a Backbone) of `count` inputs, (count, …).

    The result is on the CPU, wherever the model is. The model runs in eval mode, and its mode is
    restored afterwards.
    """
    backbone = model.backbone if isinstance(model, Embedder) else model
    if in_onnx := isinstance(backbone.network, OnnxNetwork):
        backbone.network.open()  # with as many threads as torch has now
    width = model.dim if isinstance(model, Embedder) else model.features
    out = torch.empty(count, width, dtype=torch.float32)
    device, done = device_of(model), 0

    @torch.no_grad()  # which holds for one thread
    def run(batch: Tensor) -> Tensor:
        if in_onnx:
            # Channel after channel, as onnxruntime takes them, before mirroring would copy them in
            # the other order; numpy takes half of torch's time.
            batch = torch.from_numpy(np.ascontiguousarray(batch.numpy()))
        found: Tensor = model(batch.to(device)).cpu()
        return found

    threads = torch.get_num_threads() if in_onnx else 0  # so that no thread waits for a batch's end
    with evaluating(model), _one_torch_thread() if in_onnx else nullcontext():
        for found in ahead(run, batches, threads, waiting=threads):
            if done + len(found) > count:
                raise ValueError(f"batches hold more than count={count} inputs")
            out[done : done + len(found)] = found
            done += len(found)
            progress("embedding", done, count)
    if done != count:
        raise ValueError(f"batches held {done} inputs, expected count={count}")
    return out


@contextmanager
def _one_torch_thread() -> Iterator[None]:
    """Use one torch thread, so that onnxruntime has the cores: waiting torch threads spin."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
