from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from scipy.stats import kstest
from torch.nn import functional as F

from nofuss.config import Preprocessing
from nofuss.data import transforms
from nofuss.data.transforms import bent, draws, fitted, train_views

rng = np.random.default_rng(0)
PICTURE = rng.integers(0, 256, (20, 30, 3), dtype=np.uint8)
PLAIN = Preprocessing(size=16, resize=20, flip=False)


def back(view: torch.Tensor, preprocessing: Preprocessing) -> np.ndarray:
    """A view as the uint8 picture (H, W, C) it shows."""
    mean, std = torch.tensor(preprocessing.mean), torch.tensor(preprocessing.std)
    return (view.permute(1, 2, 0) * std + mean).round().byte().numpy()


def test_draws_are_uniform_and_independent() -> None:
    u = draws(1, 2, np.arange(20_000))
    assert all(kstest(column, "uniform").pvalue > 1e-4 for column in u.T)
    assert np.abs(np.corrcoef(u.T) - np.eye(u.shape[1])).max() < 0.03
    assert np.abs(np.corrcoef(u[:-1, 0], u[1:, 0])[0, 1]) < 0.03


@given(st.integers(0, 2**63), st.integers(0, 10_000), st.permutations(range(8)))
def test_draws_of_a_sample_do_not_depend_on_its_neighbours(
    seed: int, epoch: int, order: list[int]
) -> None:
    together = draws(seed, epoch, np.arange(8))
    assert (draws(seed, epoch, np.array(order)) == together[order]).all()
    assert (draws(seed, epoch, np.array([5])) == together[[5]]).all()
    assert (draws(seed, epoch + 1, np.arange(8)) != together).all()
    assert (draws(seed + 1, epoch, np.arange(8)) != together).all()


def test_the_test_view_is_the_middle() -> None:
    view = transforms.center_views([PICTURE], PLAIN)[0]
    assert view.shape == (3, 16, 16)
    assert view.dtype == torch.float32
    np.testing.assert_array_equal(back(view, PLAIN), PICTURE[2:18, 7:23])
    assert view[0, 0, 0] == (int(PICTURE[2, 7, 0]) - 127) / 128


def test_train_views_are_windows_of_the_picture_all_of_them_in_time() -> None:
    windows = {
        PICTURE[y : y + 16, x : x + 16][:, ::step].tobytes(): (y, x, step)
        for y in range(5)
        for x in range(15)
        for step in (1, -1)
    }
    flipping = Preprocessing(size=16, resize=20)
    views = train_views([PICTURE] * 2000, flipping, draws(0, 0, np.arange(2000)))
    seen = {windows[back(view, flipping).tobytes()] for view in views}
    assert len(seen) == len(windows) == 150
    steady = train_views([PICTURE] * 200, PLAIN, draws(0, 0, np.arange(200)))
    assert {windows[back(view, PLAIN).tobytes()][2] for view in steady} == {1}


@pytest.mark.parametrize("affine", [0.0, 0.2])
def test_a_batch_holds_what_each_picture_gives_alone(affine: float) -> None:
    preprocessing = Preprocessing(size=16, resize=20, affine=affine)
    pictures = [rng.integers(0, 256, (20, 20 + i, 3), dtype=np.uint8) for i in range(9)]
    drawn = draws(3, 1, np.arange(9))
    together = train_views(pictures, preprocessing, drawn)
    for i, picture in enumerate(pictures):
        assert torch.equal(together[i], train_views([picture], preprocessing, drawn[i : i + 1])[0])
    assert together.is_contiguous(memory_format=torch.channels_last) or affine


def test_gray_pictures_fill_all_channels_or_one() -> None:
    gray = PICTURE[..., 0]
    one = Preprocessing(size=16, resize=20, mode="L", mean=(127.0,), std=(128.0,))
    assert transforms.center_views([gray], one)[0].shape == (1, 16, 16)
    three = transforms.center_views([gray], PLAIN)[0]
    assert torch.equal(three[0], three[2])


