"""`batch-size`: Recall@1 against the batch, the same number of items seen (Section 5).

The rate chosen at the budget's batch moves with the root of the batch. Structured clustering
stops early: its search grows with the cube of the batch.
"""

from collections.abc import Mapping
from statistics import mean

import numpy as np

from nofuss.paper.entry import Entry, Figure, Results, Series, Table, point, shown
from nofuss.paper.published import METHODS
from nofuss.paper.rates import Rates
from nofuss.paper.sources import Source
from nofuss.paper.statistics import Difference, difference, summary
from nofuss.paper.tables import certainty
from nofuss.paper.trial import Record, Trial

LOSSES = ("proxy-nca", "clustering", "n-pairs", "lifted", "semi-hard")
SIZES = (16, 32, 64, 128, 256)


def sizes_of(source: Source, loss: str) -> list[int]:
    """The batches that a method is tried with; N-pairs can fill one with two items a class."""
    most = {"clustering": 64, "n-pairs": 2 * len(np.unique(source.labels(source.train)))}
    return [size for size in SIZES if size <= most.get(loss, SIZES[-1])]


def of(source: Source, rates: Rates, loss: str, size: int) -> list[Trial]:
    """The trainings of a method with a batch; the budget's own are those of the tables."""
    b = source.budget
    record: Record = "curve" if size == b.batch_of(loss) else "scores"
    return [
        Trial(b.config(loss, rates[loss], seed=seed, batch=size), record=record)
        for seed in range(b.seeds)
    ]


def trials(source: Source, rates: Rates) -> list[Trial]:
    """Every method, every size."""
    return [t for m in LOSSES for size in sizes_of(source, m) for t in of(source, rates, m, size)]


def entry(source: Source, rates: Rates, results: Results) -> Entry:
    """A curve a method, and how far each moves."""
    each = {
        m: {s: [results[t] for t in of(source, rates, m, s)] for s in sizes_of(source, m)}
        for m in LOSSES
    }
    found = {
        m: {s: [float(result["recall@1"]) for result in some] for s, some in by_size.items()}
        for m, by_size in each.items()
    }
    moves = {m: spread([mean(v) for v in by_size.values()]) for m, by_size in found.items()}
    usual = {m: source.budget.batch_of(m) for m in LOSSES}
    gaps = {
        m: {s: difference(some, by_size[usual[m]]) for s, some in by_size.items() if s != usual[m]}
        for m, by_size in each.items()
    }
    rows = [
        [
            METHODS[m],
            *(shown(found[m][s]) if s in found[m] else "–" for s in SIZES),
            f"{100 * moves[m]:.2f}",
        ]
        for m in LOSSES
    ]
    return Entry(
        title=f"Section 5: the batch, {source.title}",
        claim="Proxy-NCA needs no large batches; its results are stable when they grow.",
        verdict=[
            verdict(gaps, usual),
            "Items seen are the same for all sizes, so larger batches take fewer steps; the rate "
            "grows with the root of the batch. Structured clustering was not tried beyond 64; "
            "N-pairs, two items a class, ends at twice the classes. The paper shows no figures for "
            "this, and says nothing of the other methods.",
        ],
        tables=[
            Table(
                "Recall@1, %, by batch; ± is the 95% t-interval over seeds",
                ["", *map(str, SIZES), "best − worst"],
                rows,
            )
        ],
        figures=[
            Figure(
                "Recall@1 against the batch",
                "items in a batch",
                [
                    Series(METHODS[m], [point(s, values) for s, values in by_size.items()])
                    for m, by_size in found.items()
                ],
                log=True,
            )
        ],
        values={
            "recall@1": {
                m: {str(s): summary(v) for s, v in by_size.items()} for m, by_size in found.items()
            },
            "best_minus_worst": moves,
        },
    )


def spread(means: list[float]) -> float:
    """Best less worst."""
    return max(means) - min(means)


def verdict(gaps: Mapping[str, Mapping[int, Difference]], usual: Mapping[str, int]) -> str:
    """At which batches each method differs from what it is at the budget's own."""
    parts = []
    for m, by_size in gaps.items():
        told = {s: d for s, d in by_size.items() if d.verdict != "not told apart"}
        moved = ", ".join(f"{100 * d.mean:+.2f} at {s}" for s, d in told.items())
        parts.append(f"{METHODS[m]} {moved.replace('-', '−') or 'at none'}")
    own = [d.verdict for d in gaps["proxy-nca"].values()]
    so = (
        "Proxy-NCA is stable, as the paper says"
        if own == ["not told apart"] * len(own)
        else "Proxy-NCA is not stable here, against the paper"
    )
    every = [d for by_size in gaps.values() for d in by_size.values()]
    return (
        f"{so}. Recall@1 differs from that at the usual batch of {usual['proxy-nca']}: "
        f"{'; '.join(parts)} ({certainty(every)})."
    )
