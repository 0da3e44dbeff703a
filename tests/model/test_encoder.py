"""`nofuss.load(run).embed`: the same embedding, however a picture is handed over."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import nofuss
from nofuss.config import Preprocessing
from nofuss.data.open import open_data
from nofuss.errors import DataError, RunError
from nofuss.model.embedder import build_embedder
from nofuss.model.encoder import Encoder
from nofuss.model.saved import save_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    r = np.random.default_rng(0)
    for c in "ab":
        (tmp_path / "photos" / c).mkdir(parents=True)
        for i in range(20):
            size = (int(r.integers(20, 40)), int(r.integers(20, 40)), 3)
            pixels = r.integers(0, 256, size, dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "photos" / c / f"{i:02}.png")
    return tmp_path / "photos"


@pytest.fixture
def pictures(tmp_path: Path) -> Encoder:
    """A model of colour pictures, saved and loaded again."""
    embedder = build_embedder("convnet", dim=8, channels=3)
    embedder.train()(torch.randn(16, 3, 28, 28))  # batch-norm statistics other than 0 and 1
    look = Preprocessing(size=24, resize=28, mean=(120.0,) * 3, std=(60.0,) * 3)
    embedder.backbone.preprocessing = look
    save_model(tmp_path / "run" / "model", embedder, class_names=["a", "b"])
    return nofuss.load(tmp_path / "run")


@pytest.fixture
def vectors(tmp_path: Path) -> Encoder:
    save_model(tmp_path / "v" / "model", build_embedder("identity", dim=4, channels=6))
    return nofuss.load(tmp_path / "v")


def test_paths_pictures_arrays_and_collections_agree(pictures: Encoder, folder: Path) -> None:
    """More of them than a batch."""
    paths = sorted(folder.rglob("*.png"))
    images = [Image.open(path).copy() for path in paths]
    given = {
        "strings": [str(path) for path in paths],
        "pictures": images,
        "arrays": [np.asarray(image) for image in images],
        "tensors": [torch.from_numpy(np.array(image)) for image in images],
        "mixed": [*paths[:7], *images[7:]],
    }
    expected = pictures.embed(paths)
    assert expected.shape == (40, 8)
    assert torch.allclose(expected.norm(dim=1), torch.ones(40))
    for name, items in given.items():
        assert torch.equal(pictures.embed(items), expected), name
    collection = open_data(folder)
    together = pictures.embed_collection(collection)  # in other batches: other kernels round
    assert torch.allclose(together, expected, atol=1e-6)
    assert torch.equal(pictures.embed_collection(collection), together)


def test_one_at_a_time_is_the_same_but_for_rounding(pictures: Encoder, folder: Path) -> None:
    paths = sorted(folder.rglob("*.png"))
    single = torch.cat([pictures.embed([path]) for path in paths[:5]])
    assert torch.allclose(single, pictures.embed(paths)[:5], atol=1e-5)


def test_an_array_of_pictures(pictures: Encoder) -> None:
    batch = np.random.default_rng(0).integers(0, 256, (5, 28, 28, 3), dtype=np.uint8)
    assert torch.equal(pictures.embed(batch), pictures.embed(list(batch)))


@pytest.mark.parametrize(
    "convert",
    [
        lambda image: image.convert("L"),
        lambda image: image.convert("P"),
        lambda image: image.convert("CMYK"),
        lambda image: Image.merge("RGBA", (*image.split(), image.split()[0])),
        lambda image: image.convert("L").convert("1"),
    ],
    ids=["L", "P", "CMYK", "RGBA", "1"],
)
def test_odd_modes_agree_with_their_files(
    convert: Callable[[Image.Image], Image.Image],
    pictures: Encoder,
    folder: Path,
    tmp_path: Path,
) -> None:
    image = convert(Image.open(next(folder.rglob("*.png"))))
    file = tmp_path / "odd.tif"
    image.save(file)
    assert torch.equal(pictures.embed([file]), pictures.embed([image]))


def test_a_turned_picture_is_upright_either_way(pictures: Encoder, tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (30, 24, 3), dtype=np.uint8)
    file = tmp_path / "turned.png"
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(pixels).save(file, exif=exif)
    with Image.open(file) as turned:
        assert torch.equal(pictures.embed([turned]), pictures.embed([file]))
    upright = Image.fromarray(pixels).transpose(Image.Transpose.ROTATE_270)
    assert torch.equal(pictures.embed([upright]), pictures.embed([file]))


def test_vectors_as_array_tensor_list_and_collection(vectors: Encoder, tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(size=(9, 6)).astype(np.float32)
    expected = vectors.embed(x)
    assert expected.shape == (9, 4)
    assert torch.equal(vectors.embed(torch.from_numpy(x)), expected)
    assert torch.equal(vectors.embed(x.tolist()), expected)
    np.savez(tmp_path / "x.npz", vectors=x)
    assert torch.equal(vectors.embed_collection(open_data(tmp_path / "x.npz")), expected)
    head = vectors.embedder.head
    by_hand = x @ head.weight.numpy().T + head.bias.numpy()
    by_hand /= np.linalg.norm(by_hand, axis=1, keepdims=True)
    np.testing.assert_allclose(expected.numpy(), by_hand, atol=1e-6)


def test_none_are_none(pictures: Encoder, vectors: Encoder) -> None:
    assert pictures.embed([]).shape == (0, 8)
    assert vectors.embed(np.empty((0, 6))).shape == (0, 4)


def test_what_can_not_be_embedded(pictures: Encoder, vectors: Encoder, folder: Path) -> None:
    path = next(folder.rglob("*.png"))
    with pytest.raises(ValueError, match="list"):
        pictures.embed(path)
    with pytest.raises(ValueError, match="several pictures"):  # one array is not many pictures
        pictures.embed(np.zeros((20, 30, 3), np.uint8))
    with pytest.raises(ValueError, match=r"expected \(N, 6\)"):
        vectors.embed(np.zeros((2, 5)))
    with pytest.raises(ValueError, match=r"expected uint8"):
        pictures.embed([np.zeros((8, 8, 3))])
    with pytest.raises(DataError, match="missing"):
        pictures.embed([folder / "none.png"])
    with pytest.raises(DataError, match="model takes vectors"):
        vectors.embed_collection(open_data(folder))
    np.savez(folder.parent / "x.npz", vectors=np.zeros((3, 5), np.float32))
    with pytest.raises(DataError, match=r"5 dimensions, .*6"):
        vectors.embed_collection(open_data(folder.parent / "x.npz"))


def test_load_opens_runs_and_model_folders(tmp_path: Path, vectors: Encoder) -> None:
    again = nofuss.load(str(tmp_path / "v" / "model"))
    assert torch.equal(again.embedder.head.weight, vectors.embedder.head.weight)
    with pytest.raises(RunError, match=r"no model\.json"):
        nofuss.load(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(RunError, match=r"nofuss train --out .* --resume"):
        nofuss.load(tmp_path)


def test_training_goes_on_untouched() -> None:
    """An encoder works on a copy: the network it came from keeps its mode and batch norm."""
    embedder = build_embedder("convnet", dim=8, channels=3).train()
    before = {k: v.clone() for k, v in embedder.state_dict().items()}
    Encoder(embedder).embed([np.zeros((28, 28, 3), np.uint8)])
    assert embedder.training
    assert all(torch.equal(before[k], v) for k, v in embedder.state_dict().items())
