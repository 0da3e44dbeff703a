"""From uint8 pictures to the float tensors a backbone sees.

Augmentation is a pure function of (seed, epoch, sample): `draws` hashes the three into a few
uniform numbers, and all that is random in a view is computed from those. Neither the order of
samples nor the number of workers can change a bit.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor
from torch.nn import functional as F

from nofuss.config import Preprocessing

Picture = NDArray[np.uint8]
CROP_Y, CROP_X, FLIP, AFFINE, NUM_DRAWS = 0, 1, 2, slice(3, 9), 9


def draws(seed: int, epoch: int, samples: ArrayLike) -> NDArray[np.float64]:
    """(N, 9) numbers uniform in [0, 1), a row a sample, by SplitMix64 over the counters."""
    with np.errstate(over="ignore"):  # wrapping around is what the hash is made of
        state = _mix(np.uint64(seed % 2**64))
        state = _mix(state ^ np.uint64(epoch))
        rows = _mix(state ^ np.asarray(samples).astype(np.uint64))
        cells = _mix(rows[:, None] + np.arange(1, NUM_DRAWS + 1, dtype=np.uint64) * GOLDEN)
    uniform: NDArray[np.float64] = (cells >> np.uint64(11)) * 2.0**-53
    return uniform


def train_view(
    picture: Picture, preprocessing: Preprocessing, drawn: NDArray[np.float64]
) -> Tensor:
    """One picture, (H, W) or (H, W, 3), cropped, mirrored and bent by a row of `draws`."""
    return train_views([picture], preprocessing, drawn[None])[0]


def test_view(picture: Picture, preprocessing: Preprocessing) -> Tensor:
    """One picture's centre crop, (C, size, size)."""
    return test_views([picture], preprocessing)[0]


def train_views(
    pictures: Sequence[Picture] | Picture, preprocessing: Preprocessing, drawn: NDArray[np.float64]
) -> Tensor:
    """A batch of random crops, mirrored and bent at random, (B, C, size, size)."""
    size = preprocessing.size
    crops = np.empty((len(pictures), size, size, _channels(preprocessing)), dtype=np.uint8)
    for crop, picture, row in zip(crops, pictures, drawn, strict=True):
        _crop(crop, picture, row[CROP_Y], row[CROP_X], preprocessing.flip and row[FLIP] < 0.5)
    views = _normalized(crops, preprocessing)
    return bent(views, preprocessing.affine, drawn) if preprocessing.affine else views


def test_views(pictures: Sequence[Picture] | Picture, preprocessing: Preprocessing) -> Tensor:
    """A batch of centre crops, (B, C, size, size)."""
    size = preprocessing.size
    crops = np.empty((len(pictures), size, size, _channels(preprocessing)), dtype=np.uint8)
    for crop, picture in zip(crops, pictures, strict=True):
        _crop(crop, picture, 0.5, 0.5, False)
    return _normalized(crops, preprocessing)


def bent(views: Tensor, strength: float, drawn: NDArray[np.float64]) -> Tensor:
    """Small random affine changes: each entry of the 2 × 3 matrix moves by up to `strength`.

    So 0.1 turns or shears by up to 0.1 radian, scales by up to a tenth and shifts by up to a
    twentieth of the side. What comes in from outside repeats the border.
    """
    height, width = views.shape[-2:]
    moves = torch.from_numpy(drawn[:, AFFINE] * 2 - 1).float() * strength
    a, b, tx, c, d, ty = moves[:, :, None, None].unbind(1)  # (B, 1, 1) each
    x = (torch.arange(width) * 2 + 1) / width - 1  # pixel centres in −1…1
    y = ((torch.arange(height) * 2 + 1) / height - 1)[:, None]
    grid = torch.stack((x + a * x + b * y + tx, y + c * x + d * y + ty), dim=-1)  # (B, H, W, 2)
    return F.grid_sample(views, grid, padding_mode="border", align_corners=False)


def fitted(images: Picture, preprocessing: Preprocessing) -> Picture:
    """Pictures in one array, (B, H, W[, 3]), in the mode and size that crops are taken from."""
    if images.ndim == 4 and preprocessing.mode == "L":
        weights = np.array([0.299, 0.587, 0.114], dtype=np.float32)  # as Pillow weighs them
        images = np.round(images @ weights).astype(np.uint8)
    height, width = images.shape[1:3]
    side, short = preprocessing.resize, min(height, width)
    size = (
        (side, side)
        if preprocessing.squash
        else tuple(max(side, round(length * side / short)) for length in (height, width))
    )
    if size == (height, width):
        return images
    planes = torch.from_numpy(images.astype(np.float32)).reshape(*images.shape[:3], -1)
    planes = F.interpolate(planes.permute(0, 3, 1, 2), size, mode="bilinear", antialias=True)
    result: Picture = planes.round().clamp(0, 255).byte().permute(0, 2, 3, 1).numpy()
    return result[..., 0] if images.ndim == 3 else result


def _crop(crop: Picture, picture: Picture, y: float, x: float, mirror: Any) -> None:
    """Fill `crop` (size, size, C) from `picture`, at shares y, x of the room there is."""
    size = len(crop)
    room_y, room_x = picture.shape[0] - size, picture.shape[1] - size
    if room_y < 0 or room_x < 0:
        raise ValueError(
            f"a picture of {picture.shape[1]} × {picture.shape[0]} is smaller than the crop of "
            f"{size}; resize must not be below size"
        )
    top, left = int(y * (room_y + 1)), int(x * (room_x + 1))
    window = picture[top : top + size, left : left + size]
    if window.ndim == 2:
        window = window[:, :, None]  # gray fills all channels
    crop[:] = window[:, ::-1] if mirror else window


def _normalized(crops: Picture, preprocessing: Preprocessing) -> Tensor:
    """(B, H, W, C) → (B, C, H, W) in channels-last memory, which costs no copy."""
    channels = crops.shape[-1]
    mean = torch.tensor(preprocessing.mean[:channels])
    std = torch.tensor(preprocessing.std[:channels])
    return torch.from_numpy(crops).float().sub_(mean).div_(std).permute(0, 3, 1, 2)


def _channels(preprocessing: Preprocessing) -> int:
    return 1 if preprocessing.mode == "L" else 3


GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _mix(z: Any) -> Any:
    """SplitMix64's finaliser (Steele, Lea, Flood 2014)."""
    z = z + GOLDEN
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
