import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nofuss.data.collection import Collection, compact_labels, from_dataset, printable
from nofuss.data.open import open_data
from nofuss.data.triplets import Comparisons
from nofuss.errors import DataError


def vectors(labels: list[int] | None, **more: object) -> Collection:
    count = 6 if labels is None else len(labels)
    compact, values = (None, ()) if labels is None else compact_labels(labels)
    return Collection(
        name="v",
        layout="arrays",
        array=np.arange(count * 2, dtype=np.float32).reshape(count, 2),
        labels=compact,
        class_names=tuple(str(v) for v in values),
        **more,
    )


@given(st.lists(st.integers(-(2**40), 2**40), min_size=1))
def test_compact_labels_have_no_gaps_and_can_be_undone(labels: list[int]) -> None:
    compact, values = compact_labels(labels)
    assert set(compact) == set(range(len(values)))
    assert values[compact].tolist() == labels
    assert (np.diff(values) > 0).all()


def test_a_subset_keeps_each_items_array_class_and_split() -> None:
    split = np.array(["train", "test", "train", "test", "train"])
    whole = vectors([7, 3, 9, 3, 7], split=split)
    part = whole.subset([4, 2])
    assert part.array.tolist() == [[8, 9], [4, 5]]
    assert [part.class_names[label] for label in part.labels] == ["7", "9"]
    assert part.num_classes == 2
    assert part.split.tolist() == ["train", "train"]


def test_a_subset_keeps_the_triplets_that_lie_in_it() -> None:
    triplets = Comparisons("triplets", np.array([[0, 1, 2], [3, 4, 5], [1, 0, 5]]))
    whole = vectors(None, comparisons=triplets)
    assert whole.subset([5, 1, 0]).comparisons.rows.tolist() == [[1, 2, 0]]


def test_an_item_may_have_no_label_and_training_never_meets_it() -> None:
    whole = replace(vectors([7, 3, 9, 3]), labels=np.array([1, -1, 2, 0]))
    assert whole.describe() == "3 classes, 4 vectors of 2 dimensions, arrays; 1 without a label"
    part = whole.subset([1, 2, 0])
    assert part.labels.tolist() == [-1, 1, 0]
    assert part.class_names == ("7", "9")
    with pytest.raises(AssertionError, match="last class"):
        part.known_labels()
    assert part.subset([1, 2]).known_labels().tolist() == [1, 0]
    assert not part.subset([0]).is_labelled
    with pytest.raises(AssertionError):
        replace(whole, labels=np.array([1, -2, 2, 0]))


def test_the_fingerprint_follows_the_data_and_not_its_place(photos: Path, tmp_path: Path) -> None:
    first = open_data(photos).fingerprint()
    assert open_data(photos).fingerprint() == first
    moved = tmp_path / "elsewhere"
    photos.rename(moved)
    assert open_data(moved).fingerprint() == first
    (moved / "wren" / "0.png").rename(moved / "tit" / "9.png")
    assert open_data(moved).fingerprint() != first


def test_the_fingerprint_of_arrays_is_that_of_their_values() -> None:
    one, other = vectors([0, 1, 1]), vectors([0, 1, 1])
    assert one.fingerprint() == other.fingerprint()
    other.array[2, 1] += 1e-3
    assert one.fingerprint() != other.fingerprint()
    assert one.fingerprint() != vectors([0, 0, 1]).fingerprint()


@given(st.binary(min_size=1).filter(lambda name: b"\0" not in name and b"/" not in name))
def test_any_file_name_can_be_printed_on_one_line(name: bytes) -> None:
    shown = printable(os.fsdecode(name))
    assert shown.isprintable()
    assert shown.encode() == shown.encode("utf-8", "strict")


def test_a_torch_dataset_brings_its_labels() -> None:
    pairs = torch.utils.data.TensorDataset(torch.arange(4.0)[:, None], torch.tensor([5, 9, 5, 2]))
    collection = from_dataset(pairs)
    assert [collection.class_names[label] for label in collection.labels] == ["5", "9", "5", "2"]
    part = collection.subset([3, 0])
    assert [float(part.dataset[i][0]) for i in range(2)] == [3, 0]
    with pytest.raises(DataError, match=r"3 labels .* 4 items"):
        from_dataset(pairs, labels=[0, 1, 2])
    with pytest.raises(DataError, match="map-style"):
        from_dataset(iter(pairs))
