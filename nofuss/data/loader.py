"""Batches of inputs and labels, in the order a sampler gives.

`num_workers` threads decode pictures, a few batches ahead (Pillow's decoders release Python's
lock); in training at least one does. Arrays are transformed a batch at a time; vectors are rows.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageOps
from torch import Tensor

from nofuss.config import Preprocessing
from nofuss.data.collection import Collection
from nofuss.data.decode import PictureError, decode_for, decode_resized, in_mode, resized
from nofuss.data.duplicates import look_at
from nofuss.data.transforms import draws, fitted, test_views, train_views

Indices = NDArray[np.int64]
AHEAD = 3
"""Batches that are prepared while one is in use, if there are workers."""


class Batch(NamedTuple):
    """Items of a step.

    In training without labels (None) they are anchors, positives and negatives in thirds, and of
    several processes each has its share of the inputs, and all labels and indices.
    """

    inputs: Tensor  # (B, C, H, W) or (B, D)
    labels: Tensor | None  # (B,)
    indices: Tensor  # (B,) rows of the collection


def batches(
    collection: Collection,
    preprocessing: Preprocessing | None,
    index_batches: Sequence[Indices],
    *,
    train: bool,
    seed: int = 0,
    epoch: int = 0,
    looks: dict[int, bytes | PictureError] | None = None,
    num_workers: int = 0,
    pin: bool = False,
) -> Iterator[Batch]:
    """Return the batches that a sampler chose; `train` takes random views, else centre crops.

    `preprocessing` is None for vectors. looks: is filled with how each file looks, by row, or with
    the error of one that can't be decoded, which is black then; without it the first one is raised.
    pin: put the inputs into pinned memory, from which a GPU copies asynchronously.
    """
    fetch = _fetcher(collection, preprocessing, looks)

    def load(chosen: Indices) -> Batch:
        inputs = fetch(chosen)
        if not isinstance(inputs, Tensor):
            assert preprocessing is not None
            if train:
                inputs = train_views(inputs, preprocessing, draws(seed, epoch, chosen))
            else:
                inputs = test_views(inputs, preprocessing)
        inputs = inputs.pin_memory() if pin else inputs
        return Batch(inputs, torch.from_numpy(collection.labels[chosen]), torch.from_numpy(chosen))

    if train and collection.paths and len(index_batches) > 1:
        num_workers = max(1, num_workers)
    return ahead(load, index_batches, num_workers, waiting=max(AHEAD, num_workers))


Item = TypeVar("Item")
Made = TypeVar("Made")


def ahead(
    make: Callable[[Item], Made], items: Iterable[Item], num_workers: int, *, waiting: int
) -> Iterator[Made]:
    """Yield what `make` gives for each item, in order; threads have made up to `waiting` before."""
    if not num_workers:
        yield from map(make, items)
        return
    pool = ThreadPoolExecutor(num_workers, thread_name_prefix="nofuss-ahead")
    begun: deque[Future[Made]] = deque()
    try:
        for item in items:
            begun.append(pool.submit(make, item))
            if len(begun) > waiting:
                yield begun.popleft().result()
        while begun:
            yield begun.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def on_device(loaded: Iterable[Batch], device: torch.device) -> Iterator[Batch]:
    """Yield the batches with their inputs on a device, each copied while the one before is in use.

    On a GPU the copies have a stream of their own, and do not wait for the work of the others.
    """
    if device.type == "cpu":
        yield from loaded
        return
    lane = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
    waiting: tuple[Batch, torch.cuda.Event | None] | None = None
    for batch in loaded:
        with torch.cuda.stream(lane):
            inputs = batch.inputs.to(device, non_blocking=True)
        following = batch._replace(inputs=inputs), lane.record_event() if lane else None
        if waiting is not None:
            yield _arrived(*waiting)
        waiting = following
    if waiting is not None:
        yield _arrived(*waiting)


def _arrived(batch: Batch, copied: torch.cuda.Event | None) -> Batch:
    """Return a batch that the present stream may use: it waits for the copy, the host does not."""
    if copied is not None:
        present = torch.cuda.current_stream(batch.inputs.device)
        present.wait_event(copied)
        batch.inputs.record_stream(present)  # else its memory could be reused too early
    return batch


Fetched = Tensor | Sequence[NDArray[np.uint8]] | NDArray[np.uint8]


def _fetcher(
    collection: Collection,
    preprocessing: Preprocessing | None,
    looks: dict[int, bytes | PictureError] | None,
) -> Callable[[Indices], Fetched]:
    """Return a function that loads items: as pictures still to be transformed, or as tensors."""
    if (vectors := collection.vectors) is not None:
        return lambda chosen: torch.from_numpy(vectors[chosen])
    if preprocessing is None:
        raise ValueError(f"{collection.kind} need a preprocessing; only vectors have none")
    if (images := collection.images) is not None:
        return lambda chosen: fitted(images[chosen], preprocessing)
    if collection.dataset is not None:
        return lambda chosen: _from_dataset(collection.dataset, chosen, preprocessing)

    def decoded(row: int) -> NDArray[np.uint8]:
        if looks is None:
            return decode_resized(collection.paths[row], preprocessing)
        try:
            image = decode_for(collection.paths[row], preprocessing)
            looks[row] = look_at(image)
            return np.asarray(resized(image, preprocessing))
        except PictureError as error:
            looks[row] = error
            side = preprocessing.resize
            return np.zeros((side, side, 3)[: 2 if preprocessing.mode == "L" else 3], np.uint8)

    return lambda chosen: [decoded(int(row)) for row in chosen]


def _from_dataset(dataset: Any, chosen: Indices, preprocessing: Preprocessing) -> Fetched:
    """Load inputs of a torch Dataset: pictures are resized like files, tensors are stacked."""
    items = [_as_array(dataset[int(i)][0]) for i in chosen]
    if isinstance(items[0], Image.Image):
        upright = (ImageOps.exif_transpose(item) for item in items)  # as for files
        fit = (in_mode(image, preprocessing.mode) for image in upright)
        return [np.asarray(resized(image, preprocessing)) for image in fit]
    if isinstance(items[0], np.ndarray) and items[0].dtype == np.uint8:
        return [fitted(item[None], preprocessing)[0] for item in items]
    return torch.stack([torch.as_tensor(item) for item in items])


def _as_array(item: Any) -> Any:
    """Return a picture in a tensor of bytes, (C, H, W) as torchvision has it, as an array."""
    if not isinstance(item, Tensor) or item.dtype != torch.uint8:
        return item
    channels_first = item.ndim == 3 and item.shape[0] in (1, 3)
    picture = (item.permute(1, 2, 0) if channels_first else item).cpu().numpy()
    return picture[..., 0] if picture.ndim == 3 and picture.shape[2] == 1 else picture
