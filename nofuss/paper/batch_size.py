"""`batch-size`: Recall@1 against the batch, the same number of items seen (Section 5).

The rate chosen at the budget's batch grows with the root of the batch. Structured clustering is
not tried with large batches: its search grows with the cube of the batch. Where a training takes
minutes, only Proxy-NCA is tried, of which the paper speaks, with fewer sizes.
"""

from collections.abc import Mapping

import numpy as np

from nofuss.evaluate.intervals import SeededDifference
from nofuss.paper.entry import Entry, Results
from nofuss.paper.published import METHODS
from nofuss.paper.rates import Rates
from nofuss.paper.sources import Source
from nofuss.paper.statistics import difference
from nofuss.paper.sweep import Curves, Sweep, trials_of
from nofuss.paper.tables import certainty
from nofuss.paper.trial import Record, Trial

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


def at_size(source: Source, rates: Rates, loss: str, size: int) -> list[Trial]:
    """Return the trainings of a method with a batch; the budget's own are those of the tables."""
    b = source.budget
    record: Record = "curve" if size == b.batch_of(loss) else "scores"
    return [
        Trial(b.config(loss, rates[loss], seed=seed, batch_size=size), record=record)
        for seed in range(b.seeds)
    ]


def curves(source: Source, rates: Rates) -> Curves:
    """Return every method with every size."""
    return {
        loss: {size: at_size(source, rates, loss, size) for size in sizes_of(source, loss)}
        for loss in losses(source)
    }


def trials(source: Source, rates: Rates) -> list[Trial]:
    """Return the trainings of all curves."""
    return trials_of(curves(source, rates))


def entry(source: Source, rates: Rates, results: Results) -> Entry:
    """Return a curve a method, and how far its scores spread."""
    sweep = Sweep(curves(source, rates), results, METHODS)
    moves = {m: max(means.values()) - min(means.values()) for m, means in sweep.means().items()}
    usual = {m: source.budget.batch_of(m) for m in sweep.results}
    gaps = {
        m: {s: difference(some, by_size[usual[m]]) for s, some in by_size.items() if s != usual[m]}
        for m, by_size in sweep.results.items()
    }
    return Entry(
        title=f"Section 5: the batch, {source.title}",
        claim="Proxy-NCA needs no large batches; its results are stable when they grow.",
        verdict=[
            verdict(gaps, usual),
            "Items seen are the same for all sizes, so larger batches take fewer steps; the rate "
            "grows with the root of the batch."
            + (
                " A training takes minutes here, so only Proxy-NCA is tried, with few sizes."
                if source.budget.long
                else " Structured clustering was not tried beyond 64; N-pairs, two items a class, "
                "ends at twice the classes."
            )
            + " The paper shows no figures for this, and says nothing of the other methods.",
        ],
        tables=[
            sweep.table(
                "Recall@1, %, by batch; ± is the 95% t-interval over seeds",
                "",
                {"best − worst": {m: f"{100 * move:.2f}" for m, move in moves.items()}},
            )
        ],
        figures=[sweep.figure("Recall@1 against the batch", "items in a batch")],
        values={"recall@1": sweep.summaries(), "best_minus_worst": moves},
    )


def verdict(gaps: Mapping[str, Mapping[float, SeededDifference]], usual: Mapping[str, int]) -> str:
    """Say at which batches each method differs from what it is at the budget's own."""
    parts = []
    for m, by_size in gaps.items():
        moved = ", ".join(
            f"{100 * d.mean:+.2f} at {s}"
            for s, d in by_size.items()
            if d.verdict != "indistinguishable"
        )
        parts.append(f"{METHODS[m]} {moved.replace('-', '−') or 'at none'}")
    own = gaps["proxy-nca"].values()
    if any(d.verdict != "indistinguishable" and abs(d.mean) > STABLE for d in own):
        conclusion = "Proxy-NCA is not stable here, against the paper"
    elif all(-STABLE < end < STABLE for d in own for end in d.ends):
        conclusion = "Proxy-NCA is stable, as the paper says"
    else:
        conclusion = "Whether Proxy-NCA is stable, as the paper says, is open"
    conclusion += f": stable means within {100 * STABLE:g} points, with both intervals"
    every = [d for by_size in gaps.values() for d in by_size.values()]
    return (
        f"{conclusion}. Recall@1 differs from that at the usual batch of {usual['proxy-nca']}: "
        f"{'; '.join(parts)} ({certainty(every)})."
    )
