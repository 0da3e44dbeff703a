"""`convergence`: Recall@1 on unseen classes against steps and time, Figure 1 of the paper.

The trainings are those of the tables. Time includes steps and loading, not the scoring. Rates fall
to zero over the training, for all methods alike, so a curve's last part is flat by design.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from statistics import mean

from nofuss.evaluate.intervals import SeededDifference
from nofuss.paper import page
from nofuss.paper.published import BASELINES, FASTER, METHODS
from nofuss.paper.runner import Runner
from nofuss.paper.trials import Result
from nofuss.report.figures import Point

MOST = 0.9
"""Fraction of the best baseline's gain: the rest may be noise that no other method repeats."""
Curve = list[Point]


def entry(runner: Runner) -> page.Entry:
    """Return two figures, and the steps Proxy-NCA needs for the best baseline's final score."""
    results = runner.run({m: runner.seeds(m) for m in METHODS})
    by_step = {m: curve(some, "step") for m, some in results.items()}
    by_time = {m: curve(some, "time") for m, some in results.items()}
    best = max(BASELINES, key=lambda m: by_step[m][-1][1])
    start, target = by_step[best][0][1], by_step[best][-1][1]
    reached = {
        "steps": {m: first_reached(by_step[m], target) for m in METHODS},
        "seconds": {m: first_reached(by_time[m], target) for m in METHODS},
        "90": {m: first_reached(by_step[m], start + MOST * (target - start)) for m in METHODS},
    }
    ratio = {}
    for name, at in reached.items():
        ours, theirs = at["proxy-nca"], at[best]
        ratio[name] = theirs / ours if ours and theirs else None
    final = page.difference(results["proxy-nca"], results[best])
    word, sentence = verdict(reached["steps"]["proxy-nca"], ratio["steps"], final, METHODS[best])
    rows = [
        [
            METHODS[m],
            *("never" if (x := at[m]) is None else f"{x:,.1f}" for at in reached.values()),
            f"{100 * by_step[m][-1][1]:.2f}",
            f"{by_time[m][-1][0]:.1f}",
        ]
        for m in METHODS
    ]
    head = ["", "steps", "seconds", "steps to 90% of its gain", "own final R@1", "seconds in all"]
    title = f"Until the best baseline's final Recall@1 ({100 * target:.2f}, {METHODS[best]})"
    return page.Entry(
        title=f"Figure 1: convergence, {runner.source.title}",
        claim="Proxy-NCA “converges about three times as fast” (Section 6.4, Cars196).",
        verdict=word,
        sentence=sentence,
        tables=[page.Table(title, head, rows)],
        figures=[
            page.Figure(f"Recall@1 against {x}", unit, [page.Series(METHODS[m], c[m]) for m in c])
            for x, unit, c in (
                ("steps", "steps", by_step),
                ("time", "seconds of training", by_time),
            )
        ],
        values={
            "target": target,
            "best_baseline": best,
            "steps": reached["steps"],
            "seconds": reached["seconds"],
            "ratio_steps": ratio["steps"],
            "ratio_steps_90": ratio["90"],
            "ratio_seconds": ratio["seconds"],
            "paper_ratio": FASTER,
        },
    )


def verdict(
    reached: float | None, ratio: float | None, final: SeededDifference, best: str
) -> tuple[page.Verdict, str]:
    """Compare the speed-up over the best baseline with the paper's.

    reached: the steps until its final score; ratio: how many times as fast that is.
    """
    if reached is None:
        word: page.Verdict = "contradicted" if final.verdict == "below" else "undecided"
        return word, (
            f"Proxy-NCA never reaches the final Recall@1 of {best}, the best baseline; on all test "
            f"items it is {final.verdict} ({page.CERTAINTY})."
        )
    if ratio is None:
        return "undecided", f"Proxy-NCA starts at or above the end of {best}, the best baseline."
    word = "partly confirmed" if ratio > 1.05 else "contradicted"
    return "confirmed" if ratio >= 0.8 * FASTER else word, (
        f"Proxy-NCA reaches the final Recall@1 of {best}, the best baseline, {ratio:.1f} times "
        f"as fast in steps, where the paper has about {FASTER:g}."
    )


def first_reached(curve: Curve, target: float) -> float | None:
    """Return where a curve first reaches a height, by linear interpolation; None if never."""
    for (x0, y0, *_), (x1, y1, *_) in pairwise(curve):
        if y0 >= target:
            return x0
        if y1 >= target:
            return x0 + (x1 - x0) * (target - y0) / (y1 - y0)
    return None


def curve(results: Sequence[Result], axis: str) -> Curve:
    """Return Recall@1 against steps or time after every epoch, both means over seeds."""
    across = [
        list(accumulate(row["seconds"] for row in r["curve"]))
        if axis == "time"
        else [float(row["step"]) for row in r["curve"]]
        for r in results
    ]
    heights = [[row["recall@1"] for row in r["curve"]] for r in results]
    return [
        page.point(mean(x), y)
        for x, y in zip(zip(*across, strict=True), zip(*heights, strict=True), strict=True)
    ]
