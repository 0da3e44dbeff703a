"""`batch-size`: Recall@1 against the batch, the same number of items seen (Section 5).

The rate chosen at the budget's batch grows with the root of the batch. Structured clustering is
not tried with large batches: its search grows with the cube of the batch. Where a training takes
minutes, only Proxy-NCA is tried, of which the paper speaks, with fewer sizes.
"""

from collections.abc import Mapping

from nofuss.evaluate.intervals import SeededDifference
from nofuss.paper import page
from nofuss.paper.published import METHODS
from nofuss.paper.runner import Runner
from nofuss.paper.sources import Source
from nofuss.paper.trials import Trial

LOSSES = ("proxy-nca", "clustering", "n-pairs", "lifted", "semi-hard")
SIZES = (16, 32, 64, 128, 256)
STABLE = 0.02
"""Recall@1 that a batch may change, both ways, for a result to be called stable."""
LONG_LOSSES, LONG_SIZES = ("proxy-nca",), (64, 128, 256)


def sizes_of(source: Source, loss: str) -> list[int]:
    """Return the batches that a method is tried with; N-pairs needs a class for every two items."""
    if source.budget.long:
        return sorted({source.budget.batch_of(loss), *LONG_SIZES})
    most = {"clustering": 64, "n-pairs": 2 * source.train_classes}
    return [size for size in SIZES if size <= most.get(loss, SIZES[-1])]


def entry(runner: Runner) -> page.Entry:
    """Return a curve per method, and how far its scores spread."""
    source, usual = runner.source, runner.source.budget.batch_of("proxy-nca")
    curves = {}
    for loss in LONG_LOSSES if source.budget.long else LOSSES:
        # The budget's own batch is that of the tables, whose trainings record a curve.
        trials: dict[float, list[Trial]] = {
            size: runner.seeds(
                loss,
                record="curve" if size == source.budget.batch_of(loss) else "scores",
                batch_size=size,
            )
            for size in sizes_of(source, loss)
        }
        curves[loss] = runner.run(trials)
    moves = {m: max(by.values()) - min(by.values()) for m, by in page.means(curves).items()}
    own = curves["proxy-nca"]
    gaps = {s: page.difference(some, own[usual]) for s, some in own.items() if s != usual}
    word, sentence = verdict(gaps, usual)
    of = "the batch, with as many items seen"
    table, figure = page.sweep(curves, METHODS, of, "items in a batch", {})
    return page.Entry(
        title=f"Section 5: the batch, {source.title}",
        claim="Proxy-NCA needs no large batches; its results are stable when they grow.",
        verdict=word,
        sentence=sentence,
        tables=[table],
        figures=[figure],
        values={
            "recall@1": {m: page.summaries(curve) for m, curve in curves.items()},
            "best_minus_worst": moves,
        },
    )


def verdict(gaps: Mapping[float, SeededDifference], usual: int) -> tuple[page.Verdict, str]:
    """Say whether Proxy-NCA's Recall@1 at other batches is that of the usual one."""
    word: page.Verdict = "undecided"
    if any(d.verdict != "indistinguishable" and abs(d.mean) > STABLE for d in gaps.values()):
        word = "contradicted"
    elif all(-STABLE < end < STABLE for d in gaps.values() for end in d.ends):
        word = "confirmed"
    moved = page.list_words([f"{page.signed(d.mean)} at {s:g}" for s, d in gaps.items()])
    return word, (
        f"Recall@1 of Proxy-NCA beside that at a batch of {usual}: {moved}; stable means within "
        f"{100 * STABLE:g} points by both intervals ({page.CERTAINTY})."
    )
