"""`fractional` and `dynamic`: Recall@1 of Proxy-NCA against proxies per label, Figures 6 and 7.

Static assignment: below one, labels share proxies at random; above one, a label has several.
Dynamic assignment: the closest proxy stands for a point. Training uses labels, or bare triplets,
which are drawn from the labels of the training classes before those are dropped; the same number of
items is seen. The rate is always that chosen with one proxy a label and static assignment.
"""

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any

import numpy as np

from nofuss.paper.entry import Entry, Results, per_seed
from nofuss.paper.published import BASELINES, ENOUGH, METHODS
from nofuss.paper.rates import Rates
from nofuss.paper.sources import Source
from nofuss.paper.statistics import difference, list_words
from nofuss.paper.sweep import Curves, Sweep, trials_of
from nofuss.paper.tables import certainty, seeds_of, starts_of
from nofuss.paper.trial import Result, Trial

PER_LABEL = "proxies per label"
BORROWED = (
    "The rate is that chosen with one proxy a label and static assignment: other ratios had no "
    "tries of their own, the baselines had theirs."
)


@dataclass(frozen=True)
class ProxiesPerLabel:
    """The experiment of Figures 6 and 7; its fields are what differs between them."""

    title: str
    claim: str
    assignment: str
    ratios: tuple[float, ...]
    long_ratios: tuple[float, ...]
    """Those that are tried where a training takes minutes."""
    ways: dict[str, dict[str, Any]]
    """Curve → options of its trials."""

    def losses(self, source: Source) -> tuple[str, ...]:
        """Return the methods whose rates it uses."""
        return ("proxy-nca", *BASELINES)

    def curves(self, source: Source, rates: Rates) -> Curves:
        """Return every way with every ratio."""
        ratios = possible(source, self.long_ratios if source.budget.long else self.ratios)
        return {
            way: {
                ratio: at_ratio(source, rates, ratio, self.assignment, **more) for ratio in ratios
            }
            for way, more in self.ways.items()
        }

    def trials(self, source: Source, rates: Rates) -> list[Trial]:
        """Return the trainings of the curves, and those that they are compared with."""
        losses = self.losses(source) if self.assignment == "dynamic" else BASELINES
        beside = [trial for loss in losses for trial in seeds_of(source, rates, loss)]
        return [*starts_of(source), *trials_of(self.curves(source, rates)), *beside]

    def entry(self, source: Source, rates: Rates, results: Results) -> Entry:
        """Return a curve a way, with the best baseline as a level."""
        sweep = Sweep(self.curves(source, rates), results, {"": METHODS["proxy-nca"]})
        best, rival = best_baseline(source, rates, results)
        start = mean(per_seed(results, starts_of(source)))
        levels = {METHODS[best]: mean_recall(rival)}
        sentences = [
            verdict(sweep.results, METHODS[best], rival, claimed=self.ways),
            beside_one(sweep.means()),
            BORROWED,
        ]
        values: dict[str, Any] = {"recall@1": sweep.summaries()}
        if self.assignment == "dynamic":
            static = mean(per_seed(results, seeds_of(source, rates, "proxy-nca")))
            levels["static, one a label"] = values["static"] = static
            values["proxies_in_use"] = sweep.means("proxies_in_use")
            sentences[2:2] = [used(values["proxies_in_use"])]
            sentences.append(
                f"With labels and static assignment it is {100 * static:.2f}, untrained "
                f"{100 * start:.2f}. The paper does not say how many triplets it draws, or how; "
                "with one negative each, as here, Eq. 4 is d(x, p(y)) − d(x, p(z)), which has no "
                "floor."
            )
        else:
            (values["recall@1"],) = values["recall@1"].values()
        values |= {"best_baseline": {best: mean_recall(rival)}, "start": start}
        return Entry(
            title=f"{self.title}, {source.title}",
            claim=self.claim,
            verdict=sentences,
            tables=[sweep.table("Recall@1, %; ± is the 95% t-interval over seeds", PER_LABEL)],
            figures=[
                sweep.figure(
                    f"Recall@1 against {PER_LABEL}, {self.assignment} assignment",
                    PER_LABEL,
                    levels=[*levels.items(), ("where all start", start)],
                )
            ],
            values=values,
        )


