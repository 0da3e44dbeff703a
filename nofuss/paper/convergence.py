"""`convergence`: Recall@1 on unseen classes against steps and time, Figure 1 of the paper.

The trainings are those of the tables. Time includes steps and loading, not the scoring. Rates fall
to zero over the training, for all methods alike, so a curve's last part is flat by design.
"""

from itertools import accumulate, pairwise
from statistics import mean

from nofuss.evaluate.intervals import SeededDifference
from nofuss.paper import page
from nofuss.paper.published import BASELINES, FASTER, METHODS
from nofuss.paper.sources import Source
from nofuss.paper.trials import Rates, Result, Results, Trial, seeds_of

LOSSES = tuple(METHODS)
Curve = list[tuple[float, float]]
MOST = 0.9
"""Fraction of the best baseline's gain: the rest may be noise that no other method repeats."""


def losses(source: Source) -> tuple[str, ...]:
    """Return the methods whose rates it uses."""
    return LOSSES


def trials(source: Source, rates: Rates) -> list[Trial]:
    """Return those of the tables."""
    return [trial for loss in LOSSES for trial in seeds_of(source, rates, loss)]


def entry(source: Source, rates: Rates, results: Results) -> page.Entry:
    """Return two figures, and the steps Proxy-NCA needs for the best baseline's final score."""
    results_of = {m: [results[t] for t in seeds_of(source, rates, m)] for m in LOSSES}
    by_step = {m: mean_curve(rs, "step") for m, rs in results_of.items()}
    by_time = {m: mean_curve(rs, "time") for m, rs in results_of.items()}
    best = max(BASELINES, key=lambda m: by_step[m][-1][1])
    start, target = by_step[best][0][1], by_step[best][-1][1]
    most = start + MOST * (target - start)
    steps = {m: first_reached(by_step[m], target) for m in LOSSES}
    seconds = {m: first_reached(by_time[m], target) for m in LOSSES}
    steps_to_most = {m: first_reached(by_step[m], most) for m in LOSSES}
    ratio = {
        name: _ratio(reached["proxy-nca"], reached[best])
        for name, reached in (("steps", steps), ("seconds", seconds), ("most", steps_to_most))
    }
    final = page.difference(results_of["proxy-nca"], results_of[best])
    word, sentence = verdict(
        steps["proxy-nca"], ratio["steps"], ratio["seconds"], final, best=METHODS[best]
    )
    rows = [
        [
            METHODS[m],
            *(_number(reached[m]) for reached in (steps, seconds, steps_to_most)),
            f"{100 * by_step[m][-1][1]:.2f}",
            f"{by_time[m][-1][0]:.1f}",
        ]
        for m in LOSSES
    ]
    head = ["", "steps", "seconds", "steps to 90% of its gain", "own final R@1", "seconds in all"]
    title = f"Until the best baseline's final Recall@1 ({100 * target:.2f}, {METHODS[best]})"
    return page.Entry(
        title=f"Figure 1: convergence, {source.title}",
        claim="Proxy-NCA “converges about three times as fast” (Section 6.4, Cars196).",
        verdict=word,
        sentence=sentence + page.collapses(results_of),
        tables=[page.Table(title, head, rows)],
        figures=[
            page.Figure("Recall@1 against steps", "steps", _series(results_of, "step")),
            page.Figure(
                "Recall@1 against time", "seconds of training", _series(results_of, "time")
            ),
        ],
        values={
            "target": target,
            "best_baseline": best,
            "steps": steps,
            "seconds": seconds,
            "ratio_steps": ratio["steps"],
            "ratio_steps_90": ratio["most"],
            "ratio_seconds": ratio["seconds"],
            "paper_ratio": FASTER,
        },
    )


def verdict(
    reached: float | None,
    in_steps: float | None,
    in_seconds: float | None,
    final: SeededDifference,
    *,
    best: str,
) -> tuple[page.Verdict, str]:
    """Compare the speed-up over the best baseline with the paper's.

    reached: the steps until its final score; in_steps, in_seconds: how many times as fast.
    """
    if reached is None:
        word: page.Verdict = "contradicted" if final.verdict == "below" else "undecided"
        return word, (
            f"Proxy-NCA never reaches the final Recall@1 of {best}, the best baseline; on all test "
            f"items it is {final.verdict} ({page.certainty([final])})."
        )
    if in_steps is None:
        return "undecided", f"Proxy-NCA starts at or above the end of {best}, the best baseline."
    if in_steps >= 0.8 * FASTER:
        word = "confirmed"
    else:
        word = "partly confirmed" if in_steps > 1.05 else "contradicted"
    timed = "" if in_seconds is None else f", {in_seconds:.1f} times in seconds"
    return word, (
        f"Proxy-NCA reaches the final Recall@1 of {best}, the best baseline, {in_steps:.1f} times "
        f"as fast in steps{timed}, where the paper has about {FASTER:g}."
    )


def first_reached(curve: Curve, target: float) -> float | None:
    """Return where a curve first reaches a height, by linear interpolation; None if never."""
    for (x0, y0), (x1, y1) in pairwise(curve):
        if y0 >= target:
            return x0
        if y1 >= target:
            return x0 + (x1 - x0) * (target - y0) / (y1 - y0)
    return None


def mean_curve(results: list[Result], axis: str) -> Curve:
    """Return Recall@1, mean over seeds, against steps or time."""
    return [(x, mean(ys)) for x, ys in _points(results, axis)]


def _series(results_of: dict[str, list[Result]], axis: str) -> list[page.Series]:
    return [
        page.Series(METHODS[m], [page.point(x, ys) for x, ys in _points(results, axis)])
        for m, results in results_of.items()
    ]


def _points(results: list[Result], axis: str) -> list[tuple[float, list[float]]]:
    """Return x, mean over seeds, and Recall@1 of each seed, for every epoch."""
    across = [
        list(accumulate(row["seconds"] for row in r["curve"]))
        if axis == "time"
        else [float(row["step"]) for row in r["curve"]]
        for r in results
    ]
    heights = [[row["recall@1"] for row in r["curve"]] for r in results]
    xs = (mean(x) for x in zip(*across, strict=True))
    return list(zip(xs, map(list, zip(*heights, strict=True)), strict=True))


def _ratio(ours: float | None, theirs: float | None) -> float | None:
    return theirs / ours if ours and theirs else None


def _number(value: float | None) -> str:
    return "never" if value is None else f"{value:,.0f}" if value >= 20 else f"{value:.1f}"
