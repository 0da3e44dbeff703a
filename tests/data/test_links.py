"""Groups of linked items, and what is held out of triplets and pairs."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nofuss import linked_groups
from nofuss.config import TrainConfig
from nofuss.data.arrays import from_arrays
from nofuss.data.collection import Collection
from nofuss.data.comparisons import (
    as_groups,
    contradicted,
    groups_of,
    links_of,
    to_learn,
    to_score,
    without_groups,
)
from nofuss.data.links import _is_confirmed
from nofuss.data.split import sides_of

BALANCED = TrainConfig(assignment="balanced", test_fraction=0.25)


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
    everything = sides_of(data, replace(BALANCED, test_fraction=0.0))
    assert len(everything.test) == 0
    held_out = sides_of(data, replace(BALANCED, val_fraction=0.25))
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
    assert "200 of 200 pairs" in str(contradicted(data))
    sides = sides_of(data, replace(BALANCED, assignment="dynamic"))
    assert len(sides.train) == 20
    learned, scored = to_learn(data, 0.25, 0), to_score(data, 0.25, 0, sides.test)
    assert learned.triplets is not None
    assert scored.collection.triplets is not None
    both = [*learned.triplets.tolist(), *scored.rows[scored.collection.triplets].tolist()]
    assert sorted(both) == sorted(rows.tolist())
    assert len(scored.collection.triplets) == 50


def test_two_groups_are_enough_for_an_interval() -> None:
    few = triplets(groups=2)
    assert groups_of(few).tolist() == [*[0] * 5, *[1] * 5, 2]
    assert groups_of(few.subset([*range(5), 10])) is None


def test_too_few_groups_are_no_classes() -> None:
    assert "linked items form 3 groups, and 4 are needed" in str(contradicted(triplets(groups=3)))
    assert contradicted(triplets()) is None
