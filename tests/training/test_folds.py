"""Folds hold out whole classes, neighbours together, and score what was not seen."""

import pytest
import torch

from nofuss.evaluate.protocol import pooled
from nofuss.training.folds import class_folds, query_scores, sample_rows


def test_folds_hold_out_every_class_once_and_neighbours_together() -> None:
    labels = torch.arange(10).repeat(3)
    folds = class_folds(labels, 4)
    held_out = [sorted(set(labels[fold.held_out].tolist())) for fold in folds]
    assert held_out == [[0, 1, 2], [3, 4, 5], [6, 7], [8, 9]]
    for fold in folds:
        assert torch.equal(torch.cat([fold.held_out, fold.others]).sort().values, torch.arange(30))
        assert not set(labels[fold.held_out].tolist()) & set(labels[fold.others].tolist())


@pytest.mark.parametrize(("classes", "expected"), [(2, 0), (3, 0), (4, 2), (5, 2), (6, 3), (9, 4)])
def test_few_classes_make_fewer_folds_or_none(classes: int, expected: int) -> None:
    assert len(class_folds(torch.arange(classes).repeat(2), 4)) == expected


def test_classes_of_one_item_make_no_folds() -> None:
    assert class_folds(torch.arange(40), 4) == []


@pytest.mark.parametrize("flip", [False, True])
def test_classes_numbered_by_frequency_are_folded_all_the_same(flip: bool) -> None:
    sizes = torch.cat([torch.full((10,), 4), torch.ones(30, dtype=torch.long)])
    labels = torch.arange(40).repeat_interleave(sizes.flip(0) if flip else sizes)
    folds = class_folds(labels, 4)
    several = torch.bincount(labels) > 1
    found = [int(several[labels[fold.held_out].unique()].sum()) for fold in folds]
    assert sorted(found) == [2, 2, 3, 3]
    assert sum(len(fold.held_out) for fold in folds) == len(labels)
    rows = sample_rows(labels, torch.arange(len(labels)), 20)
    assert several[labels[rows]].all(), "those that can be searched for come first"
    assert len(query_scores(torch.randn(len(rows), 3), labels[rows]).recall) == len(rows)


def test_a_sample_keeps_classes_whole_as_far_as_it_can() -> None:
    labels = torch.arange(10).repeat_interleave(30)
    rows = torch.arange(300)
    some = sample_rows(labels, rows, 50)
    assert torch.equal(torch.bincount(labels[some]), torch.full((10,), 5))
    many = sample_rows(torch.arange(1000).repeat_interleave(2), torch.arange(2000), 100)
    assert len(many) == 100
    assert torch.equal(sample_rows(labels, rows, 300), rows)


def test_scores_are_of_each_query() -> None:
    x = torch.tensor([[1.0, 0], [0.99, 0.1], [0, 1], [0.1, 0.99], [-1, 0]])
    labels = torch.tensor([0, 0, 1, 1, 2])  # the last one is alone: no query
    found = query_scores(x, labels)
    assert found.recall.tolist() == [1, 1, 1, 1]
    assert found.labels.tolist() == [0, 0, 1, 1]
    both = pooled([found, found])
    assert len(both.objective) == 8
    assert both.objective.tolist() == [1] * 8


def test_a_sample_is_filled_up_with_classes_of_one_item() -> None:
    """They are what the others can be confused with."""
    labels = torch.cat([torch.zeros(3, dtype=torch.long), torch.arange(1, 900)])
    rows = sample_rows(labels, torch.arange(len(labels)), 800)
    assert len(rows) > 390
    assert int((labels[rows] == 0).sum()) == 2
