"""The verdict on the paper's bounds: tighter at the end of training, and still saying something."""

from nofuss.paper import bounds
from nofuss.paper.page import Verdict


def test_bounds_that_tighten_or_not_or_say_nothing() -> None:
    def found(epsilon: list[float], **slacks: tuple[float, float]) -> tuple[Verdict, str]:
        def end(slack: float) -> dict[str, float]:
            return {"left": 0.5, "right": 0.5 + slack, "largest": 3.0}

        return bounds.verdict({n: (end(a), end(b)) for n, (a, b) in slacks.items()}, epsilon)

    assert found([2.0, 1.0], a=(2.0, 1.0))[0] == "confirmed"
    assert found([1.0, 2.0], a=(1.0, 2.0))[0] == "contradicted"
    assert found([1.0, 2.0], a=(1.0, 2.0), b=(2.0, 1.0))[0] == "partly confirmed"
    word, sentence = found([2.0, 1.0], a=(2.0, 1.0), b=(4.0, 2.5))
    assert word == "partly confirmed"
    assert "nothing: b" in sentence
    assert found([2.0, 1.0], b=(4.0, 2.5))[0] == "contradicted"
