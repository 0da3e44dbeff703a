"""`fractional` and `dynamic`: Recall@1 of Proxy-NCA against proxies per label, Figures 6 and 7.

Static assignment: below one, labels share proxies at random; above one, a label has several.
Dynamic assignment: the closest proxy stands for a point. Training uses labels, or bare triplets,
which are drawn from the labels of the training classes before those are dropped; the same number of
items is seen. The paper does not say how many triplets it draws, or how. Matched assignment is no
part of the paper, nor of its claim. The rate is always that chosen with one proxy per label and
static assignment; the baselines had tries of their own.
"""

from collections.abc import Sequence
from functools import partial
from statistics import mean
from typing import Any

from nofuss.paper import page
from nofuss.paper.published import BASELINES, ENOUGH, METHODS
from nofuss.paper.runner import Runner
from nofuss.paper.trials import Result, Trial, starts_of

PER_LABEL = "proxies per label"
MATCHED = "from labels, matched"
LONG_RATIOS = (0.5, 1.0, 2.0)
"""Those that are tried where a training takes minutes."""


def entry(
    runner: Runner,
    *,
    title: str,
    claim: str,
    assignment: str,
    ratios: Sequence[float],
    ways: dict[str, dict[str, Any]],
) -> page.Entry:
    """Return a curve per way (with its options), and the best baseline as a level."""
    source = runner.source
    classes = source.train_classes

    def at(ratio: float, options: dict[str, Any]) -> list[Trial]:
        if (ratio, assignment) == (1, "static"):  # a training of the tables
            return runner.seeds("proxy-nca")
        options = {"proxies_per_class": ratio, "assignment": assignment} | options
        return runner.seeds("proxy-nca", record="scores", **options)

    used = [r for r in (LONG_RATIOS if source.budget.long else ratios) if round(classes * r) > 1]
    curves = {way: runner.run({r: at(r, more) for r in used}) for way, more in ways.items()}
    beside = runner.run({m: runner.seeds(m) for m in ("proxy-nca", *BASELINES)})
    best = max(BASELINES, key=lambda m: mean(page.recalls(beside[m])))
    start = mean(page.recalls(runner.run({"": starts_of(source)})[""]))
    rival = mean(page.recalls(beside[best]))
    word, sentence = verdict(curves, METHODS[best], beside[best])
    levels = {METHODS[best]: rival, "before training": start}
    found = {way: page.summaries(curve) for way, curve in curves.items()}
    values: dict[str, Any] = {"recall@1": found if assignment == "dynamic" else found[""]}
    values |= {"best_baseline": {best: rival}, "start": start}
    if assignment == "dynamic":
        static = mean(page.recalls(beside["proxy-nca"]))
        levels["static, one per label"] = values["static"] = static
        values["proxies_in_use"] = in_use = page.means(curves, "proxies_in_use")
        fewest = [f"{100 * min(curve.values()):.0f}% {way}" for way, curve in in_use.items()]
        sentence += f" The fewest proxies in use at the end: {page.list_words(fewest)}."
    names, of = {"": METHODS["proxy-nca"]}, f"{PER_LABEL}, {assignment} assignment"
    table, figure = page.sweep(curves, names, of, PER_LABEL, levels)
    return page.Entry(
        title=f"{title}, {source.title}",
        claim=claim,
        verdict=word,
        sentence=sentence,
        tables=[table],
        figures=[figure],
        values=values,
    )


fractional = partial(
    entry,
    title="Figure 6: fewer proxies than labels",
    claim="From 0.5 proxies per label on, Proxy-NCA beats the baselines (Section 6.5, Cars196).",
    assignment="static",
    ratios=(0.1, 0.25, 0.5, 0.75, 1.0, 2.0),
    ways={"": {}},
)
dynamic = partial(
    entry,
    title="Figure 7: dynamic assignment",
    claim="0.5 proxies per label are again enough to beat the baselines; more than one helps a "
    "little, until over-fitting (Section 6.6, Cars196).",
    assignment="dynamic",
    ratios=(0.25, 0.5, 1.0, 2.0),
    ways={
        "from labels": {},
        "from bare triplets": {"bare": True},
        MATCHED: {"assignment": "matched"},
    },
)


def verdict(curves: page.Curves, best: str, rival: Sequence[Result]) -> tuple[page.Verdict, str]:
    """Say where each way is above the best baseline; by the paper its own are from ENOUGH on."""
    parts, claimed = [], []
    for way, curve in curves.items():
        found = {ratio: page.difference(some, rival).verdict for ratio, some in curve.items()}
        at = {v: [f"{r:g}" for r in found if found[r] == v] for v in found.values()}
        words = [f"{v} at {page.list_words(ratios)}" for v, ratios in at.items()]
        parts.append(f"{way} {', '.join(words)}".strip())
        claimed += [v for ratio, v in found.items() if ratio >= ENOUGH and way != MATCHED]
    return page.word_of(claimed), (
        f"Proxy-NCA beside the best baseline, {best}, by proxies per label: {'; '.join(parts)} "
        f"({page.CERTAINTY})."
    )
