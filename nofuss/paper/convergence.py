"""`convergence`: Recall@1 on unseen classes against steps and time, Figure 1 of the paper.

The trainings are those of the tables. Time includes steps and loading, not the scoring.
"""

from itertools import accumulate, pairwise
from statistics import mean

from nofuss.evaluate.intervals import SeededDifference
from nofuss.paper.entry import Entry, Figure, Results, Series, Table, point
from nofuss.paper.published import BASELINES, FASTER, METHODS
from nofuss.paper.rates import Rates
from nofuss.paper.sources import Source
from nofuss.paper.statistics import NOT_TIMED, comparable_times, difference
from nofuss.paper.tables import certainty, seeds_of
from nofuss.paper.trial import Result, Trial

LOSSES = tuple(METHODS)
Curve = list[tuple[float, float]]
MOST = 0.9
"""Share of the best baseline's gain: the rest may be noise that no other method repeats."""


def losses(source: Source) -> tuple[str, ...]:
    """Return the methods whose rates it uses."""
    return LOSSES


def trials(source: Source, rates: Rates) -> list[Trial]:
    """Return those of the tables."""
    return [trial for loss in LOSSES for trial in seeds_of(source, rates, loss)]


def entry(source: Source, rates: Rates, results: Results) -> Entry:
    """Return two figures, and the steps Proxy-NCA needs for the best baseline's final score."""
    results_of = {m: [results[t] for t in seeds_of(source, rates, m)] for m in LOSSES}
    by_step = {m: _mean_curve(rs, "step") for m, rs in results_of.items()}
    by_time = {m: _mean_curve(rs, "time") for m, rs in results_of.items()}
    best = max(BASELINES, key=lambda m: by_step[m][-1][1])
    target = by_step[best][-1][1]
    start = by_step[best][0][1]
    final = difference(results_of["proxy-nca"], results_of[best])
    most = start + MOST * (target - start)

    def reached(curves: dict[str, Curve], height: float) -> tuple[float | None, float | None]:
        return first_reached(curves["proxy-nca"], height), first_reached(curves[best], height)

    in_steps, in_time = reached(by_step, target), reached(by_time, target)
    timed = comparable_times([result for some in results_of.values() for result in some])
    if not timed:
        in_time = None, None
    rows = [
        [
            METHODS[m],
            _number(first_reached(by_step[m], target)),
            _number(first_reached(by_time[m], target)),
            _number(first_reached(by_step[m], most)),
            f"{100 * by_step[m][-1][1]:.2f}",
            f"{by_time[m][-1][0]:.1f}",
        ]
        for m in LOSSES
    ]
    return Entry(
        title=f"Figure 1: convergence, {source.title}",
        claim="Proxy-NCA “converges about three times as fast” (Section 6.4, Cars196).",
        verdict=[
            verdict(METHODS[best], target, in_steps, in_time, final),
            most_of_the_way(METHODS[best], most, reached(by_step, most)),
            "The rates fall to zero over the training, for all methods alike, so a curve's last "
            "part is flat by design; the paper's 'steps' are of batches of 32 against 128, ours of "
            "equal ones."
            if source.budget.instance_batch is None
            else "As in the paper, a step is 32 items for Proxy-NCA and 128 for the baselines.",
            *([] if timed else [NOT_TIMED]),
        ],
        tables=[
            Table(
                f"Until the best baseline's final Recall@1 ({100 * target:.2f}, {METHODS[best]})",
                [
                    "",
                    "steps",
                    "seconds",
                    "steps to 90% of its gain",
                    "own final R@1",
                    "seconds in all",
                ],
                rows,
            )
        ],
        figures=[
            Figure("Recall@1 against steps", "steps", _series(results_of, "step")),
            Figure("Recall@1 against time", "seconds of training", _series(results_of, "time")),
        ],
        values={
            "target": target,
            "best_baseline": best,
            "steps": {m: first_reached(by_step[m], target) for m in LOSSES},
            "seconds": {m: first_reached(by_time[m], target) for m in LOSSES},
            "ratio_steps": _ratio(in_steps),
            "ratio_steps_90": _ratio(reached(by_step, most)),
            "ratio_seconds": _ratio(in_time),
            "paper_ratio": FASTER,
        },
    )


