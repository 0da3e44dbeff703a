"""MAP@R and R-precision, against a loop, by hand, and against pytorch-metric-learning."""

import sys

import pytest
import torch
from torch import Tensor

from nofuss.evaluate import map_at_r, r_precision
from nofuss.evaluate.precision import precisions


def slow_precisions(x: Tensor, labels: Tensor, i: int) -> tuple[float, float]:
    """The definition over the R nearest, wrong classes first among equals."""
    others = [j for j in range(len(x)) if j != i]
    others.sort(key=lambda j: (float((x[i] - x[j]).square().sum()), bool(labels[j] == labels[i])))
    relevant = [bool(labels[j] == labels[i]) for j in others]
    r = sum(relevant)
    precisions = [sum(relevant[: k + 1]) / (k + 1) for k in range(r) if relevant[k]]
    return sum(precisions) / r, sum(relevant[:r]) / r


@pytest.mark.parametrize(("items", "classes"), [(2, 1), (40, 12), (61, 1), (80, 3)])
@pytest.mark.parametrize("block", [1, 9, 384])
def test_equals_the_slow_loop(scene, items, classes, block):
    x, labels = scene(items, classes)
    got = precisions(x.double(), labels, normalize=False, block=block)
    sizes = torch.bincount(labels)[labels]
    for i in range(items):
        if sizes[i] == 1:
            assert got.map_at_r[i].isnan()
            assert got.r_precision[i].isnan()
        else:
            scores = (float(got.map_at_r[i]), float(got.r_precision[i]))
            assert scores == pytest.approx(slow_precisions(x.double(), labels, i))


def test_by_hand():
    # On a line: a a b a b. Of the first a (R = 2) the two nearest are a, b: MAP (1/1) / 2.
    x, labels = torch.tensor([[0.0], [1.0], [2.1], [3.3], [4.6]]), torch.tensor([0, 0, 1, 0, 1])
    got = precisions(x, labels, normalize=False)
    assert got.map_at_r.tolist() == [0.5, 0.5, 0.0, 0.0, 0.0]
    assert got.r_precision.tolist() == [0.5, 0.5, 0.0, 0.0, 0.0]


def test_perfect_and_collapsed(scene):
    _, labels = scene(60, 6)
    assert map_at_r(torch.eye(6)[labels], labels) == 1.0
    assert r_precision(torch.eye(6)[labels], labels) == 1.0
    # All at one point: every wrong item ties with every positive and ranks before it.
    assert map_at_r(torch.ones(60, 3), labels) == 0.0
    assert r_precision(torch.ones(60, 3), labels) == 0.0


def test_strips_of_queries_give_what_all_at_once_do(scene, monkeypatch):
    x, labels = scene(300, 6)
    expected = precisions(x, labels, all_ranks=True)
    monkeypatch.setattr(sys.modules["nofuss.evaluate.ranks"], "WHOLE", 2000)
    found = precisions(x, labels, all_ranks=True)
    for name in ("map_at_r", "r_precision", "average"):
        torch.testing.assert_close(getattr(found, name), getattr(expected, name))
