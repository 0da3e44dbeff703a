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
from torch import Tensor

from nofuss.cache import Rows
from nofuss.data.collection import Collection, printable
from nofuss.data.decode import PictureError
from nofuss.data.loader import ahead, batches
from nofuss.data.sampling import Indices, in_order
from nofuss.data.scan import note_looks
from nofuss.distributed import processes
from nofuss.distributed.device import device_of
from nofuss.files import digest
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
    report pictures that can't be decoded, and note how the others look (scan.py); without it the
    first one is an error.
    """
    if backbone.preprocessing is None:
        return Computed(as_tensor(np.asarray(collection.array, np.float32)), {})
    plain = copy.copy(backbone)  # the same network
    plain.mirror = False
    rows = np.arange(len(collection))
    alone = rows[:0] if straight is None or not backbone.mirror else straight
    keys = collection.keys() if cached and backbone.key is not None else None
    values, unreadable = torch.zeros(len(collection), backbone.features), dict[int, PictureError]()
    passes = [
        (each, _missing(each, keys, chosen, values))
        for each, chosen in ((plain, alone), (backbone, np.setdiff1d(rows, alone)))
        if len(chosen)
    ]
    if views := sum(len(missing) * each.views for each, missing in passes):
        accelerate(backbone, views, progress=progress)
    for each, missing in passes:
        for part, found in _in_chunks(
            each,
            collection,
            missing,
            keys,
            skip_unreadable=skip_unreadable,
            num_workers=num_workers,
            progress=progress,
        ):
            values[part] = found.values
            unreadable |= {int(part[i]): error for i, error in found.unreadable.items()}
    return Computed(values, unreadable)


def feature_cache(backbone: Backbone) -> Rows:
    """Return where features of this backbone are cached."""
    return Rows(f"features-{digest(f'{backbone.key} mirror {backbone.mirror}'.encode())}")


def _missing(
    backbone: Backbone, keys: list[bytes] | None, rows: Indices, values: Tensor
) -> Indices:
    """Copy what the cache has of these rows into `values`, and return the other rows."""
    if keys is None:
        return rows
    places: dict[bytes, list[int]] = {}
    for row in rows.tolist():
        places.setdefault(keys[row], []).append(row)
    is_known = np.zeros(len(keys), bool)
    for key, value in feature_cache(backbone).read(list(places)):
        if len(value) == 4 * values.shape[1]:
            values.numpy()[places[key]] = np.frombuffer(value, np.float32)
            is_known[places[key]] = True
    # Of several processes one may have read before another has written.
    is_known[:] = processes.all_sum(torch.from_numpy(is_known).int()) == processes.world()
    return rows[~is_known[rows]]


def _in_chunks(
    backbone: Backbone,
    collection: Collection,
    missing: Indices,
    keys: list[bytes] | None,
    *,
    skip_unreadable: bool,
    num_workers: int,
    progress: Progress,
) -> Iterator[tuple[Indices, Computed]]:
    """Compute the features of these rows; yield rows and features when the cache has them."""
    what = "computing features" + (", with mirror images" if backbone.mirror else "")
    for start in range(0, len(missing), CHUNK):
        rows = missing[start : start + CHUNK]

        def advance(done: int, start: int = start) -> None:
            progress(what, start + done, len(missing))

        advance(0)
        items = collection.subset(rows)
        found, looks = _compute(
            backbone,
            items,
            skip_unreadable=skip_unreadable,
            num_workers=num_workers,
            advance=advance,
        )
        if keys is not None and (now := items.keys()) is not None:
            # A picture that changed while it was decoded has features of another content.
            same = [i for i in found.readable if keys[rows[i]] == now[i]]
            note_looks({now[i]: looks[i] for i in same if looks.get(i)})
            if processes.first():
                contents = [found.values[i].numpy().tobytes() for i in same]
                feature_cache(backbone).write([now[i] for i in same], contents)
        yield rows, found


def _compute(
    backbone: Backbone,
    collection: Collection,
    *,
    skip_unreadable: bool,
    num_workers: int,
    advance: Callable[[int], object],
) -> tuple[Computed, dict[int, bytes]]:
    """Return the features of all pictures, which several processes share, and how its own look."""
    device = device_of(backbone)
    if isinstance(backbone.network, OnnxNetwork) or device.type != "cpu":
        num_workers = max(1, num_workers)  # to decode while the last batch is computed
    batch = batch_size(backbone)
    chosen = in_order(len(collection), batch)
    total, chosen = len(chosen), chosen[processes.share(len(chosen))]
    found, unreadable = dict[int, bytes | PictureError](), dict[int, PictureError]()
    loaded = batches(
        collection,
        backbone.preprocessing,
        chosen,
        train=False,
        looks=found if skip_unreadable else None,
        num_workers=num_workers,
        pin=device.type == "cuda",
    )
    # All batches have one size: a picture's features do not depend on what else is missing.
    values = extract(
        backbone,
        (_filled(each.inputs.to(device, non_blocking=True), batch) for each in loaded),
        count=len(chosen) * batch,
        # Other processes are about as far.
        advance=lambda done: advance(min(done * processes.world(), len(collection))),
    )
    whole = processes.gather_rows(values.view(-1, batch * backbone.features), total)
    looks = {row: look for row, look in found.items() if not isinstance(look, PictureError)}
    errors = [(row, each) for row, each in found.items() if isinstance(each, PictureError)]
    reasons = {row: (error.reason, error.detail) for row, error in errors}
    for text in processes.exchange(json.dumps(reasons)):
        for row, reason in json.loads(text).items():
            unreadable[int(row)] = PictureError(printable(collection.paths[int(row)]), *reason)
    return Computed(whole.view(-1, backbone.features)[: len(collection)], unreadable), looks


def _filled(inputs: Tensor, count: int) -> Tensor:
    """Return a batch of `count` inputs: the last is repeated, in the same memory format."""
    return inputs[torch.arange(count).clamp(max=len(inputs) - 1)] if len(inputs) < count else inputs


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
