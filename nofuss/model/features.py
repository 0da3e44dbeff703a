"""Features of a collection: computed once, cached by the content of a picture.

`features_of` reads what the cache has, computes the rest chunk by chunk, and writes that there;
`extract` runs a backbone over batches of inputs, in torch or onnxruntime. A picture that can't be
decoded is an error, or stands in the result beside those that can.
"""

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from nofuss.cache import Rows, name_of
from nofuss.data.collection import Collection, printable
from nofuss.data.decode import PictureError
from nofuss.data.loader import ahead, batches
from nofuss.data.sampling import Indices, in_order
from nofuss.data.scan import note_looks
from nofuss.distributed import processes
from nofuss.distributed.device import device_of
from nofuss.distributed.threads import one_core
from nofuss.geometry import as_tensor
from nofuss.model.backbones import Backbone, evaluating, joined
from nofuss.model.onnx import OnnxNetwork, accelerate, random_inputs
from nofuss.progress import Progress, silent

ONNX_BATCH, TORCH_BATCH, GPU_BATCH = 8, 16, 64
"""Pictures loaded at once; onnxruntime is fastest while a batch fits the processor's cache."""
TIMED = 200
"""Views from which the speed of a network is noted for `speed_of`."""
CHUNK = 2048
"""Pictures whose features are written to the cache at once: a killed command loses no more."""


class Computed(NamedTuple):
    """Features of a collection, and the pictures that have none."""

    values: Tensor
    """(N, F); the rows of unreadable pictures have no meaning."""
    unreadable: dict[int, PictureError]
    """Row of each picture that can't be decoded, with the reason."""


def features_of(backbone: Backbone, collection: Collection, **options: Any) -> Computed:
    """Return the features (N, F) of a backbone; its networks' side by side, where it has several.

    options: as of `network_features`.
    """
    found = [network_features(part, collection, **options) for part in backbone.parts]
    errors = {row: error for each in found for row, error in each.unreadable.items()}
    return Computed(joined([each.values for each in found]), errors)


def network_features(
    backbone: Backbone,
    collection: Collection,
    *,
    cached: bool = True,
    skip_unreadable: bool = False,
    num_workers: int = 0,
    progress: Progress = silent,
) -> Computed:
    """Return one network's features (N, F) of the centre crops; vectors are their own features.

    backbone: of a copy `for_inference`. cached: read what the cache has, and add what is computed.
    skip_unreadable: report pictures that can't be decoded, and note how the others look (scan.py);
    without it the first one is an error.
    """
    if backbone.preprocessing is None:
        return Computed(as_tensor(np.asarray(collection.array, np.float32)), {})
    keys = collection.keys() if cached and backbone.key is not None else None
    values, unreadable = torch.zeros(len(collection), backbone.features), dict[int, PictureError]()
    missing = _missing(backbone, keys, values)
    if views := len(missing) * backbone.views:
        accelerate(backbone, views, progress=progress)
    began = time.monotonic()
    for start in range(0, len(missing), CHUNK):
        advance = partial(_advance, progress, start, len(missing))
        advance(0)
        part = missing[start : start + CHUNK]
        items = collection.subset(part)
        looks: dict[int, bytes | PictureError] | None = {} if skip_unreadable else None
        found = _compute(backbone, items, looks, num_workers=num_workers, advance=advance)
        values[part] = found.values
        unreadable |= {int(part[i]): error for i, error in found.unreadable.items()}
        if keys is not None:
            _write(backbone, items, [keys[row] for row in part], found, looks or {})
    if views >= TIMED and processes.first():
        _note_speed(backbone, views / (time.monotonic() - began))
    return Computed(values, unreadable)


def _advance(progress: Progress, start: int, total: int, done: int) -> None:
    progress("computing features", start + done, total)


def feature_cache(backbone: Backbone) -> Rows:
    """Return where features of this backbone are cached."""
    return Rows(name_of("features", f"{backbone.key} mirror {backbone.mirror}".encode()))


def _missing(backbone: Backbone, keys: list[bytes] | None, values: Tensor) -> Indices:
    """Copy what the cache has into `values`, and return the other rows."""
    rows = np.arange(len(values))
    if keys is None:
        return rows
    places: dict[bytes, list[int]] = {}
    for row, key in enumerate(keys):
        places.setdefault(key, []).append(row)
    is_known = np.zeros(len(keys), bool)
    for key, value in feature_cache(backbone).read(list(places)):
        if len(value) == 4 * values.shape[1]:
            values.numpy()[places[key]] = np.frombuffer(value, np.float32)
            is_known[places[key]] = True
    # Of several processes one may have read before another has written.
    is_known[:] = processes.all_sum(torch.from_numpy(is_known).int()) == processes.world()
    return rows[~is_known]


