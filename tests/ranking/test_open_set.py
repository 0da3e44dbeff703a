"""Open set: rules by loops, thresholds that hold on new items, honesty where they are a coin."""

import math

import pytest
import torch
from torch import Tensor

from nofuss.geometry import normalize
from nofuss.ranking.neighbours import SIZE, vicinity_of
from nofuss.ranking.open_set import (
    RULES,
    OpenSet,
    _pooled,
    _Sample,
    auroc,
    background,
    calibrate,
    choose_open_set,
    nearest_class,
)


def random(items: int, dim: int = 16, seed: int = 0) -> Tensor:
    return torch.randn(items, dim, generator=torch.Generator().manual_seed(seed))


def clumps(classes: int, each: int, *, noise: float, seed: int = 0) -> tuple[Tensor, Tensor]:
    labels = torch.arange(classes).repeat_interleave(each)
    centers = random(classes, 32, seed)
    return normalize(centers[labels] + noise * random(len(labels), 32, seed + 100)), labels


def test_the_nearest_class_mean_by_a_loop() -> None:
    query, items = normalize(random(1, seed=1)), normalize(random(30))
    labels = torch.arange(30) % 5
    labels[7] = labels[8] = -1  # no class: they stand alone, not together
    order = (items @ query[0]).argsort(descending=True)[:20]
    around = vicinity_of(query, items[order[None]], order[None])
    groups = [order[labels[order] == c] for c in range(5)] + [torch.tensor([7]), torch.tensor([8])]
    groups = [g for g in groups if len(g) and set(g.tolist()) <= set(order.tolist())]
    expected = max(float(normalize(items[g].mean(0)[None])[0] @ query[0]) for g in groups)
    assert float(nearest_class(around, labels[order][None])) == pytest.approx(expected, abs=1e-5)


def test_the_background_leaves_out_the_nearest_and_the_farthest() -> None:
    query, items = normalize(random(1, seed=1)), normalize(random(40))
    order = (items @ query[0]).argsort(descending=True)
    around = vicinity_of(query, items[order[None]], order[None])
    assert float(background(around)) == pytest.approx(
        float((items @ query[0])[order][4:20].mean()), abs=1e-6
    )


def test_auroc_by_counting_pairs() -> None:
    low, high = torch.tensor([0.0, 1.0, 1.0, 2.0]), torch.tensor([1.0, 2.0, 3.0])
    pairs = [(b > a) + (b == a) / 2 for a in low.tolist() for b in high.tolist()]
    assert auroc(low, high) == pytest.approx(sum(pairs) / len(pairs))


def test_unknown_classes_far_apart_are_all_recognised() -> None:
    found = choose_open_set(
        *zip(*[clumps(10, 12, noise=0.2, seed=s) for s in range(3)], strict=True)
    )
    assert found is not None
    assert found.useful
    assert found.false_rejections <= 0.05
    assert found.rejected == 1
    assert found.auroc == 1
    assert 0 < found.distance < 1
    assert (found.items, found.classes) == (360, 30)


def test_noise_is_no_better_than_a_coin_and_says_so() -> None:
    found = choose_open_set([normalize(random(400))], [torch.arange(400) % 10])
    assert found is not None
    assert not found.useful
    assert abs(found.auroc - 0.5) < 0.1
    assert "can't recognise" in found.describe()
    for novelty in (-2.0, 0.0, 2.0):
        word, sentence = found.judge(novelty)
        assert word == "unknown"
        assert sentence.startswith("It is unknown")


def test_the_rule_of_the_folds_beats_the_nearest_item() -> None:
    """Wide classes: a mean of many is a better witness than the nearest of them."""
    folds = [clumps(12, 15, noise=1.4, seed=s) for s in range(4)]
    found = choose_open_set(*zip(*folds, strict=True))
    assert found is not None
    assert found.rule != "nearest item"
    x, labels = clumps(30, 15, noise=1.4, seed=50)
    chosen = calibrate(x, labels, found)
    plain = calibrate(x, labels, OpenSet(**(found.as_dict() | {"rule": "nearest item"})))
    assert chosen is not None
    assert plain is not None
    assert chosen.rejected > plain.rejected
    assert chosen.auroc > plain.auroc


