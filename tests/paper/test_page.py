"""Intervals, differences and words of the page, on made-up results."""

import pytest

from nofuss.evaluate.intervals import SeededDifference
from nofuss.paper.page import difference, list_words, summary
from nofuss.paper.published import METHODS, PUBLISHED, order_of
from tests.paper.made_up import result


def test_the_papers_numbers() -> None:
    assert PUBLISHED["cub"]["proxy-nca"]["recall@1"] == 49.21
    assert PUBLISHED["cars"]["proxy-triplet"]["nmi"] == 54.44
    assert order_of("characters") == order_of("products") == order_of("cars")
    assert "proxy-triplet" not in order_of("cub")
    assert set(PUBLISHED["cars"]) == set(METHODS)


def test_summary_of_one_seed_has_no_interval() -> None:
    assert summary([0.5]) == {"mean": 0.5, "interval": None, "seeds": [0.5]}


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


def test_lists_in_words() -> None:
    assert [list_words("abc"[:n]) for n in (1, 2, 3)] == ["a", "a and b", "a, b and c"]
