"""Neighbours, confusions, doubtful labels, copies and maps, on points whose answer is plain."""

import numpy as np
import pytest

from nofuss.evaluate.findings import confusions, copies, doubtful_labels, project
from nofuss.ranking.neighbours import neighbours


def circle(*degrees: float) -> np.ndarray:
    turns = np.radians(degrees)
    return np.stack([np.cos(turns), np.sin(turns)], 1).astype(np.float32)


def test_one_item_has_no_neighbours() -> None:
    found = neighbours(circle(0))
    assert found.items.shape == (1, 0)
    assert confusions(found, np.array([0])) == []
    assert doubtful_labels(found, np.array([0])) == []
    assert copies(found, within=0.1) == []


def test_confused_classes_by_hand() -> None:
    """Classes 0 and 1 sit in each other's laps, class 2 is far off."""
    x = circle(0, 1, 10, 11, 180, 182)
    found = neighbours(x, k=2)
    (pair,) = confusions(found, np.array([0, 1, 0, 1, 2, 2]))
    assert (pair.first, pair.second, pair.queries, pair.fraction) == (0, 1, 4, 1.0)
    assert set(pair.example) in ({0, 1}, {2, 3})


def test_a_wrong_label_is_found() -> None:
    """Item 3 lies amid class 0 but is called 1."""
    x = circle(0, 2, 4, 3, 90, 92, 94, 96)
    labels = np.array([0, 0, 0, 1, 1, 1, 1, 1])
    (doubt,) = doubtful_labels(neighbours(x, k=3), labels)
    assert (doubt.item, doubt.label, doubt.suggested, doubt.votes) == (3, 1, 0, 1.0)
    assert doubt.nearest in (1, 2)
    assert doubtful_labels(neighbours(x, k=3), np.array([0, 0, 0, 0, 1, 1, 1, 1])) == []


def test_a_wrong_label_is_found_among_few() -> None:
    """Item 8 lies amid the eight of class 0 but is one of nine of class 1, all of which follow."""
    x = circle(*range(0, 16, 2), 7, *range(40, 56, 2))
    labels = np.array([0] * 8 + [1] * 9)
    (doubt,) = doubtful_labels(neighbours(x), labels)
    assert (doubt.item, doubt.label, doubt.suggested) == (8, 1, 0)
    assert (doubt.votes, doubt.places) == (1.0, 8)


def test_two_neighbours_of_a_class_of_two_are_no_evidence() -> None:
    x = circle(0, 1, 2, 10, 11, 12, 13)
    labels = np.array([1, 0, 1, 0, 0, 0, 0])
    assert doubtful_labels(neighbours(x), labels) == []


def test_copies_are_listed_once() -> None:
    x = circle(0, 0, 90, 90.1, 180)
    found = neighbours(x, k=2)
    assert [(c.first, c.second) for c in copies(found, within=0.1)] == [(0, 1), (2, 3)]
    assert [(c.first, c.second) for c in copies(found, within=1e-4)] == [(0, 1)]


@pytest.mark.parametrize("count", [0, 1, 2, 5, 12, 60])
def test_a_map_of_any_size_lies_in_the_unit_square(count: int) -> None:
    x = np.random.default_rng(0).normal(size=(count, 4)).astype(np.float32)
    places = project(x)
    assert places.shape == (count, 2)
    assert np.isfinite(places).all()
    assert ((places >= 0) & (places <= 1)).all()
    assert (project(x) == places).all()
    assert np.isfinite(project(np.ones_like(x))).all()
