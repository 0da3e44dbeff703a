"""`batch-size`: Recall@1 against the batch, the same number of items seen (Section 5).

The rate chosen at the budget's batch grows with the root of the batch. Structured clustering is
not tried with large batches: its search grows with the cube of the batch. Where a training takes
minutes, only Proxy-NCA is tried, of which the paper speaks, with fewer sizes.
"""

from collections.abc import Mapping

import numpy as np

from nofuss.evaluate.intervals import SeededDifference
from nofuss.paper import page
from nofuss.paper.published import METHODS
from nofuss.paper.sources import Source
from nofuss.paper.trials import Rates, Record, Results, Trial, seeds_of

LOSSES = ("proxy-nca", "clustering", "n-pairs", "lifted", "semi-hard")
SIZES = (16, 32, 64, 128, 256)
STABLE = 0.02
"""Recall@1 that a batch may change, both ways, for a result to be called stable."""
LONG_LOSSES, LONG_SIZES = ("proxy-nca",), (64, 128, 256)


def losses(source: Source) -> tuple[str, ...]:
    """Return the methods that are tried."""
    return LONG_LOSSES if source.budget.long else LOSSES


def sizes_of(source: Source, loss: str) -> list[int]:
    """Return the batches that a method is tried with; N-pairs needs a class for every two items."""
    if source.budget.long:
        return sorted({source.budget.batch_of(loss), *LONG_SIZES})
    most = {"clustering": 64, "n-pairs": 2 * len(np.unique(source.labels(source.train_rows)))}
    return [size for size in SIZES if size <= most.get(loss, SIZES[-1])]


def curves(source: Source, rates: Rates) -> page.Curves:
    """Return every method with every size; the budget's own are the trainings of the tables."""

    def at(loss: str, size: int) -> list[Trial]:
        usual = size == source.budget.batch_of(loss)
        record: Record = "curve" if usual else "scores"
        return seeds_of(source, rates, loss, record=record, batch_size=size)

    return {loss: {s: at(loss, s) for s in sizes_of(source, loss)} for loss in losses(source)}


def trials(source: Source, rates: Rates) -> list[Trial]:
    """Return the trainings of all curves."""
    return page.trials_of(curves(source, rates))


def entry(source: Source, rates: Rates, results: Results) -> page.Entry:
    """Return a curve per method, and how far its scores spread."""
    sweep = page.Sweep(page.results_of(curves(source, rates), results), METHODS)
    moves = {m: max(means.values()) - min(means.values()) for m, means in sweep.means().items()}
    usual = {m: source.budget.batch_of(m) for m in sweep.results}
    gaps = {
        m: {
            s: page.difference(some, by_size[usual[m]])
            for s, some in by_size.items()
            if s != usual[m]
        }
        for m, by_size in sweep.results.items()
    }
    word, sentence = verdict(gaps, usual["proxy-nca"])
    return page.Entry(
        title=f"Section 5: the batch, {source.title}",
        claim="Proxy-NCA needs no large batches; its results are stable when they grow.",
        verdict=word,
        sentence=sentence,
        tables=[
            sweep.table(
                "Recall@1, %, by batch size, with as many items seen; ± is the 95% t-interval "
                "over seeds",
                "",
                {"best − worst": {m: f"{100 * move:.2f}" for m, move in moves.items()}},
            )
        ],
        figures=[sweep.figure("Recall@1 against the batch", "items in a batch")],
        values={"recall@1": sweep.summaries(), "best_minus_worst": moves},
    )


def verdict(
    gaps: Mapping[str, Mapping[float, SeededDifference]], usual: int
) -> tuple[page.Verdict, str]:
    """Say at which batches each method differs from what it is at the usual one."""
    own = gaps["proxy-nca"].values()
    word: page.Verdict = "undecided"
    if any(d.verdict != "indistinguishable" and abs(d.mean) > STABLE for d in own):
        word = "contradicted"
    elif all(-STABLE < end < STABLE for d in own for end in d.ends):
        word = "confirmed"
    parts = []
    for m, by_size in gaps.items():
        moved = [
            f"{page.signed(d.mean)} at {s}"
            for s, d in by_size.items()
            if d.verdict != "indistinguishable"
        ]
        parts.append(f"{METHODS[m]} {', '.join(moved) or 'at none'}")
    every = [d for by_size in gaps.values() for d in by_size.values()]
    return word, (
        f"Recall@1 differs from that at a batch of {usual}: {'; '.join(parts)} "
        f"({page.certainty(every)}); stable means within {100 * STABLE:g} points, by both "
        "intervals."
    )