FRACTIONAL = ProxiesPerLabel(
    title="Figure 6: fewer proxies than labels",
    claim="From 0.5 proxies a label on, Proxy-NCA beats the baselines (Section 6.5, Cars196).",
    assignment="static",
    ratios=(0.1, 0.25, 0.5, 0.75, 1.0, 2.0),
    long_ratios=(0.5, 1.0, 2.0),
    ways={"": {}},
)
DYNAMIC = ProxiesPerLabel(
    title="Figure 7: dynamic assignment",
    claim="0.5 proxies a label are again enough to beat the baselines; more than one helps a "
    "little, until over-fitting (Section 6.6, Cars196).",
    assignment="dynamic",
    ratios=(0.25, 0.5, 1.0, 2.0),
    long_ratios=(0.5, 1.0, 2.0),
    ways={"from labels": {}, "from bare triplets": {"bare": True}},
)


def possible(source: Source, ratios: Sequence[float]) -> list[float]:
    """Return the ratios that give two proxies or more: a positive's and a negative's."""
    classes = len(np.unique(source.labels(source.train_rows)))
    return [ratio for ratio in ratios if round(classes * ratio) > 1]


def at_ratio(
    source: Source, rates: Rates, ratio: float, assignment: str, **more: Any
) -> list[Trial]:
    """Return Proxy-NCA with so many proxies a label, a seed each; one is that of the tables."""
    if (ratio, assignment) == (1, "static"):
        return seeds_of(source, rates, "proxy-nca")
    b = source.budget
    options = {"proxies_per_class": ratio, "assignment": assignment}
    return [
        Trial(b.config("proxy-nca", rates["proxy-nca"], seed=seed, **options), **more)
        for seed in range(b.seeds)
    ]


def best_baseline(source: Source, rates: Rates, results: Results) -> tuple[str, list[Result]]:
    """Return the baseline with the highest mean Recall@1, and its results."""
    by_loss = {m: [results[t] for t in seeds_of(source, rates, m)] for m in BASELINES}
    best = max(by_loss, key=lambda m: mean_recall(by_loss[m]))
    return best, by_loss[best]


def mean_recall(results: Sequence[Result]) -> float:
    """Return Recall@1, the mean over seeds."""
    return mean(float(result["recall@1"]) for result in results)


def verdict(
    curves: Mapping[str, Mapping[float, Sequence[Result]]],
    best: str,
    rival: Sequence[Result],
    *,
    claimed: Container[str],
) -> str:
    """Say where each way is above the best baseline; `claimed` are the ways the paper speaks of."""
    parts, gaps = [], []
    for way, by_ratio in curves.items():
        at: dict[str, list[float]] = {"above": [], "indistinguishable": [], "below": []}
        for ratio, results in by_ratio.items():
            gaps.append(difference(results, rival))
            at[gaps[-1].verdict].append(ratio)
        words = [f"{v} at {list_words([f'{r:g}' for r in rs])}" for v, rs in at.items() if rs]
        enough = {ratio for ratio in by_ratio if ratio >= ENOUGH}
        beside_paper = ""
        if way in claimed and enough <= set(at["above"]):
            beside_paper = ", as the paper says"
        elif way in claimed and enough & set(at["below"]):
            beside_paper = ", against the paper"
        parts.append(f"Proxy-NCA{f' {way}' if way else ''} is {', '.join(words)}{beside_paper}")
    return (
        f"The best baseline here is {best} ({100 * mean_recall(rival):.2f}). Beside it, by proxies "
        f"a label: {'; '.join(parts)} ({certainty(gaps)})."
    )


def beside_one(means: Mapping[str, Mapping[float, float]]) -> str:
    """Say what fewer or more proxies than one a label cost or gain."""
    parts = []
    for way, curve in means.items():
        one = curve[1.0]
        gaps = ", ".join(f"{100 * (y - one):+.2f} at {r:g}" for r, y in curve.items() if r != 1)
        parts.append(f"{100 * one:.2f}{f' {way}' if way else ''} ({gaps.replace('-', '−')})")
    return f"With one proxy a label it is {list_words(parts)}."


def used(in_use: dict[str, dict[float, float]]) -> str:
    """Say whether the assignment collapsed onto few proxies."""
    parts = [
        f"{100 * min(shares.values()):.0f} to {100 * max(shares.values()):.0f}% {way}"
        for way, shares in in_use.items()
    ]
    return f"Proxies chosen by some point in the last hundred steps: {', '.join(parts)}."
