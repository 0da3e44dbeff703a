"""Arrays of vectors or pictures in one file."""

import io
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from nofuss.data.open import open_data
from nofuss.data.readers.arrays import from_arrays
from nofuss.errors import DataError

rng = np.random.default_rng(0)
X = rng.normal(size=(5, 3))
IMAGES = rng.integers(0, 256, (5, 8, 6), dtype=np.uint8)


def npz(folder: Path, **arrays: np.ndarray) -> Path:
    np.savez(folder / "a.npz", **arrays)
    return folder / "a.npz"


@pytest.mark.parametrize("key", ["vectors", "embeddings", "features", "X", "x"])
def test_vectors_become_float32_and_gaps_in_labels_close(tmp_path: Path, key: str) -> None:
    data = open_data(npz(tmp_path, **{key: X, "y": np.array([4, 2, 4, 9, 2])}))
    np.testing.assert_allclose(data.array, X, rtol=1e-6)
    assert data.array.dtype == np.float32
    assert data.labels.tolist() == [1, 0, 1, 2, 0]
    assert data.class_names == ("2", "4", "9")
    assert len(data.notes) == 1, "renumbered"


def test_labels_may_be_words_or_whole_floats(tmp_path: Path) -> None:
    words = np.array(["b", "a", "b", "c", "a"])
    assert open_data(npz(tmp_path, X=X, labels=words)).class_names == ("a", "b", "c")
    floats = np.array([1.0, 0, 1, 2, 0])
    assert open_data(npz(tmp_path, X=X, labels=floats)).labels.tolist() == [1, 0, 1, 2, 0]
    yes = np.array([True, False, True, True, False])
    assert open_data(npz(tmp_path, X=X, labels=yes)).labels.tolist() == [1, 0, 1, 1, 0]
    assert not open_data(npz(tmp_path, X=X)).is_labelled


