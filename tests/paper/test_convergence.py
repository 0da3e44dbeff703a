"""How soon Proxy-NCA is where the others end, beside the paper's three times as fast."""

import pytest

from nofuss.evaluate.intervals import SeededDifference
from nofuss.paper import convergence
from tests.paper.made_up import gap


def test_first_reached_interpolates() -> None:
    heights = [(0.0, 0.1), (10.0, 0.3), (20.0, 0.2), (30.0, 0.5)]
    curve = [(x, y, None, None) for x, y in heights]
    assert convergence.first_reached(curve, 0.2) == pytest.approx(5)
    assert convergence.first_reached(curve, 0.4) == pytest.approx(20 + 10 * 2 / 3)
    assert convergence.first_reached(curve, 0.05) == 0
    assert convergence.first_reached(curve, 0.6) is None


@pytest.mark.parametrize(
    ("reached", "ratio", "final", "word"),
    [
        (100.0, 3.0, gap(0.1), "confirmed"),
        (200.0, 1.5, gap(0.1), "partly confirmed"),
        (400.0, 0.75, gap(0.1), "contradicted"),
        (None, None, gap(-0.1), "contradicted"),
        (None, None, gap(0.1), "undecided"),
        (None, None, gap(-0.1, sure=False), "undecided"),
        (0.0, None, gap(0.1), "undecided"),
    ],
)
def test_convergence_beside_the_papers_three(
    reached: float | None, ratio: float | None, final: SeededDifference, word: str
) -> None:
    found, sentence = convergence.verdict(reached, ratio, final, best="N-pairs")
    assert found == word
    assert ratio is None or f"{ratio:.1f} times" in sentence