def test_a_crop_larger_than_the_picture_is_refused() -> None:
    with pytest.raises(ValueError, match="crop of 24"):
        transforms.center_views([PICTURE], Preprocessing(size=24, resize=20))


def test_bending_is_affine_grid_and_grid_sample() -> None:
    views = torch.rand(5, 2, 12, 15)
    drawn = draws(0, 0, np.arange(5))
    moves = torch.from_numpy(drawn[:, transforms.AFFINE] * 2 - 1).float().reshape(5, 2, 3)
    theta = torch.eye(2, 3) + 0.15 * moves
    grid = F.affine_grid(theta, [5, 2, 12, 15], align_corners=False)
    expected = F.grid_sample(views, grid, padding_mode="border", align_corners=False)
    torch.testing.assert_close(bent(views, 0.15, drawn), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(bent(views, 0.0, drawn), views, atol=1e-5, rtol=1e-5)


def test_arrays_are_fitted_as_pillow_would() -> None:
    smooth = np.asarray(Image.fromarray(PICTURE).resize((90, 60), Image.Resampling.BICUBIC))
    fit = fitted(smooth[None], Preprocessing(size=16, resize=20))[0]
    pillow = Image.fromarray(smooth).resize((30, 20), Image.Resampling.BILINEAR)
    assert fit.shape == (20, 30, 3)
    assert np.abs(fit.astype(int) - np.asarray(pillow)).max() <= 2
    gray = fitted(smooth[None], Preprocessing(size=16, resize=60, mode="L"))[0]
    assert np.abs(gray.astype(int) - np.asarray(Image.fromarray(smooth).convert("L"))).max() <= 1
    square = fitted(smooth[None, ..., 0], Preprocessing(size=16, resize=20, squash=True))
    assert square.shape == (1, 20, 20)


def test_zoomed_views_show_a_share_of_the_picture() -> None:
    """A channel a direction, rising evenly: its range in a view is the side of the rectangle."""
    height, width = 200, 300
    ramps = np.zeros((height, width, 3), dtype=np.uint8)
    ramps[..., 0] = np.linspace(0, 255, height)[:, None]
    ramps[..., 1] = np.linspace(0, 255, width)
    zooming = Preprocessing(size=64, resize=200, zoom=0.25)
    views = train_views([ramps] * 300, zooming, draws(0, 0, np.arange(300)))
    assert views.shape == (300, 3, 64, 64)
    spans = views.amax((2, 3)) - views.amin((2, 3))  # of 255 / 128
    shares = (spans[:, 0] * spans[:, 1]).numpy() / (255 / 128) ** 2
    assert 0.2 < shares.min() < 0.3
    assert 0.85 < shares.max() <= 1
    mirrored = views[:, 1, 0, 0] > views[:, 1, 0, -1]
    assert 0.4 < mirrored.float().mean() < 0.6


@pytest.mark.parametrize("zoom", [1.0, 0.25])
def test_training_can_see_smaller_crops_than_search(zoom: float) -> None:
    smaller = replace(PLAIN, train_size=PLAIN.size - 4, zoom=zoom)
    drawn = draws(0, 0, [0])
    views = train_views([PICTURE], smaller, drawn)
    expected = train_views([PICTURE], replace(PLAIN, size=PLAIN.size - 4, zoom=zoom), drawn)
    assert torch.equal(views, expected)
    same = transforms.center_views([PICTURE], smaller)
    assert torch.equal(same, transforms.center_views([PICTURE], PLAIN))


def test_light_changes_brightness_and_contrast() -> None:
    lit = Preprocessing(size=16, resize=20, flip=False, light=0.25)
    even = np.full((20, 20, 3), 100, dtype=np.uint8)
    views = train_views([even] * 200, lit, draws(0, 0, np.arange(200)))
    values = views * 128 + 127
    assert values.std((1, 2, 3)).max() == 0  # contrast does nothing to an even picture
    assert 75 <= values.min() < 78
    assert 122 < values.max() <= 125
    assert (
        train_views([PICTURE], lit, draws(0, 0, [0])) != transforms.center_views([PICTURE], PLAIN)
    ).any()
