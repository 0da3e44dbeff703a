"""The estimate of scoring time: its growth, and the line that announces it."""

import time

import pytest
import torch

from nofuss.evaluate import evaluate
from nofuss.evaluate.expected import FEW, scoring_seconds, seconds_of_pair
from nofuss.terminal import console


def test_few_items_take_no_time_and_many_their_square(monkeypatch: pytest.MonkeyPatch) -> None:
    assert scoring_seconds([(FEW // 2, 10)], 64) == 0
    monkeypatch.setattr("nofuss.evaluate.expected.seconds_of_pair", lambda dim: 1e-9)
    one, ten = scoring_seconds([(FEW, 10)], 64), scoring_seconds([(10 * FEW, 10)], 64)
    assert ten == pytest.approx(100 * one, rel=0.01)
    assert scoring_seconds([(FEW, 10)] * 4, 64) == pytest.approx(4 * one)
    assert scoring_seconds([(FEW, 10)], 64, columns=3) == pytest.approx(3 * one)
    assert scoring_seconds([(FEW, 10)], 64, reranked=True) > one


def test_the_estimate_is_of_the_right_order() -> None:
    """Within a factor of eight; in CPU time of one thread, as others spin on a busy machine."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(FEW) // 20
    x = torch.randn(FEW // 20, 32, generator=generator)[labels]
    x += torch.randn(FEW, 32, generator=generator)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        expected = scoring_seconds([(FEW, FEW // 20)], 32)
        began = time.process_time()
        evaluate(x, labels, bootstrap=0)
        took = time.process_time() - began
    finally:
        torch.set_num_threads(threads)
    assert took / 8 < expected < took * 8
    assert 0 < seconds_of_pair(8) < seconds_of_pair(4096)


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(31, "31 seconds"), (119, "119 seconds"), (150, "2 minutes"), (3 * 3600, "3 hours")],
)
def test_long_work_is_announced(
    seconds: float, words: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with console.busy("scoring", expected=seconds):
        assert capfd.readouterr().out == f"scoring: takes about {words}\n"
    with console.busy("scoring", expected=5):
        pass
    assert capfd.readouterr().out == ""
