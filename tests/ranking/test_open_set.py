"""Open set: near and far by loops, limits that hold on new items, sentences true to the numbers."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from nofuss.config import read_as, to_json
from nofuss.geometry import normalize
from nofuss.ranking import open_set
from nofuss.ranking.open_set import OpenSet, class_sums, far, near, quantiles


def clumps(
    classes: int, each: int, *, noise: float, seed: int = 0, dim: int = 32
) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(classes).repeat_interleave(each)
    centers = torch.randn(classes, dim, generator=generator)
    items = centers[labels] + noise * torch.randn(len(labels), dim, generator=generator)
    return normalize(items), labels


def mean_of(items: Tensor) -> Tensor:
    return items.sum(0) / items.sum(0).norm()


def cosines(query: Tensor, groups: list[Tensor]) -> list[float]:
    return sorted((float(query @ mean_of(group)) for group in groups if len(group)), reverse=True)


@pytest.mark.parametrize("kind", ["outside", "item", "unknown"])
@pytest.mark.parametrize("product", [2**24, 30])  # all at once, and one query at a time
def test_near_and_far_by_a_loop(kind: str, product: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_set, "_PRODUCT", product)
    x, labels = clumps(9, 4, noise=1.0)
    labels[-4:] = torch.tensor([8, 9, 10, 11])  # each alone in its class
    sums = class_sums(x, labels)
    for i in range(len(x)):
        others = torch.arange(len(x)) != i if kind == "item" else torch.ones(len(x), dtype=bool)
        if kind == "unknown":
            others = labels != labels[i]
        best = cosines(x[i], [x[others & (labels == c)] for c in range(12)])
        own = None if kind == "outside" else labels[i : i + 1]
        one = x[i : i + 1]
        is_unknown = kind == "unknown"
        found = float(near(one, sums, own, unknown=is_unknown))
        assert found == pytest.approx(sum(best[1:6]) / 10 - best[0], abs=1e-5)
        if not is_unknown:
            assert float(far(one, sums, own)) == pytest.approx(1 - best[0], abs=1e-5)
    own = labels.clone()
    own[::2] = -1  # some are items, the others come from outside
    mixed = far(x, sums, own)
    torch.testing.assert_close(mixed[::2], far(x[::2], sums))
    torch.testing.assert_close(mixed[1::2], far(x[1::2], sums, labels[1::2]))


@pytest.mark.parametrize("classes", [1, 2, 3, 4, 6, 7])
def test_few_classes_have_as_many_rivals_as_there_are(classes: int) -> None:
    """An unknown item, whose class is left out, is compared with as many as a query."""
    x, labels = clumps(classes, 5, noise=1.0)
    sums = class_sums(x, labels)
    best = cosines(x[0], [x[labels == c] for c in range(classes)])
    rivals = best[1 : 1 + max(0, min(5, classes - 2))]
    expected = (np.mean(rivals) / 2 if rivals else 0) - best[0]
    assert float(near(x[:1], sums)) == pytest.approx(expected, abs=1e-5)
    if classes > 1:
        left = cosines(x[0], [x[labels == c] for c in range(1, classes)])
        rivals = left[1 : 1 + max(0, min(5, classes - 2))]
        expected = (np.mean(rivals) / 2 if rivals else 0) - left[0]
        found = near(x[:1], sums, labels[:1], unknown=True)
        assert float(found) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(("classes", "each"), [(40, 15), (11, 15), (10, 15), (3, 15), (10, 4)])
def test_limits_hold_for_new_items(classes: int, each: int) -> None:
    """Of new items 5% are rejected, of another collection all: with 11 classes as with 10."""
    x, labels = clumps(classes, 2 * each, noise=0.7, dim=64)
    index = torch.arange(len(x)) % 2 == 0
    sums = class_sums(x[index], labels[index])
    unknown = near(x[index], sums, labels[index], unknown=True)
    found = OpenSet.of(x[index], labels[index], quantiles(unknown, classes))
    assert found is not None
    rejected = float((far(x[~index], sums) > found.far_limit).double().mean())
    assert rejected == pytest.approx(0.05, abs=0.07)
    other, _ = clumps(50, 2, noise=0.7, seed=9, dim=64)
    words = [
        found.judge(*values)[0]
        for values in zip(far(other, sums).tolist(), near(other, sums).tolist(), strict=True)
    ]
    assert words.count("nothing") >= 98
    if classes >= 4:
        known = near(x[~index], sums)
        assert float((known <= found.near_limit).double().mean()) > 0.8
        assert float((unknown <= found.near_limit).double().mean()) == pytest.approx(0.1, abs=0.02)


def test_items_without_a_class_are_classes_of_their_own() -> None:
    """Copies of each other: none is far, though none has a relative by label."""
    x, _ = clumps(20, 3, noise=0.1)
    found = OpenSet.of(x, torch.arange(60), None)
    assert found is not None
    assert (found.items, found.classes, found.unknown) == (60, 60, None)
    assert found.far_limit < 0.1


@pytest.mark.parametrize(
    ("fraction", "match", "sentence"),
    [
        (0.01, "good", "almost never"),
        (0.05, "good", "seldom"),
        (0.1, "good", "seldom"),
        (0.11, "unsure", "one in nine"),
        (0.34, "unsure", "one in three"),
        (0.52, "unsure", "half"),
        (0.66, "unsure", "two in three"),
        (1.0, "unsure", "nearly all"),
    ],
)
def test_sentences_say_how_many_unknown_items_look_as_similar(
    fraction: float, match: str, sentence: str
) -> None:
    rule = OpenSet(0.5, quantiles(torch.linspace(-1, 0, 1001), 9), 100, 9)
    value = fraction - 1  # of unknown items that are evenly spread
    assert rule.fraction(value) == pytest.approx(fraction)
    found, said = rule.judge(0.4, value)
    assert found == match
    assert sentence in said
    assert rule.judge(None, value) == (found, said)  # an item of the index
    assert rule.judge(0.6, value)[0] == "nothing"


def test_without_unknown_items_nothing_is_a_good_match() -> None:
    x, labels = clumps(3, 6, noise=0.1)
    sums = class_sums(x, labels)
    rule = OpenSet.of(x, labels, quantiles(near(x, sums, labels, unknown=True), 3))
    assert rule is not None
    assert rule.near_limit is None
    assert rule.judge(0.0, -1.0)[0] == "unsure"
    assert "classes" in rule.describe()
    assert rule.judge(1.0, 0.0)[0] == "nothing"


def test_too_few_items_say_nothing() -> None:
    x, labels = clumps(2, 2, noise=0.1)
    assert OpenSet.of(x, labels, None) is None
    assert OpenSet.of(x[:0], labels[:0], None) is None


@pytest.mark.parametrize(
    "change",
    [
        {"far_limit": math.nan},
        {"unknown": []},
        {"unknown": ["a"] * 41},
    ],
)
def test_foreign_values_are_refused(change: dict[str, object]) -> None:
    good = OpenSet(0.5, quantiles(torch.linspace(-1, 0, 50), 9), 100, 9)
    assert read_as(OpenSet, to_json(good)) == good
    with pytest.raises(ValueError, match=next(iter(change))):
        read_as(OpenSet, to_json(good) | change)
    with pytest.raises(ValueError, match="rule"):
        read_as(OpenSet, to_json(good) | {"rule": "nearest item"})
