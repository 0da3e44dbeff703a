import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nofuss.data.collection import Collection, compact_labels
from nofuss.data.open import TrainingData
from nofuss.data.split import split_classes, split_collection, split_of
from nofuss.errors import DataError, UsageError
from tests.asked import settings_of

some_labels = st.lists(st.integers(0, 9), min_size=2, max_size=60).filter(lambda y: len(set(y)) > 1)


def collection(labels: list[int], split: list[str] | None = None) -> Collection:
    compact, values = compact_labels(labels)
    return Collection(
        name="birds",
        layout="arrays",
        array=np.zeros((len(labels), 2), dtype=np.float32),
        labels=compact,
        class_names=tuple(f"class {v}" for v in values),
        split=None if split is None else np.array(split),
    )


@given(some_labels, st.floats(0.01, 0.99), st.integers(0, 2**32))
def test_every_item_is_on_one_side_and_no_class_on_both(
    labels: list[int], fraction: float, seed: int
) -> None:
    y = np.array(labels)
    train, test = split_classes(y, fraction=fraction, seed=seed)
    assert sorted([*train, *test]) == list(range(len(y)))
    assert len(train)
    assert len(test)
    assert not set(y[train]) & set(y[test])
    assert abs(len(set(y[test])) - fraction * len(set(y))) <= 1
    again, _ = split_classes(y, fraction=fraction, seed=seed)
    assert (again == train).all()


def test_the_seed_decides_which_classes_are_held_out() -> None:
    y = np.repeat(np.arange(20), 3)
    splits = [split_classes(y, fraction=0.25, seed=seed) for seed in range(10)]
    held = {tuple(np.unique(y[test])) for _, test in splits}
    assert {len(classes) for classes in held} == {5}
    assert len(held) > 5


def test_one_class_can_not_be_split() -> None:
    with pytest.raises(DataError, match="1 class"):
        split_collection(collection([3, 3, 3]))
    with pytest.raises(ValueError, match=r"fraction is 1.5"):
        split_classes([0, 1], fraction=1.5)


def test_the_datas_own_split_is_used_and_shared_classes_are_refused() -> None:
    own = collection([0, 1, 2, 2], ["train", "train", "test", "test"])
    assert split_collection(own, seed=5)[0].tolist() == [0, 1]
    shared = collection([0, 1, 1, 2], ["train", "train", "test", "test"])
    with pytest.raises(DataError, match=r"1 classes .*\(class 1\)"):
        split_collection(shared)
    assert split_collection(shared, allow_shared=True)[1].tolist() == [2, 3]
    with pytest.raises(DataError, match="testing"):
        split_collection(collection([0, 1], ["train", "train"]))
    with pytest.raises(UsageError, match=r"--test-fraction 0\.3"):
        split_of(TrainingData(own, None, None, ""), settings_of(test_fraction=0.3))
