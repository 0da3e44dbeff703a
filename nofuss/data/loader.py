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
from nofuss.data.decode import PictureError, decode, in_mode, resized
from nofuss.data.scan import look_at
from nofuss.data.transforms import center_views, draws, fitted, train_views

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
                inputs = center_views(inputs, preprocessing)
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
        raise ValueError("pictures need a preprocessing; only vectors have none")
    if (images := collection.images) is not None:
        return lambda chosen: fitted(images[chosen], preprocessing)
    if collection.dataset is not None:
        return lambda chosen: _from_dataset(collection.dataset, chosen, preprocessing)

    def decoded(row: int) -> NDArray[np.uint8]:
        path, mode, side = collection.paths[row], preprocessing.mode, preprocessing.resize
        try:
            image = decode(path, mode=mode, at_least=side)
        except PictureError as error:
            if looks is None:
                raise
            looks[row] = error
            image = Image.new(mode, (side, side))
        else:
            if looks is not None:
                looks[row] = look_at(image)
        return resized(image, preprocessing)

    return lambda chosen: [decoded(int(row)) for row in chosen]


def _from_dataset(dataset: Any, chosen: Indices, preprocessing: Preprocessing) -> Fetched:
    """Load inputs of a torch Dataset: pictures are resized like files, tensors are stacked."""
    items = [_as_array(dataset[int(i)][0]) for i in chosen]
    if isinstance(items[0], Image.Image):
        upright = (ImageOps.exif_transpose(item) for item in items)  # as for files
        return [resized(in_mode(image, preprocessing.mode), preprocessing) for image in upright]
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
