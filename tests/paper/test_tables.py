"""The verdict of the tables: whether the paper's order of methods holds."""

from itertools import combinations

from nofuss.paper import tables
from nofuss.paper.page import Verdict, difference
from nofuss.paper.published import order_of
from tests.paper.made_up import result


def ordered(fractions: dict[str, float]) -> tuple[Verdict, str]:
    order = order_of("cars")
    found = {m: [result(fractions[m]), result(fractions[m] + 0.001)] for m in order}
    pairs = {(a, b): difference(found[a], found[b]) for a, b in combinations(order, 2)}
    place = sorted(order, key=lambda m: -fractions[m]).index(order[0]) + 1
    return tables.verdict(pairs, place)


def test_tables_say_whether_the_papers_order_holds() -> None:
    order = order_of("cars")
    assert order[:2] == ["proxy-nca", "clustering"]
    falling = {m: 0.9 - 0.1 * i for i, m in enumerate(order)}
    for fractions, word, number in (
        (falling, "confirmed", "number 1"),
        ({m: 0.9 - v for m, v in falling.items()}, "contradicted", "15 reversed"),
        (dict.fromkeys(order, 0.5), "undecided", "15 indistinguishable"),
    ):
        found, sentence = ordered(fractions)
        assert found == word
        assert number in sentence
