"""`bounds`: ε and both sides of each inequality of Sections 3.3 and 4.2 while Proxy-NCA learns.

Constants are the corrected ones (see proxies/bounds.py); violations of the printed ones are counted
too.
"""

from statistics import mean
from typing import Any

from nofuss.paper.entry import Entry, Figure, Results, Series, Table, point
from nofuss.paper.rates import Rates
from nofuss.paper.sources import Source
from nofuss.paper.statistics import list_words
from nofuss.paper.trial import Trial

LOSSES = ("proxy-nca",)
BOUNDS = {
    "ranking": "ranking, d = |x − y|",
    "expected_ranking": "expected ranking",
    "nca": "Proposition 4.1 (NCA)",
    "triplet": "Proposition 4.2 (triplet)",
}
EPSILONS = {"epsilon": "largest (ε)", "epsilon_95": "95th percentile", "epsilon_mean": "mean"}


def losses(source: Source) -> tuple[str, ...]:
    """Return the methods whose rates it uses."""
    return LOSSES


def trials(source: Source, rates: Rates) -> list[Trial]:
    """Return Proxy-NCA, a seed each, with its bounds measured after every epoch."""
    b = source.budget
    return [
        Trial(b.config("proxy-nca", rates["proxy-nca"], seed=seed), record="bounds")
        for seed in range(b.seeds)
    ]


def entry(source: Source, rates: Rates, results: Results) -> Entry:
    """Return a figure of ε, one for each bound, and what the last epoch shows."""
    curves = [results[t]["curve"] for t in trials(source, rates)]
    ends = {
        name: (_mean(curves, 0, "corrected", name), _mean(curves, -1, "corrected", name))
        for name in BOUNDS
    }
    slacks = {BOUNDS[n]: (a["slack"], b["slack"]) for n, (a, b) in ends.items()}
    epsilon = [mean(c[i]["corrected"]["epsilon"] for c in curves) for i in (0, -1)]
    printed = {
        name: [violations(curves, which, name) for which in ("corrected", "printed")]
        for name in ("nca", "triplet")
    }
    rows = [
        [
            words,
            *(f"{ends[name][i][side]:.3f}" for i in (0, 1) for side in ("left", "right", "slack")),
            f"{violations(curves, 'corrected', name)[0]:,}",
        ]
        for name, words in BOUNDS.items()
    ]
    return Entry(
        title=f"Sections 3.3, 4.2: do the bounds tighten? {source.title}",
        claim=(
            "The loss over proxies bounds the loss over instances, the tighter the smaller ε; "
            "Propositions 4.1 and 4.2."
        ),
        verdict=[
            tightening(slacks, epsilon),
            after_first_epoch([[row["corrected"]["epsilon_mean"] for row in c] for c in curves]),
            constants(printed),
        ],
        tables=[
            Table(
                "Means over triplets and seeds, with the corrected constants",
                [
                    "",
                    *(
                        f"{when} {w}"
                        for when in ("start:", "end:")
                        for w in ("instances", "bound", "slack")
                    ),
                    "violated",
                ],
                rows,
            )
        ],
        figures=[
            Figure(
                "|x − p(x)|² of training items",
                "steps",
                [_epsilon(curves, key, words) for key, words in EPSILONS.items()],
                percent=False,
            ),
            *(
                Figure(
                    words,
                    "steps",
                    [
                        _side(curves, name, "right", "its bound"),
                        _side(curves, name, "left", "over instances"),
                    ],
                    percent=False,
                )
                for name, words in BOUNDS.items()
            ),
        ],
        values={
            "epsilon": {"start": epsilon[0], "end": epsilon[1]},
            "bounds": {n: {"start": a, "end": b} for n, (a, b) in ends.items()},
            "violations_of_printed": {
                n: {"count": p[0], "triplets": p[1]} for n, (_, p) in printed.items()
            },
        },
    )


def violations(curves: list[Any], which: str, name: str) -> tuple[int, int]:
    """Return how many triplets violate an inequality, over epochs and seeds, and of how many."""
    bounds = [row[which][name] for curve in curves for row in curve]
    violated = sum(round(bound["violations"] * bound["triplets"]) for bound in bounds)
    return violated, sum(bound["triplets"] for bound in bounds)


def tightening(slacks: dict[str, tuple[float, float]], epsilon: list[float]) -> str:
    """Say whether each bound is closer at the end than at the start."""
    tighter = [name for name, (a, b) in slacks.items() if b < a]
    looser = [name for name in slacks if name not in tighter]
    word = "falls" if epsilon[1] < epsilon[0] else "rises"
    words = f"In training ε {word} from {epsilon[0]:.3f} to {epsilon[1]:.3f} (of at most 4)."
    if not looser:
        return f"{words} Every bound tightens, as the paper says."
    if not tighter:
        return f"{words} No bound tightens, against the paper."
    return f"{words} Tighter at the end: {list_words(tighter)}; not tighter: {list_words(looser)}."


def after_first_epoch(means: list[list[float]]) -> str:
    """Say how ε moves after the first epoch: it is small at once if proxies start at means."""
    start, first, last = (mean(curve[at] for curve in means) for at in (0, 1, -1))
    word = "falls" if last < first else "rises"
    return (
        f"The mean of |x − p(x)|² is {start:.3f} before training and {first:.3f} after the first "
        f"epoch; from there it {word} to {last:.3f}."
    )


def constants(printed: dict[str, list[tuple[int, int]]]) -> str:
    """Say how often each proposition fails, as corrected and as printed."""
    parts = []
    for name, (corrected, paper) in printed.items():
        number = "4.1" if name == "nca" else "4.2"
        parts.append(
            f"Proposition {number} as corrected fails for {corrected[0]:,} of {corrected[1]:,}, as "
            f"printed for {paper[0]:,}"
        )
    end = (
        "The printed 4.2 is thus seen to be false."
        if printed["triplet"][1][0]
        else "The printed 4.2 is false in general (random unit vectors reach 3.996√ε), but is not "
        "violated here: ε, a maximum, is far larger than what most points need."
    )
    return f"{'; '.join(parts)}. {end}"


def _mean(curves: list[Any], at: int, which: str, name: str) -> dict[str, float]:
    sides = ("left", "right", "slack")
    return {side: mean(c[at][which][name][side] for c in curves) for side in sides}


def _epsilon(curves: list[Any], key: str, words: str) -> Series:
    steps = [row["step"] for row in curves[0]]
    return Series(
        words,
        [point(s, [c[i]["corrected"][key] for c in curves]) for i, s in enumerate(steps)],
    )


def _side(curves: list[Any], name: str, side: str, words: str) -> Series:
    steps = [row["step"] for row in curves[0]]
    return Series(
        words,
        [point(s, [c[i]["corrected"][name][side] for c in curves]) for i, s in enumerate(steps)],
    )
