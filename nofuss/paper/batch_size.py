"""`batch-size`: Recall@1 against the batch, the same number of items seen (Section 4.4).

The rate chosen at the budget's batch moves with the root of the batch. Structured clustering
stops early: its search grows with the cube of the batch.
"""

from statistics import mean, median

from nofuss.paper.entry import Entry, Figure, Results, Series, Table, per_seed, point, shown
from nofuss.paper.published import METHODS
from nofuss.paper.rates import Rates
from nofuss.paper.sources import Source
from nofuss.paper.statistics import list_words, summary, t_interval
from nofuss.paper.trial import Record, Trial

LOSSES = ("proxy-nca", "clustering", "n-pairs", "lifted", "semi-hard")
SIZES = (16, 32, 64, 128, 256)
LARGEST = {"clustering": 64}


def sizes_of(loss: str) -> list[int]:
    """The batches that a method is tried with."""
    return [size for size in SIZES if size <= LARGEST.get(loss, SIZES[-1])]


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
    return [t for m in LOSSES for size in sizes_of(m) for t in of(source, rates, m, size)]


def entry(source: Source, rates: Rates, results: Results) -> Entry:
    """A curve a method, and how far each moves."""
    found = {
        m: {s: per_seed(results, of(source, rates, m, s)) for s in sizes_of(m)} for m in LOSSES
    }
    whole = {m: by_size for m, by_size in found.items() if len(by_size) == len(SIZES)}
    moves = {m: spread([mean(v) for v in by_size.values()]) for m, by_size in whole.items()}
    halves = [(t_interval(v) or (0.0, 0.0)) for by_size in found.values() for v in by_size.values()]
    noise = median((high - low) / 2 for low, high in halves)
    rows = [
        [
            METHODS[m],
            *(shown(found[m][s]) if s in found[m] else "–" for s in SIZES),
            f"{100 * moves[m]:.2f}" if m in moves else "–",
        ]
        for m in LOSSES
    ]
    return Entry(
        title=f"Section 4.4: the batch, {source.title}",
        claim="Proxy-NCA needs no large batches; its results are stable when they grow.",
        verdict=[
            verdict(moves, noise),
            "Items seen are the same for all sizes, so larger batches take fewer steps; the rate "
            "grows with the root of the batch. Structured clustering was not tried beyond "
            f"{LARGEST['clustering']}. The paper shows no figures for this.",
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


def verdict(moves: dict[str, float], noise: float) -> str:
    """Whether Proxy-NCA moves less than the others, by more than a mean is known to."""
    own = moves["proxy-nca"]
    others = {METHODS[m]: v for m, v in moves.items() if m != "proxy-nca"}
    least, most = (f(others, key=lambda name: others[name]) for f in (min, max))
    words = (
        f"Over these batches Proxy-NCA's Recall@1 moves by {100 * own:.2f} points, the others' by "
        f"{100 * others[least]:.2f} ({least}) to {100 * others[most]:.2f} ({most}); a mean is "
        f"known to about ± {100 * noise:.2f}"
    )
    more = [name for name, v in others.items() if v > own + noise]
    less = [name for name, v in others.items() if v < own - noise]
    if len(more) == len(others):
        return f"{words}. Proxy-NCA is the most stable, as the paper says."
    if less:
        return f"{words}. {list_words(less)} {_verb(less)} more stable, against the paper."
    if more:
        return f"{words}. Only {list_words(more)} {_verb(more)} less stable beyond doubt."
    return f"{words}. So no method is told apart from Proxy-NCA in this."


def _verb(names: list[str]) -> str:
    return "is" if len(names) == 1 else "are"
