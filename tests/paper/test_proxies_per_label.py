"""The verdict on fewer proxies than labels."""

from nofuss.paper import proxies_per_label
from nofuss.paper.page import Verdict
from tests.paper.made_up import result


def test_enough_proxies_or_not() -> None:
    rival = [result(0.5), result(0.51)]

    def found(*values: float) -> tuple[Verdict, str]:
        pairs = zip((0.1, 0.5, 1.0), values, strict=True)
        by_ratio = {r: [result(v), result(v + 0.01)] for r, v in pairs}
        return proxies_per_label.verdict({"": by_ratio}, "N-pairs", rival)

    word, sentence = found(0.4, 0.6, 0.7)
    assert word == "confirmed"
    assert "0.1, above at 0.5 and 1" in sentence
    assert found(0.4, 0.45, 0.7)[0] == "contradicted"
    assert found(0.4, 0.5, 0.5)[0] == "undecided"
    # Matched assignment is shown, but the paper claims nothing about it.
    high, low = ({0.5: [result(v), result(v + 0.01)]} for v in (0.7, 0.3))
    ways = {"from labels": high, proxies_per_label.MATCHED: low}
    assert proxies_per_label.verdict(ways, "N-pairs", rival)[0] == "confirmed"
