"""From uint8 pictures to the float tensors a backbone sees.

Augmentation is a pure function of (seed, epoch, sample): `draws` hashes the three into a few
uniform numbers, and everything random in a view is computed from those. Neither the order of
samples nor the number of workers can change a bit.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from nofuss.config import Preprocessing
from nofuss.data.decode import resized_size

Picture = NDArray[np.uint8]
CROP_Y, CROP_X, FLIP, AFFINE = 0, 1, 2, slice(3, 9)
AREA, ASPECT, BRIGHTNESS, CONTRAST, NUM_DRAWS = 9, 10, 11, 12, 13
LONGEST = 4 / 3
"""Largest ratio of the sides of a random crop that is resized to a square."""


def draws(seed: int, epoch: int, samples: ArrayLike) -> NDArray[np.float64]:
    """Return (N, 13) numbers uniform in [0, 1), a row a sample, by SplitMix64 over the counters."""
    with np.errstate(over="ignore"):  # the hash relies on integers that wrap around
        # Seed, epoch and sample are mixed in one after the other; then one hash for each number.
        state = _mix(np.uint64(seed % 2**64))
        state = _mix(state ^ np.uint64(epoch))
        rows = _mix(state ^ np.asarray(samples).astype(np.uint64))
        cells = _mix(rows[:, None] + np.arange(1, NUM_DRAWS + 1, dtype=np.uint64) * GOLDEN)
    uniform: NDArray[np.float64] = (cells >> np.uint64(11)) * 2.0**-53  # 53 bits, as doubles have
    return uniform


def train_views(
    pictures: Sequence[Picture] | Picture, preprocessing: Preprocessing, drawn: NDArray[np.float64]
) -> Tensor:
    """Return random crops with random mirroring and affine changes, (B, C, size, size)."""
    preprocessing = preprocessing.in_training()
    mirrored = preprocessing.flip & (drawn[:, FLIP] < 0.5)
    if preprocessing.zoom < 1 or preprocessing.light:
        pictures = [_zoomed(p, preprocessing, d) for p, d in zip(pictures, drawn, strict=True)]
    views = _views(pictures, preprocessing, drawn[:, CROP_Y], drawn[:, CROP_X], mirrored)
    return bent(views, preprocessing.affine, drawn) if preprocessing.affine else views


def _zoomed(picture: Picture, preprocessing: Preprocessing, drawn: NDArray[np.float64]) -> Picture:
    """Return a random rectangle of a picture at the size of a crop, in changed light."""
    height, width = picture.shape[:2]
    size = preprocessing.size
    if preprocessing.zoom < 1:
        share = preprocessing.zoom + (1 - preprocessing.zoom) * drawn[AREA]
        stretch = LONGEST ** (drawn[ASPECT] - 0.5)  # sides in a ratio from 1/LONGEST to LONGEST
        side = (share * height * width) ** 0.5
        box_height, box_width = min(height, side / stretch), min(width, side * stretch)
        top, left = drawn[CROP_Y] * (height - box_height), drawn[CROP_X] * (width - box_width)
        box = (left, top, left + box_width, top + box_height)
        image = Image.fromarray(picture).resize((size, size), Image.Resampling.BICUBIC, box=box)
        picture = np.asarray(image)
    if not preprocessing.light:
        return picture
    brightness, contrast = 1 + preprocessing.light * (2 * drawn[[BRIGHTNESS, CONTRAST]] - 1)
    values = picture.astype(np.float32) * np.float32(brightness)
    mean = values.mean()
    changed = (values - mean) * np.float32(contrast) + mean
    result: Picture = changed.round().clip(0, 255).astype(np.uint8)
    return result


def center_views(pictures: Sequence[Picture] | Picture, preprocessing: Preprocessing) -> Tensor:
    """Return centre crops, (B, C, size, size)."""
    middle = np.full(len(pictures), 0.5)
    return _views(pictures, preprocessing, middle, middle, np.zeros(len(pictures), dtype=bool))


def bent(views: Tensor, strength: float, drawn: NDArray[np.float64]) -> Tensor:
    """Apply small random affine changes: each entry of the 2 × 3 matrix moves by up to `strength`.

    So 0.1 rotates or shears by up to 0.1 radian, scales by up to a tenth and shifts by up to a
    twentieth of the side. Pixels from outside the picture repeat its border.
    """
    height, width = views.shape[-2:]
    moves = (strength * (drawn[:, AFFINE] * 2 - 1)).astype(np.float32)
    a, b, tx, c, d, ty = moves.T[..., None, None]  # (B, 1, 1) each
    x = _pixel_centers(width)
    y = _pixel_centers(height)[:, None]
    grid = np.empty((len(views), height, width, 2), dtype=np.float32)
    grid[..., 0] = x + a * x + b * y + tx
    grid[..., 1] = y + c * x + d * y + ty
    return F.grid_sample(views, torch.from_numpy(grid), padding_mode="border", align_corners=False)


def _pixel_centers(count: int) -> NDArray[np.float32]:
    """Return the coordinates of pixels for grid_sample: −1…1, half a pixel from the ends."""
    return ((np.arange(count) * 2 + 1) / count - 1).astype(np.float32)


def fitted(images: Picture, preprocessing: Preprocessing) -> Picture:
    """Convert pictures (B, H, W[, 3]) to the mode and size that crops are taken from."""
    if images.ndim == 4 and preprocessing.mode == "L":
        weights = np.array([0.299, 0.587, 0.114], dtype=np.float32)  # as Pillow weights them
        images = np.round(images @ weights).astype(np.uint8)
    height, width = images.shape[1:3]
    size = resized_size(width, height, preprocessing)[::-1]
    if size == (height, width):
        return images
    planes = torch.from_numpy(images.astype(np.float32)).reshape(*images.shape[:3], -1)
    planes = F.interpolate(planes.permute(0, 3, 1, 2), size, mode="bilinear", antialias=True)
    result: Picture = planes.round().clamp(0, 255).byte().permute(0, 2, 3, 1).numpy()
    return result[..., 0] if images.ndim == 3 else result


def _views(
    pictures: Sequence[Picture] | Picture,
    preprocessing: Preprocessing,
    ys: NDArray[np.float64],
    xs: NDArray[np.float64],
    mirrored: NDArray[np.bool_],
) -> Tensor:
    """Crop at the relative positions y, x, and map values to (value − mean) / std.

    Picture by picture, so that each stays in the processor's cache while its bytes become floats
    (two to four times faster than whole-batch operations), and in numpy, whose single thread
    leaves torch's threads to the model. The memory is channels-last, like that of the bytes.
    """
    size, channels = preprocessing.size, 1 if preprocessing.mode == "L" else 3
    mean = np.tile(np.array(preprocessing.mean[:channels], dtype=np.float32), size)  # a row
    std = np.tile(np.array(preprocessing.std[:channels], dtype=np.float32), size)
    views = np.empty((len(pictures), size, size * channels), dtype=np.float32)
    crop = np.empty((size, size, channels), dtype=np.uint8)
    for view, picture, y, x, mirror in zip(views, pictures, ys, xs, mirrored, strict=True):
        window = _window(picture, size, y, x)
        crop[:] = np.take(window, np.arange(size)[::-1], axis=1) if mirror else window
        view[:] = crop.reshape(size, size * channels)
        view -= mean
        view /= std
    return torch.from_numpy(views).view(-1, size, size, channels).permute(0, 3, 1, 2)


def _window(picture: Picture, size: int, y: float, x: float) -> Picture:
    """Return a part of the picture, (size, size, C); C = 1 for gray ones."""
    room_y, room_x = picture.shape[0] - size, picture.shape[1] - size
    if room_y < 0 or room_x < 0:
        raise ValueError(
            f"a picture of {picture.shape[1]} × {picture.shape[0]} is smaller than the crop of "
            f"{size}; resize must not be below size"
        )
    top, left = int(y * (room_y + 1)), int(x * (room_x + 1))
    window = picture[top : top + size, left : left + size]
    return window if window.ndim == 3 else window[:, :, None]


GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _mix(z: Any) -> Any:
    """Apply SplitMix64's finaliser (Steele, Lea, Flood 2014)."""
    z = z + GOLDEN
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
