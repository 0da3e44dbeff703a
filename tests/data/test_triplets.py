"""Groups of linked items, and what is held out of triplets and pairs."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import nofuss
from nofuss import linked_groups
from nofuss.data.collection import Collection
from nofuss.data.open import open_training_data
from nofuss.data.readers.arrays import from_arrays
from nofuss.data.split import split_of
from nofuss.data.triplets import Comparisons, _is_confirmed, held_out
from nofuss.errors import DataError, UsageError
from tests.asked import settings_of

GROUPED = settings_of(test_fraction=0.25)


def by_hand(links: list[tuple[int, int]], count: int) -> list[int]:
    """Spread the smallest number along links until nothing changes."""
    own = list(range(count))
    for _ in range(count):
        for a, b in links:
            own[a] = own[b] = min(own[a], own[b])
    linked = {item for a, b in links if a != b for item in (a, b)}
    order = sorted({own[item] for item in linked})
    return [order.index(own[item]) if item in linked else -1 for item in range(count)]


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 8), st.integers(0, 8)), max_size=12))
def test_groups_are_what_links_connect(links: list[tuple[int, int]]) -> None:
    assert linked_groups(links, 9).groups.tolist() == by_hand(links, 9)


def test_contradictions_are_counted() -> None:
    triangle = [[0, 1], [1, 2], [0, 2]]
    linked = linked_groups([*triangle, [3, 4]], 6, apart=[[0, 2], [0, 3], [5, 5], [1, 2]])
    assert linked.contradictions == 2
    assert linked.dropped == 1
    assert linked.groups.tolist() == [0, 0, 0, -1, -1, -1]  # nothing confirms 3–4


def test_a_wrong_link_is_dropped() -> None:
    """Two squares, and a link between them that two known differences contradict."""
    squares = [[0, 1], [1, 2], [2, 3], [3, 0], [4, 5], [5, 6], [6, 7], [7, 4]]
    alone = linked_groups(squares, 8)
    assert linked_groups([*squares, [0, 4]], 8).groups.max() == 0
    linked = linked_groups([*squares, [0, 4]], 8, apart=[[1, 5], [2, 6]])
    assert linked.groups.tolist() == alone.groups.tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    assert (linked.contradictions, linked.dropped) == (0, 1)


def test_confirmation_against_walks_by_hand() -> None:
    random = np.random.default_rng(0)
    links = {tuple(sorted(random.permutation(12)[:2].tolist())) for _ in range(16)}
    near = {i: {a + b - i for a, b in links if i in (a, b)} for i in range(12)}

    def confirmed(a: int, b: int) -> bool:
        two = near[a] & near[b]
        three = [(c, d) for c in near[a] - {b} for d in near[b] - {a} if d in near[c]]
        return bool(two or three)

    ends = np.array(sorted(links))
    assert _is_confirmed(ends, 12).tolist() == [confirmed(a, b) for a, b in ends.tolist()]


def test_three_percent_of_wrong_links_do_not_join_classes() -> None:
    random = np.random.default_rng(0)
    labels = np.repeat(np.arange(30), 15)
    anchor = random.integers(450, size=1500)
    positive = 15 * labels[anchor] + random.integers(15, size=1500)
    is_wrong = random.random(1500) < 0.03
    positive[is_wrong] = random.integers(450, size=is_wrong.sum())
    negative = (anchor + 15 * random.integers(1, 30, size=1500)) % 450
    links, apart = np.stack([anchor, positive], 1), np.stack([anchor, negative], 1)
    assert linked_groups(links, 450).groups.max() < 10
    groups = linked_groups(links, 450, apart=apart).groups
    found = [labels[groups == group] for group in range(int(groups.max()) + 1)]
    of_one_class = sum(np.bincount(each).max() for each in found)
    assert of_one_class > 0.9 * (groups >= 0).sum() > 0.8 * 450


def test_rows_beyond_the_items_are_refused() -> None:
    with pytest.raises(ValueError, match="0 to 9"):
        linked_groups([[0, 9]], 6)


def triplets(groups: int = 12, size: int = 5) -> Collection:
    """Chains within each group, and negatives of the next one; the last item is never linked."""
    count = groups * size
    rows = [
        (g * size + i, g * size + i + 1, (g * size + size + i) % count)
        for g in range(groups)
        for i in range(size - 1)
    ]
    vectors = np.random.default_rng(0).normal(size=(count + 1, 3))
    arrays = {"vectors": vectors, "triplets": np.array([*rows, (0, 1, count)])}
    return from_arrays(arrays, name="chains")


def pairs() -> Collection:
    data = triplets()
    alike, apart = data.comparisons.rows[:, :2], data.comparisons.apart
    table = np.r_[np.c_[alike, np.ones(len(alike))], np.c_[apart, np.zeros(len(apart))]]
    return replace(data, comparisons=Comparisons("pairs", table.astype(np.int64)))


def judged() -> Collection:
    """Triplets at random, which no grouping agrees with."""
    random = np.random.default_rng(0)
    rows = np.array([random.permutation(20)[:3] for _ in range(200)])
    return from_arrays({"vectors": random.normal(size=(20, 3)), "triplets": rows}, name="judged")


@pytest.mark.parametrize("data", [triplets(), pairs()], ids=["triplets", "pairs"])
def test_linked_items_are_labels_and_whole_groups_are_held_out(data: Collection) -> None:
    opened = open_training_data(data, GROUPED)
    labels = opened.collection.labels
    assert opened.collection.num_classes == 12
    assert labels.tolist() == [*np.repeat(np.arange(12), 5), -1]  # the last is never linked
    assert opened.collection.describe() == data.describe()
    assert opened.fingerprint == data.fingerprint()
    assert not opened.collection.has_classes
    split = split_of(opened, GROUPED)
    assert not set(labels[split.train]) & set(labels[split.test])
    assert len(np.unique(labels[split.test])) == 3
    assert opened.collection.subset(split.train).known_labels().min() == 0
    assert sorted([*split.train, *split.test]) == list(range(60))
    scored = held_out(opened.comparisons, split.test, len(data))
    rows = scored.rows[scored.comparisons.items]
    if scored.comparisons.kind == "triplets":
        assert set(rows[:, :2].reshape(-1)) == set(split.test)
        assert len(rows) == len(np.unique(rows[:, 0])) + (0 in split.test)
    else:
        alike = scored.comparisons.rows[:, 2] == 1
        assert np.isin(rows[alike], split.test).all()
        assert np.isin(rows[~alike], split.test).any(axis=1).all()
    assert len(split_of(opened, replace(GROUPED, test_fraction=0.0)).test) == 0
    with_val = split_of(opened, replace(GROUPED, val_fraction=0.25))
    assert len(np.unique(labels[with_val.val])) == 2


def test_triplets_can_be_learned_as_they_are() -> None:
    """Groups then only say what is held out; items without a link are negatives of others."""
    grouped, asked = triplets(), replace(GROUPED, assignment="dynamic")
    bare = open_training_data(grouped, asked)
    assert not bare.collection.is_labelled
    split = split_of(bare, asked)
    by_groups = split_of(open_training_data(grouped, GROUPED), GROUPED)
    assert split.test.tolist() == by_groups.test.tolist()
    assert split.train.tolist() == [*by_groups.train, 60]
    with pytest.raises(UsageError, match="--assignment balanced"):
        open_training_data(pairs(), asked)


def test_triplets_that_contradict_their_groups_are_held_out_one_by_one() -> None:
    data = judged()
    opened = open_training_data(data, GROUPED)
    assert any("200 of 200 pairs" in note for note in opened.notes)
    split = split_of(opened, GROUPED)
    assert len(split.train) == 20
    scored = held_out(opened.comparisons, split.test, 20)
    learned = opened.collection.comparisons.rows.tolist()
    both = [*learned, *scored.rows[scored.comparisons.rows].tolist()]
    assert sorted(both) == sorted(data.comparisons.rows.tolist())
    assert len(scored.comparisons) == 50
    with pytest.raises(DataError, match="--assignment dynamic"):
        open_training_data(data, replace(GROUPED, assignment="balanced"))


def test_resolved_settings_open_the_same() -> None:
    """A resumed or evaluated run holds the assignment that was chosen by the data."""
    for data in (triplets(), judged()):
        first = open_training_data(data, GROUPED)
        chosen = "static" if first.collection.is_labelled else "dynamic"
        again = open_training_data(data, replace(GROUPED, assignment=chosen))
        assert first.collection.fingerprint() == again.collection.fingerprint()
        assert np.array_equal(first.comparisons.rows, again.comparisons.rows)


def test_two_groups_are_enough_for_an_interval() -> None:
    few = triplets(groups=2)
    assert few.comparisons.resampled_together(11).tolist() == [*[0] * 5, *[1] * 5, 2]
    assert few.subset([*range(5), 10]).comparisons.resampled_together(6) is None


def test_too_few_groups_are_no_classes() -> None:
    few, enough = triplets(groups=3).comparisons, triplets().comparisons
    assert "3 groups" in str(few.doubt(few.links(16)))
    assert enough.doubt(enough.links(61)) is None


def test_what_has_no_order_is_not_scored() -> None:
    alike = Comparisons("pairs", np.array([[0, 1, 1], [2, 3, 1]]))
    assert held_out(alike, np.arange(4), 4) is None
    assert held_out(Comparisons("triplets", np.empty((0, 3), np.int64)), np.arange(4), 4) is None
    assert held_out(None, np.arange(4), 4) is None


def test_two_groups_are_left_to_train_on(tmp_path: Path) -> None:
    """Whatever fraction is held out; refused before a run is made."""
    triplets = np.array([[i, i + 1, (i + 2) % 8] for i in range(0, 8, 2)])
    np.savez(tmp_path / "t.npz", vectors=np.eye(8, dtype=np.float32), triplets=triplets)
    with pytest.raises(DataError, match="4 groups"):
        nofuss.train(tmp_path / "t.npz", test_fraction=0.9, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