def _write(
    backbone: Backbone,
    items: Collection,
    keys: Sequence[bytes],
    found: Computed,
    looks: Mapping[int, bytes | PictureError],
) -> None:
    """Cache what was found, and how this process's pictures look; keys: from before."""
    now = items.keys() or []
    # A picture that changed while it was decoded has features of another content.
    same = [i for i, key in enumerate(now) if i not in found.unreadable and keys[i] == key]
    note_looks({now[i]: look for i in same if isinstance(look := looks.get(i), bytes) and look})
    if processes.first():
        contents = [found.values[i].numpy().tobytes() for i in same]
        feature_cache(backbone).write([now[i] for i in same], contents)


def _compute(
    backbone: Backbone,
    collection: Collection,
    looks: dict[int, bytes | PictureError] | None,
    *,
    num_workers: int,
    advance: Callable[[int], object],
) -> Computed:
    """Return the features of all pictures, which several processes share.

    looks: is filled with how each picture of this process looks, or why it can't be decoded; None
    makes the first that can't an error.
    """
    device = device_of(backbone)
    if isinstance(backbone.network, OnnxNetwork) or device.type != "cpu":
        num_workers = max(1, num_workers)  # to decode while the last batch is computed
    batch = batch_size(backbone)
    chosen = in_order(len(collection), batch)
    total, chosen = len(chosen), chosen[processes.share(len(chosen))]
    loaded = batches(
        collection,
        backbone.preprocessing,
        chosen,
        train=False,
        looks=looks,
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
    errors = [(i, each) for i, each in (looks or {}).items() if isinstance(each, PictureError)]
    reasons = json.dumps({i: (error.reason, error.detail) for i, error in errors})
    unreadable = {
        int(i): PictureError(printable(collection.paths[int(i)]), *reason)
        for text in processes.exchange(reasons)
        for i, reason in json.loads(text).items()
    }
    return Computed(whole.view(-1, backbone.features)[: len(collection)], unreadable)


def _filled(inputs: Tensor, count: int) -> Tensor:
    """Return a batch of `count` inputs: the last is repeated, in the same memory format."""
    return inputs[torch.arange(count).clamp(max=len(inputs) - 1)] if len(inputs) < count else inputs


# Speed


def speed_of(name: str) -> float | None:
    """Return how many views a second a network had when it was last used here, if it ever was."""
    found = dict(_speeds().read([name.encode()]))
    return float(found[name.encode()]) if found else None


def measured_speed(backbone: Backbone) -> float:
    """Return how many views a second a network has here; found out in a second where unknown.

    backbone: of a copy `for_inference`.
    """
    if (known := speed_of(backbone.name)) is not None:
        return known
    accelerate(backbone, 0)
    batch = random_inputs(backbone, TORCH_BATCH)
    extract(backbone, [batch[:1]], count=1)  # the first takes longer
    began = time.monotonic()
    extract(backbone, [batch], count=len(batch))
    speed = len(batch) * backbone.views / (time.monotonic() - began)
    _note_speed(backbone, speed)
    return speed


@torch.no_grad()
def multiplications(backbone: Backbone) -> int:
    """Return how many multiplications a picture costs: the same on every machine."""
    from torch.utils.flop_counter import FlopCounterMode  # slow to import

    with evaluating(backbone), FlopCounterMode(display=False) as counter:
        backbone.network(random_inputs(backbone, 1).to(device_of(backbone)))
    return int(counter.get_total_flops())


def _speeds() -> Rows:
    made_of = f"{torch.__version__} {torch.get_num_threads()} threads"
    return Rows(name_of("speeds", made_of.encode()))


def _note_speed(backbone: Backbone, speed: float) -> None:
    if backbone.key is not None:
        _speeds().write([backbone.name.encode()], [f"{speed:.1f}".encode()])


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
    in_onnx = isinstance(backbone.network, OnnxNetwork)
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
    # With onnxruntime on all cores, torch has one: its waiting threads would spin.
    with evaluating(backbone), one_core() if in_onnx else nullcontext():
        for found in ahead(run, batches, threads, waiting=threads):
            out[done : done + len(found)] = found
            done += len(found)
            advance(done)
    assert done == count
    return out
