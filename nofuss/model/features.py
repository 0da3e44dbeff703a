"""Features of a collection: computed once, cached by the content of a picture.

`features_of` reads what the cache has, computes the rest chunk by chunk, and writes that there;
`extract` runs a backbone over batches of inputs, in torch or onnxruntime. A picture that can't be
decoded is an error, or stands in the result beside those that can.
"""

import copy
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nofuss.cache import Rows, key_of
from nofuss.data.collection import Collection, printable
from nofuss.data.decode import PictureError
from nofuss.data.items import content_keys
from nofuss.data.loader import ahead, batches, on_device
from nofuss.data.sampling import Indices, in_order
from nofuss.distributed import processes
from nofuss.distributed.device import device_of
from nofuss.files import array_bytes, digest
from nofuss.geometry import as_tensor
from nofuss.model.backbones import Backbone, evaluating
from nofuss.model.onnx import OnnxNetwork, accelerate
from nofuss.progress import Progress, silent

ONNX_BATCH, TORCH_BATCH, GPU_BATCH = 8, 16, 64
"""Pictures loaded at once; onnxruntime is fastest while a batch fits the processor's cache."""
CHUNK = 2048
"""Pictures whose features are written to the cache at once: a killed command loses no more."""


@dataclass(frozen=True)
class Computed:
    """Features or embeddings of a collection, and the pictures that have none."""

    values: Tensor  # (N, …); the rows of unreadable pictures have no meaning
    unreadable: Mapping[int, PictureError]
    """Row of each picture that can't be decoded, with the reason."""

    @property
    def readable(self) -> Indices:
        """Return the rows that have values, as `Collection.subset` takes them."""
        return np.setdiff1d(np.arange(len(self.values)), list(self.unreadable))


def features_of(
    backbone: Backbone,
    collection: Collection,
    *,
    cached: bool = True,
    straight: Indices | None = None,
    skip_unreadable: bool = False,
    num_workers: int = 0,
    progress: Progress = silent,
) -> Computed:
    """Return features (N, F) of the centre crops; vectors are their own features.

    backbone: of a copy `for_inference`. cached: read what the cache has, and add what is computed.
    straight: rows without their mirror images, where the backbone averages both. skip_unreadable:
    report pictures that can't be decoded; without it the first one is an error.
    """
    if backbone.preprocessing is None:
        return Computed(as_tensor(np.asarray(collection.array, np.float32)), {})
    cached = cached and collection.kind != "dataset"  # whose pixels can't be known beforehand
    plain = copy.copy(backbone)  # the same network
    plain.mirror = False
    rows = np.arange(len(collection))
    alone = rows[:0] if straight is None or not backbone.mirror else straight
    values, unreadable = torch.zeros(len(collection), backbone.features), dict[int, PictureError]()
    for chosen, each in ((alone, plain), (np.setdiff1d(rows, alone), backbone)):
        if len(chosen):
            part = _through_cache(
                each,
                collection.subset(chosen),
                cache=feature_cache(each) if cached else None,
                skip_unreadable=skip_unreadable,
                num_workers=num_workers,
                progress=progress,
            )
            values[chosen] = part.values
            unreadable |= {int(chosen[i]): error for i, error in part.unreadable.items()}
    return Computed(values, unreadable)


def feature_cache(backbone: Backbone) -> Rows | None:
    """Return where features of this backbone are cached; None if a key can't cover what it does."""
    if backbone.key is None:
        return None
    return Rows(f"features-{digest(f'{backbone.key} mirror {backbone.mirror}'.encode())}")


def picture_keys(collection: Collection) -> list[bytes]:
    """Return a key for each picture of a collection of files or of arrays, by its content."""
    if collection.array is None:
        return content_keys(collection.paths)
    rows = np.asarray(collection.array)
    shape = f"{rows.dtype}{rows.shape[1:]}".encode()
    return [key_of(shape, array_bytes(row)) for row in rows]


def _through_cache(
    backbone: Backbone,
    collection: Collection,
    *,
    cache: Rows | None,
    skip_unreadable: bool,
    num_workers: int,
    progress: Progress,
) -> Computed:
    """Return the features of all pictures: what `cache` has, else computed and written there."""
    values = torch.zeros(len(collection), backbone.features)
    unreadable, keys = dict[int, PictureError](), list[bytes]()
    is_known = np.zeros(len(collection), bool)
    if cache is not None:
        keys = picture_keys(collection)
        is_known = _read(cache, keys, values)
    missing = np.flatnonzero(~is_known)
    what = "computing features" + (", with mirror images" if backbone.mirror else "")
    if len(missing):
        accelerate(backbone, len(missing), progress=progress)
        progress(what, 0, len(missing))
    for start in range(0, len(missing), CHUNK):
        rows = missing[start : start + CHUNK]

        def advance(done: int, start: int = start) -> None:
            progress(what, start + done, len(missing))

        items = collection.subset(rows)
        part = _compute(
            backbone,
            items,
            skip_unreadable=skip_unreadable,
            num_workers=num_workers,
            advance=advance,
        )
        values[rows] = part.values
        unreadable |= {int(rows[i]): error for i, error in part.unreadable.items()}
        if cache is not None and processes.first():
            # A picture that changed while it was decoded has features of another content.
            now = picture_keys(items)
            same = [i for i in part.readable if keys[rows[i]] == now[i]]
            cache.write([now[i] for i in same], [part.values[i].numpy().tobytes() for i in same])
    return Computed(values, unreadable)


