"""All scores at once, query by query and by folds: the parts agree with the functions alone."""

import json

import numpy as np
import pytest
import torch

from nofuss.evaluate import (
    ami,
    evaluate,
    map_at_r,
    nmi,
    paired_difference,
    per_query,
    r_precision,
    recall_at_k,
)
from nofuss.evaluate.protocol import (
    QueryScores,
    class_sums,
    from_class_sums,
    score_folds,
    within_folds,
)


def test_the_parts_are_the_functions_alone(scene):
    x, labels = scene(300, 60)
    scores = evaluate(x, labels, ks=(1, 10), seed=3)
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
    scores = evaluate(x.numpy(), labels.numpy(), ks=(1, 4))
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


def test_the_means_are_the_scores(scene):
    x, labels = scene(300, 80)
    found = per_query(x, labels)
    assert float(found.recall1.mean()) == recall_at_k(x, labels, (1,))[1]
    assert float(found.map_at_r.mean()) == pytest.approx(map_at_r(x, labels), abs=1e-12)
    sizes = torch.bincount(labels)[labels]
    assert found.rows.tolist() == (sizes > 1).nonzero()[:, 0].tolist()
    assert found.labels.tolist() == labels[found.rows].tolist()


def test_names_as_labels_by_hand():
    # On a line: a a b a b, and c alone, which is no query.
    x = np.array([[0.0], [1.0], [2.1], [3.3], [4.6], [9.0]], dtype=np.float32)
    found = per_query(x, np.array([*"aabab", "c"]), normalize=False)
    assert found.rows.tolist() == [0, 1, 2, 3, 4]
    assert found.labels.tolist() == [*"aabab"]
    assert found.recall1.tolist() == [1.0, 1.0, 0.0, 0.0, 0.0]
    assert found.map_at_r.tolist() == [0.5, 0.5, 0.0, 0.0, 0.0]


def test_sums_by_class_pair_as_the_queries_do() -> None:
    """Sums, and the largest difference, are all that an interval depends on."""
    random = torch.Generator().manual_seed(0)
    labels = torch.randint(9, (80,), generator=random)
    one, two = (
        QueryScores(
            torch.randint(2, (80,), generator=random).double(),
            torch.rand(80, generator=random, dtype=torch.float64),
            labels,
        )
        for _ in range(2)
    )
    ours, theirs = from_class_sums(class_sums(one)), from_class_sums(class_sums(two))
    assert len(ours.rows) == 80
    for a, b, c, d in (
        (one.recall, two.recall, ours.recall1, theirs.recall1),
        (one.map_at_r, two.map_at_r, ours.map_at_r, theirs.map_at_r),
    ):
        expected = paired_difference(a, b, labels, largest=1)
        assert paired_difference(c, d, ours.labels, largest=1) == pytest.approx(expected)


def test_folds_are_averaged_by_their_queries(scene) -> None:
    folds = [scene(60, 6, seed=s) for s in range(3)]
    x, y = [x for x, _ in folds], [y + 100 * i for i, (_, y) in enumerate(folds)]
    found = score_folds(x, {"half": [each[:, :4] for each in x]}, y, seed=0)
    parts = [evaluate(a, b) for a, b in zip(x, y, strict=True)]
    queries = [part.queries for part in parts]
    expected = np.average([part.map_at_r for part in parts], weights=queries)
    assert found["map@r"] == pytest.approx(expected)
    assert found["recall@1_interval"][0] <= found["recall@1"] <= found["recall@1_interval"][1]
    gap = found["recall@1"] - found["baselines"]["half"]["recall@1"]
    assert found["gain"]["recall@1"][0] == pytest.approx(gap)
    assert found["folds"] == 3
    assert sum(found["by_class"]["queries"]) == sum(queries)
    assert within_folds(found).startswith("each query was searched among the 60 items of 6 classes")