def first_reached(curve: Curve, target: float) -> float | None:
    """Return where a curve first reaches a height, by linear interpolation; None if never."""
    for (x0, y0), (x1, y1) in pairwise(curve):
        if y0 >= target:
            return x0
        if y1 >= target:
            return x0 + (x1 - x0) * (target - y0) / (y1 - y0)
    return None


def verdict(
    best: str,
    target: float,
    in_steps: tuple[float | None, float | None],
    in_time: tuple[float | None, float | None],
    final: SeededDifference,
) -> str:
    """Compare the speed-up over the best baseline with the paper's."""
    level = f"the final Recall@1 of the best baseline ({best}, {100 * target:.2f})"
    ratio, clock = _ratio(in_steps), _ratio(in_time)
    if in_steps[0] is None and final.verdict == "below":
        return f"Proxy-NCA never reaches {level}: the paper's claim does not hold here."
    if in_steps[0] is None and final.verdict == "above":
        return (
            f"Proxy-NCA never reaches {level} on the items of the curve, though it is above it on "
            f"all test items ({certainty([final])}): no speed can be read from that."
        )
    if in_steps[0] is None:
        return (
            f"Proxy-NCA never reaches {level} exactly, though their final scores are "
            f"indistinguishable ({certainty([final])}): no speed can be read from that."
        )
    if ratio is None:
        return f"Proxy-NCA starts at or above {level}, so there is no speed to compare."
    conclusion = (
        "this confirms the paper"
        if ratio >= 0.8 * FASTER
        else "faster, but by less than the paper says"
        if ratio > 1.05
        else "no faster, against the paper"
    )
    timed = "" if clock is None else f" and {clock:.1f} times in seconds"
    return (
        f"Proxy-NCA reaches {level} after {in_steps[0]:,.0f} steps, {best} itself after "
        f"{in_steps[1]:,.0f}: {ratio:.1f} times as fast in steps{timed}, where the paper has about "
        f"{FASTER:g}; {conclusion}."
    )


def most_of_the_way(best: str, height: float, reached: tuple[float | None, float | None]) -> str:
    """Compare the steps to nine tenths of the best baseline's gain, which depend less on noise."""
    ours, theirs = reached
    level = f"{100 * height:.2f}, nine tenths of the best baseline's gain"
    if ours is None:
        return f"Proxy-NCA never reaches {level}."
    if not ours or not theirs:
        return f"Proxy-NCA or {best} starts at or above {level}."
    return (
        f"Proxy-NCA reaches {level}, after {ours:,.0f} steps, {best} after {theirs:,.0f}: "
        f"{theirs / ours:.1f} times as fast."
    )


def _ratio(reached: tuple[float | None, float | None]) -> float | None:
    ours, theirs = reached
    return theirs / ours if ours and theirs else None


def _times(result: Result) -> list[float]:
    return list(accumulate(row["seconds"] for row in result["curve"]))


def _axis(result: Result, kind: str) -> list[float]:
    return _times(result) if kind == "time" else [float(row["step"]) for row in result["curve"]]


def _mean_curve(results: list[Result], kind: str) -> Curve:
    across = [mean(xs) for xs in zip(*(_axis(r, kind) for r in results), strict=True)]
    heights = zip(*([row["recall@1"] for row in r["curve"]] for r in results), strict=True)
    return list(zip(across, map(mean, heights), strict=True))


def _series(results_of: dict[str, list[Result]], kind: str) -> list[Series]:
    lines = []
    for m, rs in results_of.items():
        heights = zip(*([row["recall@1"] for row in r["curve"]] for r in rs), strict=True)
        across = [x for x, _ in _mean_curve(rs, kind)]
        lines.append(
            Series(METHODS[m], [point(x, ys) for x, ys in zip(across, heights, strict=True)])
        )
    return lines


def _number(value: float | None) -> str:
    return "never" if value is None else f"{value:,.0f}" if value >= 20 else f"{value:.1f}"