@pytest.mark.parametrize("rule", RULES)
def test_calibrated_on_an_index_it_holds_for_new_items(rule: str) -> None:
    """The index grows from 10 classes to 40, and false rejections stay near 5%."""
    x, labels = clumps(40, 15, noise=1.2, seed=3)
    new = torch.arange(len(x)) % 3 == 0
    chosen = choose_open_set([x[~new]], [labels[~new]])
    assert chosen is not None
    chosen = OpenSet(**(chosen.as_dict() | {"rule": rule}))
    for classes in (10, 40):
        items = ~new & (labels < classes)
        found = calibrate(x[items], labels[items], chosen)
        assert found is not None
        asked = (new & (labels < classes)).nonzero()[:, 0]
        order = (x[asked] @ x[items].T).argsort(dim=1, descending=True)[:, :SIZE]
        around = vicinity_of(x[asked], x[items][order], order)
        novelty = RULES[rule](around, labels[items][order])
        wrongly = float((novelty > found.threshold).double().mean())
        assert wrongly == pytest.approx(0.05, abs=0.05)


def test_items_that_were_learned_from_are_left_out_where_others_suffice() -> None:
    x, labels = clumps(20, 12, noise=1.0)
    chosen = choose_open_set([x], [labels])
    assert chosen is not None
    some = calibrate(x, labels, chosen, seen=labels < 10)
    assert some is not None
    assert some.classes == 10
    every = calibrate(x, labels, chosen, seen=torch.ones(len(x), dtype=torch.bool))
    assert every is not None
    assert every.classes == 20
    assert every.threshold >= chosen.threshold - 1e-9


def test_all_figures_are_of_the_threshold_in_use() -> None:
    """Items that the model learned from: the threshold of held-out classes replaces their own."""
    known, unknown = torch.arange(100) / 100, 0.605 + torch.arange(100) / 100
    sample = _Sample({"r": known}, {"r": unknown}, 1 - known, torch.arange(100) % 10)
    own = _pooled([sample], "r")
    assert own.threshold == pytest.approx(0.95)
    assert (own.rejected, own.false_rejections, own.useful) == pytest.approx((0.65, 0.04, True))
    moved = _pooled([sample], "r", at_least=[value + 0.2 for value in own.known])
    assert moved.threshold == pytest.approx(1.15)
    assert (moved.rejected, moved.false_rejections) == pytest.approx((0.45, 0))
    assert "right for roughly 45%" in moved.describe()
    assert "wrong for 0%" in moved.describe()
    beyond = _pooled([sample], "r", at_least=[value + 0.6 for value in own.known])
    assert (beyond.rejected, beyond.false_rejections, beyond.useful) == pytest.approx(
        (0.05, 0, False)
    )
    assert _pooled([sample], "r", at_least=[value - 1 for value in own.known]) == own


def test_what_was_learned_from_is_judged_by_the_threshold_of_held_out_classes() -> None:
    x, labels = clumps(20, 12, noise=1.0)
    chosen = choose_open_set([x], [labels])
    assert chosen is not None
    far = OpenSet(**(chosen.as_dict() | {"known": [value + 4 for value in chosen.known]}))
    found = calibrate(x, labels, far, seen=torch.ones(len(x), dtype=torch.bool))
    assert found is not None
    assert found.threshold == far.threshold
    assert (found.rejected, found.false_rejections, found.useful) == (0, 0, False)


def test_folds_of_three_small_classes_suffice_together() -> None:
    """Twelve classes of six items in four folds."""
    folds = [clumps(3, 6, noise=0.2, seed=s) for s in range(4)]
    found = choose_open_set(*zip(*folds, strict=True))
    assert found is not None
    assert found.useful
    assert (found.items, found.classes) == (72, 12)
    assert choose_open_set(*zip(*folds[:1], strict=True)) is None


def test_words_follow_the_distributions() -> None:
    x, labels = clumps(20, 12, noise=1.0)
    found = choose_open_set([x], [labels])
    assert found is not None
    assert found.useful
    words = [found.judge(value)[0] for value in (found.known[0], found.threshold, 3.0)]
    assert words[0] == "here"
    assert words[1] in ("here", "perhaps")
    assert words[2] == "nothing"
    assert "Nothing like this here" in found.judge(3.0)[1]


@pytest.mark.parametrize("labels", [torch.zeros(100), torch.arange(100), torch.arange(100) % 2])
def test_too_few_say_nothing(labels: Tensor) -> None:
    """One class, classes of one item, two classes."""
    assert choose_open_set([random(100)], [labels.long()]) is None


@pytest.mark.parametrize(
    "change",
    [
        {"rule": "x"},
        {"useful": 1},
        {"auroc": math.nan},
        {"distance": 3},
        {"items": -1},
        {"known": []},
        {"known": [0.0] * 40 + [-1.0]},
        {"unknown": ["a"] * 41},
    ],
)
def test_foreign_values_are_refused(change: dict[str, object]) -> None:
    found = choose_open_set(*zip(*[clumps(10, 12, noise=0.2)], strict=True))
    assert found is not None
    assert OpenSet.from_dict(found.as_dict()) == found
    with pytest.raises(ValueError, match="open_set has an invalid"):
        OpenSet.from_dict(found.as_dict() | change)