def _read(cache: Rows, keys: list[bytes], values: Tensor) -> NDArray[np.bool_]:
    """Copy what the cache has into `values`, and return which rows that were."""
    rows: dict[bytes, list[int]] = {}
    for row, key in enumerate(keys):
        rows.setdefault(key, []).append(row)
    is_known = np.zeros(len(keys), bool)
    for key, value in cache.read(keys):
        if len(value) == 4 * values.shape[1]:
            values.numpy()[rows[key]] = np.frombuffer(value, np.float32)
            is_known[rows[key]] = True
    # Of several processes one may have read before another has written.
    is_known[:] = processes.all_sum(torch.from_numpy(is_known).int()) == processes.world()
    return is_known


def _compute(
    backbone: Backbone,
    collection: Collection,
    *,
    skip_unreadable: bool,
    num_workers: int,
    advance: Callable[[int], object],
) -> Computed:
    """Return the features of all pictures, which several processes share."""
    device = device_of(backbone)
    if isinstance(backbone.network, OnnxNetwork) or device.type != "cpu":
        num_workers = max(1, num_workers)  # to decode while the last batch is computed
    batch = batch_size(backbone)
    chosen = in_order(len(collection), batch)
    # All batches have one size: a picture's features do not depend on what else is missing.
    padding = np.full(batch - len(chosen[-1]), chosen[-1][-1])
    chosen[-1] = np.concatenate([chosen[-1], padding])
    total, chosen = len(chosen), chosen[processes.share(len(chosen))]
    found, unreadable = dict[int, PictureError](), dict[int, PictureError]()
    loaded = batches(
        collection,
        backbone.preprocessing,
        chosen,
        train=False,
        unreadable=found if skip_unreadable else None,
        num_workers=num_workers,
        pin=device.type == "cuda",
    )
    values = extract(
        backbone,
        (each.inputs for each in on_device(loaded, device)),
        count=len(chosen) * batch,
        # Other processes are about as far.
        advance=lambda done: advance(min(done * processes.world(), len(collection))),
    )
    whole = processes.gather_rows(values.view(-1, batch * backbone.features), total)
    reasons = {row: (error.reason, error.detail) for row, error in found.items()}
    for text in processes.exchange(json.dumps(reasons)):
        for row, reason in json.loads(text).items():
            unreadable[int(row)] = PictureError(printable(collection.paths[int(row)]), *reason)
    return Computed(whole.view(-1, backbone.features)[: len(collection)], unreadable)


# Running a backbone


def batch_size(backbone: Backbone) -> int:
    """Return how many pictures are loaded at once."""
    if isinstance(backbone.network, OnnxNetwork):
        return ONNX_BATCH
    return TORCH_BATCH if device_of(backbone).type == "cpu" else GPU_BATCH


def extract(
    backbone: Backbone,
    batches: Iterable[Tensor],
    *,
    count: int,
    advance: Callable[[int], object] = lambda done: None,
) -> Tensor:
    """Return the features (count, F) of `count` inputs, on the CPU, wherever the backbone is.

    It runs in eval mode, and its mode is restored afterwards. advance: called with how many are
    done.
    """
    if in_onnx := isinstance(backbone.network, OnnxNetwork):
        backbone.network.open()  # with as many threads as torch has now
    out = torch.empty(count, backbone.features, dtype=torch.float32)
    device, done = device_of(backbone), 0

    @torch.no_grad()  # which holds for one thread
    def run(batch: Tensor) -> Tensor:
        if in_onnx:
            # Channel after channel, as onnxruntime takes them, before mirroring would copy them in
            # the other order; numpy takes half of torch's time.
            batch = torch.from_numpy(np.ascontiguousarray(batch.numpy()))
        result: Tensor = backbone(batch.to(device)).cpu()
        return result

    threads = torch.get_num_threads() if in_onnx else 0  # so that no thread waits for a batch's end
    with evaluating(backbone), _one_torch_thread() if in_onnx else nullcontext():
        for found in ahead(run, batches, threads, waiting=threads):
            out[done : done + len(found)] = found
            done += len(found)
            advance(done)
    assert done == count
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
