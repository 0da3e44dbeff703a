from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nofuss.data.sampling import in_order, m_per_class, shuffled, triplet_batches


@given(st.integers(1, 200), st.integers(1, 50), st.integers(0, 2**32), st.integers(0, 100))
def test_shuffled_takes_every_item_once(count: int, batch: int, seed: int, epoch: int) -> None:
    batches = shuffled(count, batch, seed=seed, epoch=epoch)
    assert sorted(np.concatenate(batches)) == list(range(count))
    assert all(len(b) == batch for b in batches[:-1])
    full = shuffled(count, batch, seed=seed, epoch=epoch, drop_last=True)
    assert len(full) == max(count // batch, 1)
    assert all((a == b).all() for a, b in zip(full, batches, strict=False))


def test_the_order_depends_on_seed_and_epoch_and_nothing_else() -> None:
    def order(seed: int, epoch: int) -> list[int]:
        np.random.default_rng().random()
        return np.concatenate(shuffled(50, 8, seed=seed, epoch=epoch)).tolist()

    assert order(3, 4) == order(3, 4)
    assert len({tuple(order(s, e)) for s in range(4) for e in range(4)}) == 16


def test_in_order_is_in_order() -> None:
    assert [b.tolist() for b in in_order(5, 2)] == [[0, 1], [2, 3], [4]]
    with pytest.raises(ValueError, match="batch is 0"):
        in_order(5, 0)


@given(st.data())
def test_m_per_class_holds_m_items_of_different_classes(data: st.DataObject) -> None:
    m, classes = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 5))
    sizes = data.draw(st.lists(st.integers(1, 9), min_size=classes, max_size=12))
    labels = np.random.default_rng(0).permutation(np.repeat(np.arange(len(sizes)), sizes))
    batches = m_per_class(labels, classes * m, m, seed=data.draw(st.integers(0, 99)), epoch=1)
    assert len(batches) == max(len(labels) // (classes * m), 1)
    for batch in batches:
        rows = labels[batch].reshape(classes, m)
        assert (rows == rows[:, :1]).all()
        assert len(set(rows[:, 0])) == classes
        for label, row in zip(rows[:, 0], batch.reshape(classes, m), strict=True):
            assert len(set(row)) == min(m, sizes[label])


def test_m_per_class_gives_classes_and_items_their_turn() -> None:
    labels = np.repeat(np.arange(8), 12)
    batches = m_per_class(labels, 16, 4, seed=0, epoch=0)
    classes = Counter(labels[np.concatenate(batches)].tolist())
    items = Counter(np.concatenate(batches).tolist())
    assert set(classes.values()) == {12}
    assert set(items.values()) == {1}
    other = m_per_class(labels, 16, 4, seed=0, epoch=1)
    assert any((a != b).any() for a, b in zip(batches, other, strict=True))


def test_m_per_class_says_what_does_not_fit() -> None:
    with pytest.raises(ValueError, match="batch of 10"):
        m_per_class([0, 1], 10, 4, seed=0, epoch=0)
    with pytest.raises(ValueError, match="at most 8"):
        m_per_class([0, 0, 1, 1], 16, 4, seed=0, epoch=0)


def test_triplet_batches_come_apart_into_anchors_positives_and_negatives() -> None:
    triplets = np.arange(21).reshape(7, 3)
    batches = triplet_batches(triplets, 3, seed=0, epoch=0)
    seen = [row for b in batches for row in zip(*np.split(b, 3), strict=True)]
    assert sorted(map(tuple, seen)) == list(map(tuple, triplets.tolist()))
