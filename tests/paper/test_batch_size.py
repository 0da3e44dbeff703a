"""The verdict on batches of other sizes."""

from nofuss.evaluate.intervals import SeededDifference
from nofuss.paper import batch_size
from tests.paper.made_up import gap


def test_batches_that_matter_or_not() -> None:
    same = SeededDifference(0.01, (-0.01, 0.015), (0.001, 0.019))
    word, sentence = batch_size.verdict({16: same, 128: same}, 64)
    assert word == "confirmed"
    assert "+1.00 at 16 and +1.00 at 128" in sentence
    assert batch_size.verdict({16: gap(-0.03), 128: same}, 64)[0] == "contradicted"
    unknown = SeededDifference(-0.08, (-0.17, 0.01), (-0.12, -0.04))
    assert batch_size.verdict({16: unknown}, 64)[0] == "undecided"
