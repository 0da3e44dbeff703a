"""Sentences follow the numbers: on made-up results, each of them can come out either way."""

import math

import numpy as np
import pytest
from scipy import stats

from nofuss.evaluate.intervals import SeededDifference, t_interval
from nofuss.paper import batch_size, convergence, epsilon, proxies_per_label, tables
from nofuss.paper.published import METHODS, PUBLISHED, order_of
from nofuss.paper.statistics import difference


def result(share: float, *, classes: int = 40, queries: int = 50) -> dict[str, object]:
    """Every class alike, but for a ripple that the classes of all methods share."""
    hits = [round(queries * share + math.sin(c)) for c in range(classes)]
    return {
        "recall@1": sum(hits) / (queries * classes),
        "hits": hits,
        "queries": [queries] * classes,
    }


def test_t_interval_is_scipys() -> None:
    values = [0.3, 0.35, 0.42]
    expected = stats.t.interval(0.95, 2, np.mean(values), stats.sem(values))
    assert t_interval(values) == pytest.approx(expected)
    assert t_interval([0.3]) is None


def test_a_difference_is_shown_only_beyond_both_intervals() -> None:
    assert SeededDifference(0.1, (0.05, 0.15), (0.02, 0.18)).verdict == "above"
    assert SeededDifference(0.1, (-0.05, 0.25), (0.02, 0.18)).verdict == "indistinguishable"
    assert SeededDifference(0.1, (0.05, 0.15), (-0.02, 0.22)).verdict == "indistinguishable"
    assert SeededDifference(-0.1, (-0.15, -0.05), (-0.18, -0.02)).verdict == "below"
    assert SeededDifference(-0.1, None, (-0.18, -0.02)).verdict == "below"


def test_difference_is_antisymmetric() -> None:
    one, other = [result(0.5), result(0.52)], [result(0.4), result(0.43)]
    there, back = difference(one, other), difference(other, one)
    assert there.mean == pytest.approx(-back.mean)
    assert there.over_classes == pytest.approx([-end for end in reversed(back.over_classes)])
    assert there.over_seeds == pytest.approx([-end for end in reversed(back.over_seeds or ())])
    assert (there.verdict, back.verdict) == ("above", "below")


def ordered(shares: dict[str, float]) -> str:
    order = order_of("cars")
    found = {m: [result(shares[m]), result(shares[m] + 0.001)] for m in order}
    pairs = {
        (a, b): difference(found[a], found[b]) for i, a in enumerate(order) for b in order[i + 1 :]
    }
    ranked = sorted(order, key=lambda m: -shares[m])
    return tables.ordering(order, pairs, ranked)


def test_ordering_says_whether_the_papers_order_holds() -> None:
    order = order_of("cars")
    assert order[:2] == ["proxy-nca", "clustering"]
    falling = {m: 0.9 - 0.1 * i for i, m in enumerate(order)}
    words = ordered(falling)
    assert "number 1 of 6" in words
    assert "holds in full: of its 15 pairs 15 are confirmed" in words
    words = ordered({m: 0.9 - v for m, v in falling.items()})
    assert "number 6 of 6" in words
    assert "contradicted: of its 15 pairs 0 are confirmed, 15 reversed" in words
    words = ordered(dict.fromkeys(order, 0.5))
    assert "neither confirmed in full nor contradicted" in words
    assert "15 are indistinguishable" in words


def test_the_papers_numbers() -> None:
    assert PUBLISHED["cub"]["proxy-nca"]["recall@1"] == 49.21
    assert PUBLISHED["cars"]["proxy-triplet"]["nmi"] == 54.44
    assert order_of("characters") == order_of("products") == order_of("cars")
    assert "proxy-triplet" not in order_of("cub")
    assert set(PUBLISHED["cars"]) == set(METHODS)


def test_training_that_was_worth_nothing_is_said_so() -> None:
    start = 0.5
    assert "Every method" in tables.against_start({"lifted": [{"recall@1": 0.6}]}, start)
    assert "No method" in tables.against_start({"lifted": [{"recall@1": 0.4}]}, start)
    both = {"lifted": [{"recall@1": 0.4}], "n-pairs": [{"recall@1": 0.6}]}
    words = tables.against_start(both, start)
    assert "end N-pairs; Lifted structure ends below" in words


def test_first_reached_interpolates() -> None:
    curve = [(0.0, 0.1), (10.0, 0.3), (20.0, 0.2), (30.0, 0.5)]
    assert convergence.first_reached(curve, 0.2) == pytest.approx(5)
    assert convergence.first_reached(curve, 0.4) == pytest.approx(20 + 10 * 2 / 3)
    assert convergence.first_reached(curve, 0.05) == 0
    assert convergence.first_reached(curve, 0.6) is None


def gap(mean: float, *, sure: bool = True) -> SeededDifference:
    """A difference that is shown, or one that is not."""
    ends = (mean - 0.001, mean + 0.001) if sure else (-1.0, 1.0)
    return SeededDifference(mean, ends, ends)


