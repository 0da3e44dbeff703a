"""Groups of linked items, and what is held out of triplets and pairs."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nofuss import linked_groups
from nofuss.config import TrainConfig
from nofuss.data.arrays import from_arrays
from nofuss.data.collection import Collection
from nofuss.data.comparisons import (
    as_groups,
    contradicted,
    links_of,
    to_learn,
    to_score,
    without_groups,
)
from nofuss.data.split import sides_of

BALANCED = TrainConfig(assignment="balanced", test_share=0.25)


def by_hand(links: list[tuple[int, int]], count: int) -> list[int]:
    """Spread the smallest number along links until nothing changes."""
    own = list(range(count))
    for _ in range(count):
        for a, b in links:
            own[a] = own[b] = min(own[a], own[b])
    linked = {item for a, b in links if a != b for item in (a, b)}
    order = sorted({own[item] for item in linked})
    return [order.index(own[item]) if item in linked else -1 for item in range(count)]


@given(st.lists(st.tuples(st.integers(0, 8), st.integers(0, 8)), max_size=12))
def test_groups_are_what_links_connect(links: list[tuple[int, int]]) -> None:
    assert linked_groups(links, 9).groups.tolist() == by_hand(links, 9)


def test_contradictions_are_counted() -> None:
    linked = linked_groups([[0, 1], [1, 2], [3, 4]], 6, apart=[[0, 2], [0, 3], [5, 5], [3, 4]])
    assert linked.contradictions == 2
    assert linked.groups.tolist() == [0, 0, 0, 1, 1, -1]


def test_rows_beyond_the_items_are_refused() -> None:
    with pytest.raises(ValueError, match="links reach from 0 to 9, expected 0 to 5"):
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
    assert data.triplets is not None
    alike, apart = data.triplets[:, :2], data.triplets[:, [0, 2]]
    table = np.r_[np.c_[alike, np.ones(len(alike))], np.c_[apart, np.zeros(len(apart))]]
    return replace(data, triplets=None, pairs=table.astype(np.int64))


@pytest.mark.parametrize("data", [triplets(), pairs()], ids=["triplets", "pairs"])
def test_whole_groups_are_held_out(data: Collection) -> None:
    sides = sides_of(data, BALANCED)
    groups = links_of(data).groups
    assert not set(groups[sides.train]) & set(groups[sides.test])
    assert len(np.unique(groups[sides.test])) == 3
    assert -1 not in groups[sides.train]
    assert sorted([*sides.train, *sides.test]) == list(range(60))
    scored = to_score(data, 0.25, 0, sides.test)
    names = scored.rows
    if scored.collection.triplets is not None:
        rows = names[scored.collection.triplets]
        assert set(rows[:, :2].reshape(-1)) == set(sides.test)
        assert len(rows) == len(np.unique(rows[:, 0])) + (0 in sides.test)
    else:
        assert scored.collection.pairs is not None
        alike = scored.collection.pairs[:, 2] == 1
        rows = names[scored.collection.pairs[:, :2]]
        assert np.isin(rows[alike], sides.test).all()
        assert np.isin(rows[~alike], sides.test).any(axis=1).all()
    everything = sides_of(data, replace(BALANCED, test_share=0.0))
    assert len(everything.test) == 0
    held_out = sides_of(data, replace(BALANCED, holdout=0.25))
    assert len(np.unique(groups[held_out.held_out])) == 2


def test_groups_are_labels_for_training_alone() -> None:
    data = triplets()
    grouped = as_groups(data)
    assert grouped.num_classes == 13  # the item that is never linked is alone
    assert grouped.describe() == data.describe()
    assert without_groups(grouped).fingerprint() == data.fingerprint()
    assert without_groups(data) is data
    assert np.array_equal(sides_of(grouped, BALANCED).test, sides_of(data, BALANCED).test)


def test_triplets_that_contradict_their_groups_are_held_out_one_by_one() -> None:
    random = np.random.default_rng(0)
    rows = np.array([random.permutation(20)[:3] for _ in range(200)])
    data = from_arrays({"vectors": random.normal(size=(20, 3)), "triplets": rows}, name="judged")
    assert "200 that are not" in str(contradicted(data))
    sides = sides_of(data, replace(BALANCED, assignment="dynamic"))
    assert len(sides.train) == 20
    learned, scored = to_learn(data, 0.25, 0), to_score(data, 0.25, 0, sides.test)
    assert learned.triplets is not None
    assert scored.collection.triplets is not None
    both = [*learned.triplets.tolist(), *scored.rows[scored.collection.triplets].tolist()]
    assert sorted(both) == sorted(rows.tolist())
    assert len(scored.collection.triplets) == 50


def test_too_few_groups_are_no_classes() -> None:
    assert "linked items form 3 groups, and 4 are needed" in str(contradicted(triplets(groups=3)))
    assert contradicted(triplets()) is None
