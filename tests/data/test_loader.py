"""From a collection to batches: the same bits however they are loaded."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import TensorDataset

from nofuss.config import Preprocessing
from nofuss.data.collection import Collection, from_dataset
from nofuss.data.decode import PictureError, decode_resized
from nofuss.data.loader import Batch, batches
from nofuss.data.open import open_data
from nofuss.data.sampling import in_order, shuffled
from nofuss.data.transforms import draws, train_views

SMALL = Preprocessing(size=10, resize=12)


def load(
    data: Collection, preprocessing: Preprocessing | None = SMALL, **how: object
) -> list[Batch]:
    order = shuffled(len(data), 4, seed=1, epoch=2)
    return list(batches(data, preprocessing, order, **{"train": True, "seed": 1, "epoch": 2} | how))


def same(one: list[Batch], other: list[Batch]) -> bool:
    pairs = [pair for a, b in zip(one, other, strict=True) for pair in zip(a, b, strict=True)]
    return all(torch.equal(a, b) for a, b in pairs)


def test_batches_are_what_a_plain_loop_gives(photos: Path) -> None:
    data = open_data(photos)
    loaded = load(data)
    assert [len(batch.labels) for batch in loaded] == [4, 4, 1]
    for batch in loaded:
        for view, label, index in zip(*batch, strict=True):
            picture = decode_resized(data.paths[index], SMALL)
            assert torch.equal(view, train_views([picture], SMALL, draws(1, 2, [index]))[0])
            assert label == data.labels[index]
        assert batch.inputs.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_workers_do_not_change_a_bit(photos: Path, workers: int) -> None:
    data = open_data(photos)
    for train in (True, False):
        plain = load(data, train=train)
        assert same(plain, load(data, train=train, num_workers=workers))
    assert not same(load(data), load(data, epoch=3))


def test_a_run_that_starts_in_the_middle_sees_the_same_batches(photos: Path) -> None:
    data = open_data(photos)
    order = shuffled(len(data), 2, seed=0, epoch=0)
    late = list(batches(data, SMALL, order[2:], train=True))
    assert same(list(batches(data, SMALL, order, train=True))[2:], late)


def test_a_bad_picture_is_named_also_from_a_worker(photos: Path) -> None:
    data = open_data(photos)
    (photos / "tit" / "1.png").write_bytes(b"not a picture")
    for workers in (0, 2):
        with pytest.raises(PictureError, match=r"tit/1\.png: not a picture"):
            load(data, num_workers=workers)


def test_leaving_early_stops_the_workers(photos: Path) -> None:
    data = open_data(photos)
    loading = batches(data, SMALL, in_order(9, 1), train=False, num_workers=2)
    next(loading)
    loading.close()
    assert list(loading) == []


def test_vectors_are_rows(tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(size=(6, 3)).astype(np.float32)
    np.savez(tmp_path / "v.npz", X=x)
    for batch in load(open_data(tmp_path / "v.npz"), None):
        assert torch.equal(batch.inputs, torch.from_numpy(x)[batch.indices])
        assert (batch.labels == -1).all()
    assert len(np.load(tmp_path / "v.npz")["X"]) == 6


def test_arrays_of_images_go_through_the_same_views(tmp_path: Path) -> None:
    images = np.random.default_rng(0).integers(0, 256, (6, 12, 12), dtype=np.uint8)
    np.savez(tmp_path / "i.npz", images=images, y=np.arange(6))
    data = open_data(tmp_path / "i.npz")
    gray = Preprocessing(size=10, resize=12, mode="L", mean=(0.0,), std=(255.0,), affine=0.1)
    for batch in load(data, gray):
        for view, index in zip(batch.inputs, batch.indices, strict=True):
            expected = train_views([images[index]], gray, draws(1, 2, [index]))[0]
            assert torch.equal(view, expected)
    with pytest.raises(ValueError, match="need a preprocessing"):
        load(data, None)


def test_datasets_give_tensors_as_they_are_and_pictures_through_our_views(photos: Path) -> None:
    tensors = TensorDataset(torch.randn(6, 3, 10, 10), torch.arange(6) % 2)
    for batch in load(from_dataset(tensors)):
        assert torch.equal(batch.inputs, tensors.tensors[0][batch.indices])
        assert torch.equal(batch.labels, tensors.tensors[1][batch.indices])
    data = open_data(photos)
    pictures = [(Image.open(path), int(y)) for path, y in zip(data.paths, data.labels, strict=True)]
    assert same(load(from_dataset(pictures)), load(data))
    arrays = [(np.asarray(picture), y) for picture, y in pictures]
    assert load(from_dataset(arrays))[0].inputs.shape == (4, 3, 10, 10)