def test_convergence_beside_the_papers_three() -> None:
    def words(own: float | None, other: float, final: float = 0.1, sure: bool = True) -> str:
        steps = own, other
        return convergence.verdict("N-pairs", 0.4, steps, steps, gap(final, sure=sure))

    assert "3.0 times as fast in steps" in words(100, 300)
    assert "confirms the paper" in words(100, 300)
    assert "less than the paper says" in words(200, 300)
    assert "no faster" in words(400, 300)
    assert "does not hold here" in words(None, 300, -0.1)
    assert "above it on all test items (95%" in words(None, 300, 0.1)
    assert "indistinguishable (95%" in words(None, 300, -0.1, sure=False)
    assert "no speed to compare" in words(0, 300)
    assert "2.0 times as fast" in convergence.most_of_the_way("N-pairs", 0.4, (150, 300))
    assert "never reaches" in convergence.most_of_the_way("N-pairs", 0.4, (None, 300))
    assert "starts at or above" in convergence.most_of_the_way("N-pairs", 0.4, (0, 0))


def test_enough_proxies_or_not() -> None:
    rival = [result(0.5), result(0.51)]

    def words(*values: float, claimed: tuple[str, ...] = ("",)) -> str:
        pairs = zip((0.1, 0.5, 1.0), values, strict=True)
        found = {r: [result(v), result(v + 0.01)] for r, v in pairs}
        return proxies_per_label.verdict({"": found}, "N-pairs", rival, claimed=claimed)

    assert "above at 0.5 and 1, below at 0.1, as the paper says" in words(0.4, 0.6, 0.7)
    assert "above at 1, below at 0.1 and 0.5, against the paper" in words(0.4, 0.45, 0.7)
    assert "indistinguishable at 0.5 and 1, below at 0.1 (95%" in words(0.4, 0.5, 0.5)
    assert "paper" not in words(0.4, 0.6, 0.7, claimed=())


def test_other_ratios_beside_one_proxy_a_label() -> None:
    words = proxies_per_label.beside_one({"": {0.5: 0.4, 1.0: 0.5, 2.0: 0.52}})
    assert words == "With one proxy a label it is 50.00 (−10.00 at 0.5, +2.00 at 2)."
    both = proxies_per_label.beside_one({"a": {1.0: 0.5, 2.0: 0.5}, "b": {1.0: 0.4, 2.0: 0.3}})
    assert "50.00 a (+0.00 at 2) and 40.00 b (−10.00 at 2)" in both


def test_classes_are_resampled_whole() -> None:
    """The interval is that of a slow loop over resamples, as far as chance allows."""
    random = np.random.default_rng(1)
    queries = random.integers(0, 9, 30)  # some classes have no query
    one, other = (
        {"recall@1": hits.sum() / queries.sum(), "hits": hits, "queries": queries}
        for hits in (random.binomial(queries, share) for share in (0.7, 0.4))
    )
    gap, means = one["hits"] - other["hits"], []
    for _ in range(4000):
        drawn = random.choice(np.flatnonzero(queries), (queries > 0).sum())
        means.append(gap[drawn].sum() / queries[drawn].sum())
    expected = np.quantile(means, [0.025, 0.975])
    assert difference([one], [other]).over_classes == pytest.approx(expected, abs=0.02)


def test_batches_that_matter_or_not() -> None:
    def words(nca: SeededDifference, lifted: SeededDifference) -> str:
        gaps = {"proxy-nca": {16: nca}, "lifted": {16: lifted}}
        return batch_size.verdict(gaps, {"proxy-nca": 64})

    same, moved = SeededDifference(0.01, (-0.01, 0.015), (0.001, 0.019)), gap(-0.03)
    assert "Proxy-NCA is stable, as the paper says" in words(same, moved)
    assert "Proxy-NCA at none; Lifted structure −3.00 at 16" in words(same, moved)
    assert "not stable here, against the paper" in words(moved, same)
    unknown = SeededDifference(-0.08, (-0.17, 0.01), (-0.12, -0.04))
    assert "Whether Proxy-NCA is stable, as the paper says, is open" in words(unknown, same)


def test_one_seed_is_said_to_be_one() -> None:
    assert "one seed" in tables.certainty([SeededDifference(0.1, None, (0.05, 0.15))])
    assert "over seeds and over classes" in tables.certainty([gap(0.1)])


def test_bounds_that_tighten_or_not() -> None:
    assert "Every bound" in epsilon.tightening({"a": (2.0, 1.0)}, [2.0, 1.0])
    assert "No bound" in epsilon.tightening({"a": (1.0, 2.0)}, [1.0, 2.0])
    mixed = epsilon.tightening({"a": (1.0, 2.0), "b": (2.0, 1.0)}, [1.0, 2.0])
    assert "rises" in mixed
    assert "Tighter at the end: b; not tighter: a" in mixed
    assert "it falls to 0.500" in epsilon.after_first_epoch([[0.1, 0.6, 0.5], [0.1, 0.6, 0.5]])
    assert "it rises to 0.700" in epsilon.after_first_epoch([[0.1, 0.6, 0.7]])
    kept = {"nca": [(0, 9), (0, 9)], "triplet": [(0, 9), (0, 9)]}
    assert "not violated here" in epsilon.constants(kept)
    broken = {"nca": [(0, 9), (0, 9)], "triplet": [(0, 9), (2, 9)]}
    assert "seen to be false" in epsilon.constants(broken)
