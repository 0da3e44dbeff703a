"""`fractional`: Recall@1 against proxies per label, static assignment, Figure 6 of the paper.

Below one, labels share proxies by a random deal; above one, a label has several. The rate is
that chosen with one proxy a label.
"""

from collections.abc import Container, Mapping, Sequence
from statistics import mean
from typing import Any

import numpy as np

from nofuss.paper.entry import Entry, Figure, Results, Series, Table, per_seed, point, shown
from nofuss.paper.published import BASELINES, ENOUGH, METHODS
from nofuss.paper.rates import Rates
from nofuss.paper.sources import Source
from nofuss.paper.statistics import difference, list_words, summary
from nofuss.paper.tables import certainty, seeds_of, starts_of
from nofuss.paper.trial import Result, Trial

LOSSES = ("proxy-nca", *BASELINES)
RATIOS = (0.1, 0.25, 0.5, 0.75, 1.0, 2.0)


BORROWED = (
    "The rate is that chosen with one proxy a label and static assignment: other ratios had no "
    "tries of their own, the baselines had theirs."
)


def possible(source: Source, ratios: Sequence[float]) -> list[float]:
    """The ratios that give two proxies or more: a positive's and a negative's."""
    classes = len(np.unique(source.labels(source.train)))
    return [ratio for ratio in ratios if round(classes * ratio) > 1]


def at_ratio(source: Source, rates: Rates, ratio: float, **more: Any) -> list[Trial]:
    """Proxy-NCA with so many proxies a label, a seed each."""
    b = source.budget
    bare = bool(more.pop("bare", False))
    options = {"proxies_per_class": ratio, **more}
    if ratio == 1 and not more:
        return seeds_of(source, rates, "proxy-nca")
    return [
        Trial(b.config("proxy-nca", rates["proxy-nca"], seed=seed, **options), bare=bare)
        for seed in range(b.seeds)
    ]


def trials(source: Source, rates: Rates) -> list[Trial]:
    """Every ratio, and the baselines to stand beside."""
    own = [trial for ratio in possible(source, RATIOS) for trial in at_ratio(source, rates, ratio)]
    others = [trial for loss in BASELINES for trial in seeds_of(source, rates, loss)]
    return [*starts_of(source), *own, *others]


def entry(source: Source, rates: Rates, results: Results) -> Entry:
    """The curve, with the best baseline as a level."""
    ratios = possible(source, RATIOS)
    each = {r: [results[t] for t in at_ratio(source, rates, r)] for r in ratios}
    found = {r: [result["recall@1"] for result in some] for r, some in each.items()}
    best, rival = best_baseline(source, rates, results)
    level = mean_recall(rival)
    start = mean(per_seed(results, starts_of(source)))
    return Entry(
        title=f"Figure 6: fewer proxies than labels, {source.title}",
        claim="From 0.5 proxies a label on, Proxy-NCA beats the baselines (Section 6.5, Cars196).",
        verdict=[
            verdict({"": each}, METHODS[best], rival, claimed=("",)),
            fall(found),
            BORROWED,
        ],
        tables=[ratio_table({"static": found})],
        figures=[
            Figure(
                "Recall@1 against proxies per label, static assignment",
                "proxies per label",
                [Series("Proxy-NCA", [point(r, values) for r, values in found.items()])],
                log=True,
                levels=[(METHODS[best], level), ("where all start", start)],
            )
        ],
        values={
            "recall@1": {str(r): summary(v) for r, v in found.items()},
            "best_baseline": {best: level},
            "start": start,
        },
    )


def best_baseline(source: Source, rates: Rates, results: Results) -> tuple[str, list[Result]]:
    """The baseline with the highest mean Recall@1, and its results."""
    found = {m: [results[t] for t in seeds_of(source, rates, m)] for m in BASELINES}
    best = max(found, key=lambda m: mean_recall(found[m]))
    return best, found[best]


def mean_recall(found: Sequence[Result]) -> float:
    """Recall@1, the mean over seeds."""
    return mean(float(result["recall@1"]) for result in found)


def verdict(
    found: Mapping[str, Mapping[float, Sequence[Result]]],
    best: str,
    rival: Sequence[Result],
    *,
    claimed: Container[str],
) -> str:
    """Where each way is above the best baseline, by the intervals; `claimed` are the paper's."""
    parts, gaps = [], []
    for way, by_ratio in found.items():
        at: dict[str, list[float]] = {"above": [], "not told apart": [], "below": []}
        for ratio, results in by_ratio.items():
            gaps.append(difference(results, rival))
            at[gaps[-1].verdict].append(ratio)
        words = [f"{v} at {list_words([f'{r:g}' for r in rs])}" for v, rs in at.items() if rs]
        asked = [r for r in by_ratio if r >= ENOUGH]
        said = ""
        if way in claimed and set(asked) <= set(at["above"]):
            said = ", as the paper says"
        elif way in claimed and set(asked) & set(at["below"]):
            said = ", against the paper"
        parts.append(f"Proxy-NCA{f' {way}' if way else ''} is {', '.join(words)}{said}")
    return (
        f"The best baseline here is {best} ({100 * mean_recall(rival):.2f}). Beside it, by proxies "
        f"a label: {'; '.join(parts)} ({certainty(gaps)})."
    )


def fall(found: Mapping[float, Sequence[float]]) -> str:
    """What sharing costs."""
    one = mean(found[1.0])
    gaps = [f"{100 * (mean(values) - one):+.2f} at {r:g}" for r, values in found.items() if r != 1]
    return f"Beside one proxy a label ({100 * one:.2f}): {', '.join(gaps)}."


def ratio_table(found: Mapping[str, Mapping[float, Sequence[float]]]) -> Table:
    """A column a ratio, a row a way."""
    ratios = sorted({r for by_ratio in found.values() for r in by_ratio})
    rows = [
        [way, *(shown(by_ratio[r]) if r in by_ratio else "–" for r in ratios)]
        for way, by_ratio in found.items()
    ]
    head = ["proxies per label", *(f"{r:g}" for r in ratios)]
    return Table("Recall@1, %; ± is the 95% t-interval over seeds", head, rows)
