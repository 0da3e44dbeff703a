"""All scores at once: the parts agree with the functions alone, and the intervals cover."""

import json

import numpy as np
import pytest
import torch

from nofuss.evaluate import ami, evaluate, map_at_r, nmi, r_precision, recall_at_k
from nofuss.evaluate.intervals import class_intervals, paired_difference


def test_the_parts_are_the_functions_alone(scene):
    x, labels = scene(300, 60)
    scores = evaluate(x, labels, ks=(1, 10), seed=3, bootstrap=50)
    assert scores.recall == recall_at_k(x, labels, (1, 10))
    assert scores.map_at_r == map_at_r(x, labels)
    assert scores.r_precision == r_precision(x, labels)
    assert scores.nmi == nmi(x, labels, seed=3)
    assert scores.ami == ami(x, labels, seed=3)
    sizes = torch.bincount(labels)
    assert (scores.items, scores.classes) == (300, int((sizes > 0).sum()))
    assert scores.queries == 300 - int((sizes == 1).sum())


def test_as_dict_is_json_with_the_documented_keys(scene):
    x, labels = scene(120, 20)
    scores = evaluate(x.numpy(), labels.numpy(), ks=(1, 4), bootstrap=20)
    flat = scores.as_dict()
    assert json.loads(json.dumps(flat)) == flat
    shares = ["recall@1", "recall@4", "map@r", "r_precision"]
    assert list(flat) == [
        *shares,
        "nmi",
        "ami",
        *[f"{name}_interval" for name in shares],
        *["items", "classes", "queries", "seed", "protocol"],
    ]
    for name in shares:
        low, high = flat[f"{name}_interval"]
        assert 0 <= low <= flat[name] <= high <= 1
    assert "left out by index" in flat["protocol"]


def test_the_seed_decides(scene):
    x, labels = scene(200, 40)
    assert evaluate(x, labels, seed=1, bootstrap=30) == evaluate(x, labels, seed=1, bootstrap=30)
    other = evaluate(x, labels, seed=2, bootstrap=30)
    assert other.intervals != evaluate(x, labels, seed=1, bootstrap=30).intervals
    assert evaluate(x, labels, bootstrap=0).intervals == {}


def test_intervals_cover_the_share_of_the_classes_they_are_drawn_from():
    # Classes with their own chance of a hit, drawn from a population whose mean is known: one half.
    generator = torch.Generator().manual_seed(0)
    covered = 0
    for trial in range(60):
        chance = torch.rand(80, generator=generator)
        classes = torch.arange(80).repeat(6)
        hits = (torch.rand(480, generator=generator) < chance[classes]).double()
        low, high = class_intervals({"hit": hits}, classes, seed=trial, resamples=200)["hit"]
        covered += low <= 0.5 <= high
    assert 51 <= covered <= 60  # 95% of 60 is 57; items resampled one by one would give about 45


@pytest.mark.parametrize("count", [2, 3, 5, 15])
def test_few_classes_do_not_decide_too_often(count):
    """No difference between two models: an interval leaves out zero in one of twenty cases."""
    generator, wrong = np.random.default_rng(0), 0
    labels = np.repeat(np.arange(count), 20)
    for trial in range(300):
        gap = generator.normal(0, 0.05, count)[labels] + generator.normal(0, 0.02, len(labels))
        found = paired_difference(gap, 0 * gap, labels, trial, resamples=300)
        wrong += not found.low <= 0 <= found.high
    assert 2 <= wrong <= 33  # 15 on average; percentiles alone give 140, 78, 48 and 24


def test_one_class_says_nothing_of_others():
    hits = {"hit": torch.tensor([0.0, 1.0, 1.0], dtype=torch.float64)}
    one = torch.tensor([5, 5, 5])
    assert class_intervals(hits, one, seed=0, resamples=10)["hit"] == (0, 1)
    gap = paired_difference(hits["hit"], 1 - hits["hit"], one)
    assert gap == (pytest.approx(1 / 3), -1, 1)


def test_the_protocol_names_the_distance(scene):
    x, labels = scene(20, 3)
    assert "on the unit sphere" in evaluate(x, labels).protocol
    plain = evaluate(x, labels, normalize=False).protocol
    assert "between the vectors as they are, ties" in plain


def test_misuse_is_one_line(scene):
    x, labels = scene(20, 3)
    with pytest.raises(ValueError, match="bootstrap"):
        evaluate(x, labels, bootstrap=-1)
    with pytest.raises(ValueError, match="ks"):
        evaluate(x, labels, ks=())
    with pytest.raises(ValueError, match="no class has two items"):
        evaluate(x, torch.arange(20))