def test_pictures_in_any_common_order_of_axes(tmp_path: Path) -> None:
    for images in (IMAGES, IMAGES[:, None], IMAGES[..., None]):
        data = open_data(npz(tmp_path, images=images, y=np.arange(5)))
        assert data.images is data.array
        np.testing.assert_array_equal(data.array, IMAGES)
    color = np.stack([IMAGES, IMAGES // 2, 255 - IMAGES], axis=-1)
    for images in (color, color.transpose(0, 3, 1, 2)):
        data = open_data(npz(tmp_path, images=images, y=np.arange(5)))
        np.testing.assert_array_equal(data.array, color)


def test_class_names_and_splits(tmp_path: Path) -> None:
    more = {
        "labels": np.array([0, 2, 2, 0, 2]),
        "classes": np.array(["a", "b", "c"]),
        "split": np.array(["train", "TEST", "test", "train", "test"]),
    }
    data = open_data(npz(tmp_path, images=IMAGES, **more))
    assert data.class_names == ("a", "c")
    assert data.split.tolist() == ["train", "test", "test", "train", "test"]


def test_safetensors_of_any_precision(tmp_path: Path) -> None:
    file = tmp_path / "a.safetensors"
    save_file({"embeddings": torch.tensor(X).bfloat16(), "labels": torch.arange(5)}, file)
    data = open_data(file)
    np.testing.assert_allclose(data.array, X, rtol=1e-2)
    assert len(data.class_names) == 5


def test_safetensors_hold_names_of_classes_in_their_metadata(tmp_path: Path) -> None:
    """As `nofuss embed` writes them; what another program has there is left alone."""
    file, tensors = tmp_path / "a.safetensors", {"X": torch.tensor(X), "y": torch.arange(5) % 2}
    save_file(tensors, file, metadata={"classes": '["robin", "wren"]'})
    assert open_data(file).class_names == ("robin", "wren")
    for other in ("robin,wren", "2", '["robin"]', '{"a": 1}'):
        save_file(tensors, file, metadata={"classes": other})
        assert open_data(file).class_names == ("0", "1")


def test_triplets_of_rows(tmp_path: Path) -> None:
    triplets = np.array([[0, 1, 2], [4, 3, 0]])
    found = open_data(npz(tmp_path, X=X, triplets=triplets)).comparisons
    assert (found.kind, found.rows.tolist()) == ("triplets", triplets.tolist())
    both = open_data(npz(tmp_path, X=X, triplets=triplets, pairs=triplets))
    assert both.comparisons.kind == "triplets"
    with pytest.raises(DataError, match=r"0…4 in rows 1"):
        open_data(npz(tmp_path, X=X, triplets=triplets + np.array([[0], [1]])))


def with_holes() -> np.ndarray:
    holes = np.repeat(X, 3, axis=0)
    holes[[1, 4, 5, 8, 9, 11, 12], 1] = np.nan
    holes[2, 2] = np.inf
    return holes


@pytest.mark.parametrize(
    ("arrays", "complaint"),
    [
        ({"weights": X}, "weights"),
        ({"X": with_holes()}, r"rows 1, 2, 4, 5, 8, … \(8 in all\)"),
        ({"X": np.float64([[1e300]])}, "rows 0"),
        ({"X": X, "y": np.arange(4)}, r"y is int64 of shape \(4,\)"),
        ({"X": X, "y": X}, "y is"),
        ({"X": X, "y": np.array([0, 1, 2, np.nan, 1])}, "y"),
        ({"X": X, "y": np.array([0.5, 1, 2, 3, 1])}, "y"),
        ({"X": X[:0]}, "X"),
        ({"X": X[0]}, r"float64 of shape \(3,\)"),
        ({"images": IMAGES / 255}, "images"),
        ({"X": X, "y": np.arange(5), "split": np.array(["a"] * 5)}, "split .*rows 0"),
        ({"X": X, "y": np.arange(5), "split": np.array("train")}, "split"),
        ({"X": X, "y": np.arange(5), "split": np.array([b"\xff"] * 5)}, "split"),
        ({"X": X, "y": np.array([2.0**53, 2.0**53 + 2] * 2 + [0])}, "float64"),
        ({"X": X, "triplets": np.empty((0, 3), np.int64)}, "triplets"),
        ({"X": X, "pairs": np.array(3)}, "pairs"),
    ],
)
def test_arrays_that_can_not_be_used(tmp_path: Path, arrays: dict, complaint: str) -> None:
    with pytest.raises(DataError, match=complaint):
        open_data(npz(tmp_path, **arrays))


class Bomb:
    def __reduce__(self) -> tuple:
        return (pytest.fail, ("a pickle was opened",))


def test_nothing_is_unpickled(tmp_path: Path) -> None:
    objects = np.array([Bomb(), Bomb()], dtype=object)
    np.savez(tmp_path / "a.npz", X=objects)
    for name in ("b.npz", "b.safetensors"):
        (tmp_path / name).write_bytes(pickle.dumps(Bomb()))
    for name in ("a.npz", "b.npz", "b.safetensors"):
        with pytest.raises(DataError, match=name):
            open_data(tmp_path / name)


def whole_file() -> bytes:
    buffer = io.BytesIO()
    np.savez(buffer, X=X, y=np.arange(5))
    return buffer.getvalue()


@pytest.mark.fuzz
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.data())
def test_damaged_files_raise_one_line_or_still_read(tmp_path: Path, data: st.DataObject) -> None:
    damaged = bytearray(whole_file())
    for place in data.draw(st.lists(st.integers(0, len(damaged) - 1), max_size=4)):
        damaged[place] ^= data.draw(st.integers(1, 255))
    file = tmp_path / "a.npz"
    file.write_bytes(damaged[: data.draw(st.integers(0, len(damaged)))])
    complaint = ""
    try:
        assert len(open_data(file)) == 5
    except DataError as error:
        complaint = str(error)
    assert "\n" not in complaint


# Numbers at the edge


def test_labels_beyond_int64_keep_their_names(tmp_path: Path) -> None:
    labels = np.array([2**64 - 1, 3, 2**63, 2**64 - 1], np.uint64)
    np.savez(tmp_path / "x.npz", vectors=np.eye(4), labels=labels)
    found = open_data(tmp_path / "x.npz")
    assert found.class_names == ("3", "9223372036854775808", "18446744073709551615")
    assert found.labels.tolist() == [2, 0, 1, 2]


@pytest.mark.parametrize("name", ["x.npz", "x.safetensors"])
def test_arrays_without_end_are_refused_unread(name: str, tmp_path: Path) -> None:
    with (tmp_path / name).open("wb") as file:
        file.truncate(2**42)
    with pytest.raises(DataError, match=f"{name} .* bytes"):
        open_data(tmp_path / name)


def test_pairs_are_rows_and_whether_they_are_alike() -> None:
    vectors = np.eye(4, dtype=np.float32)
    pairs = np.array([[0, 1, 1], [2, 3, 0]], dtype=np.uint8)
    data = from_arrays({"vectors": vectors, "pairs": pairs}, name="x")
    assert (data.comparisons.kind, data.comparisons.rows.tolist()) == ("pairs", pairs.tolist())
    assert data.subset([3, 2]).comparisons.rows.tolist() == [[1, 0, 0]]
    assert data.fingerprint() != from_arrays({"vectors": vectors}, name="x").fingerprint()
    for wrong, words in (
        ([[0, 1, 2], [2, 3, 0]], "pairs .*rows 0"),
        ([[0, 4, 1], [2, 3, 0]], "0…3 in rows 0"),
        ([[0, 1], [2, 3]], r"\(T, 3\)"),
        ([[0, 1, 1]], "different"),
    ):
        with pytest.raises(DataError, match=words):
            from_arrays({"vectors": vectors, "pairs": np.array(wrong)}, name="x")


def test_labels_with_half_a_surrogate(tmp_path: Path) -> None:
    file = tmp_path / "x.npz"
    labels = np.array([f"\ud800{i // 6}" for i in range(72)])
    np.savez(file, vectors=np.random.default_rng(0).normal(size=(72, 4)), labels=labels)
    assert open_data(file).class_names[0] == "\\ud8000"
