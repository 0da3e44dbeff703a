"""`fractional` and `dynamic`: Recall@1 of Proxy-NCA against proxies per label, Figures 6 and 7.

Static assignment: below one, labels share proxies at random; above one, a label has several.
Dynamic assignment: the closest proxy stands for a point. Training uses labels, or bare triplets,
which are drawn from the labels of the training classes before those are dropped; the same number of
items is seen. The paper does not say how many triplets it draws, or how. Matched assignment is no
part of the paper, nor of its claim. The rate is always that chosen with one proxy per label and
static assignment; the baselines had tries of their own.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any

import numpy as np

from nofuss.paper import page
from nofuss.paper.published import BASELINES, ENOUGH, METHODS
from nofuss.paper.sources import Source
from nofuss.paper.trials import Rates, Result, Results, Trial, seeds_of, starts_of

PER_LABEL = "proxies per label"
MATCHED = "from labels, matched"


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

    def curves(self, source: Source, rates: Rates) -> page.Curves:
        """Return every way with every ratio that gives two proxies or more."""
        ratios = self.long_ratios if source.budget.long else self.ratios
        classes = len(np.unique(source.labels(source.train_rows)))
        return {
            way: {
                ratio: self.at(source, rates, ratio, **more)
                for ratio in ratios
                if round(classes * ratio) > 1
            }
            for way, more in self.ways.items()
        }

    def at(self, source: Source, rates: Rates, ratio: float, **more: Any) -> list[Trial]:
        """Return Proxy-NCA with so many proxies per label; one, static, is that of the tables."""
        if (ratio, self.assignment) == (1, "static"):
            return seeds_of(source, rates, "proxy-nca")
        options = {"proxies_per_class": ratio, "assignment": self.assignment, **more}
        return seeds_of(source, rates, "proxy-nca", record="scores", **options)

    def trials(self, source: Source, rates: Rates) -> list[Trial]:
        """Return the trainings of the curves, and those that they are compared with."""
        beside = [trial for loss in self.losses(source) for trial in seeds_of(source, rates, loss)]
        return [*starts_of(source), *page.trials_of(self.curves(source, rates)), *beside]

    def entry(self, source: Source, rates: Rates, results: Results) -> page.Entry:
        """Return a curve per way, with the best baseline as a level."""
        sweep = page.Sweep(
            page.results_of(self.curves(source, rates), results), {"": METHODS["proxy-nca"]}
        )
        beside = {m: [results[t] for t in seeds_of(source, rates, m)] for m in self.losses(source)}
        best = max(BASELINES, key=lambda m: mean(page.recalls(beside[m])))
        start = mean(page.recalls(results[t] for t in starts_of(source)))
        static = mean(page.recalls(beside["proxy-nca"]))
        word, sentence = verdict(sweep.results, METHODS[best], beside[best])
        values: dict[str, Any] = {"recall@1": sweep.summaries()}
        levels = {METHODS[best]: mean(page.recalls(beside[best])), "where all start": start}
        if self.assignment == "dynamic":
            levels["static, one per label"] = values["static"] = static
            values["proxies_in_use"] = in_use = sweep.means("proxies_in_use")
            sentence += f" {used(in_use)}"
        else:
            (values["recall@1"],) = values["recall@1"].values()
        values |= {"best_baseline": {best: mean(page.recalls(beside[best]))}, "start": start}
        return page.Entry(
            title=f"{self.title}, {source.title}",
            claim=self.claim,
            verdict=word,
            sentence=sentence + page.collapses(beside),
            tables=[sweep.table("Recall@1, %; ± is the 95% t-interval over seeds", PER_LABEL)],
            figures=[
                sweep.figure(
                    f"Recall@1 against {PER_LABEL}, {self.assignment} assignment",
                    PER_LABEL,
                    levels=levels,
                )
            ],
            values=values,
        )


FRACTIONAL = ProxiesPerLabel(
    title="Figure 6: fewer proxies than labels",
    claim="From 0.5 proxies per label on, Proxy-NCA beats the baselines (Section 6.5, Cars196).",
    assignment="static",
    ratios=(0.1, 0.25, 0.5, 0.75, 1.0, 2.0),
    long_ratios=(0.5, 1.0, 2.0),
    ways={"": {}},
)
DYNAMIC = ProxiesPerLabel(
    title="Figure 7: dynamic assignment",
    claim="0.5 proxies per label are again enough to beat the baselines; more than one helps a "
    "little, until over-fitting (Section 6.6, Cars196).",
    assignment="dynamic",
    ratios=(0.25, 0.5, 1.0, 2.0),
    long_ratios=(0.5, 1.0, 2.0),
    ways={
        "from labels": {},
        "from bare triplets": {"bare": True},
        MATCHED: {"assignment": "matched"},
    },
)


def verdict(
    curves: Mapping[str, Mapping[float, Sequence[Result]]], best: str, rival: Sequence[Result]
) -> tuple[page.Verdict, str]:
    """Say where each way is above the best baseline; by the paper its own are from ENOUGH on."""
    parts, gaps, claimed = [], [], []
    for way, by_ratio in curves.items():
        at: dict[str, list[float]] = {"above": [], "indistinguishable": [], "below": []}
        for ratio, results in by_ratio.items():
            gap = page.difference(results, rival)
            gaps.append(gap)
            at[gap.verdict].append(ratio)
            claimed += [gap.verdict] if ratio >= ENOUGH and way != MATCHED else []
        words = [f"{v} at {page.list_words([f'{r:g}' for r in rs])}" for v, rs in at.items() if rs]
        parts.append(f"Proxy-NCA{f' {way}' if way else ''} is {', '.join(words)}")
    word: page.Verdict = "contradicted" if "below" in claimed else "undecided"
    if set(claimed) == {"above"}:
        word = "confirmed"
    return word, (
        f"Beside the best baseline, {best} ({100 * mean(page.recalls(rival)):.2f}), by proxies per "
        f"label: {'; '.join(parts)} ({page.certainty(gaps)})."
    )


def used(in_use: Mapping[str, Mapping[float, float]]) -> str:
    """Say whether the assignment collapsed onto few proxies."""
    parts = [
        f"{100 * min(fractions.values()):.0f} to {100 * max(fractions.values()):.0f}% {way}"
        for way, fractions in in_use.items()
    ]
    return f"Proxies chosen by some point in the last hundred steps: {', '.join(parts)}."
