"""`bounds`: ε and both sides of each inequality of Sections 3.3 and 4.2 while Proxy-NCA learns.

Constants are the corrected ones (see proxies/bounds.py); violations of the printed ones are counted
too. A bound that reaches the largest value its left side can have says nothing, however it moved.
"""

from collections.abc import Mapping, Sequence
from statistics import mean
from typing import Any

from nofuss.paper import page
from nofuss.paper.sources import Source
from nofuss.paper.trials import Rates, Results, Trial, seeds_of

LOSSES = ("proxy-nca",)
BOUNDS = {
    "ranking": "ranking, d = |x − y|",
    "expected_ranking": "expected ranking",
    "nca": "Proposition 4.1 (NCA)",
    "triplet": "Proposition 4.2 (triplet)",
    "total": "Eq. 7 (all triplets)",
}
EPSILONS = {"epsilon": "largest (ε)", "epsilon_95": "95th percentile", "epsilon_mean": "mean"}
SIDES = {"left": "instances", "right": "bound"}
Curve = list[dict[str, Any]]
"""A row per epoch, from before training on."""


def losses(source: Source) -> tuple[str, ...]:
    """Return the methods whose rates it uses."""
    return LOSSES


def trials(source: Source, rates: Rates) -> list[Trial]:
    """Return Proxy-NCA, one per seed, with its bounds measured after every epoch."""
    return seeds_of(source, rates, "proxy-nca", record="bounds")


def entry(source: Source, rates: Rates, results: Results) -> page.Entry:
    """Return a figure of ε, one for each bound, and what the last epoch shows."""
    curves: list[Curve] = [results[t]["curve"] for t in trials(source, rates)]
    ends = {
        name: [
            {k: mean(c[at]["corrected"][name][k] for c in curves) for k in (*SIDES, "largest")}
            for at in (0, -1)
        ]
        for name in BOUNDS
    }
    epsilon = [mean(c[at]["corrected"]["epsilon"] for c in curves) for at in (0, -1)]
    corrected, printed = (
        {name: violations(curves, which, name) for name in BOUNDS}
        for which in ("corrected", "printed")
    )
    word, sentence = verdict(
        {words: ends[name] for name, words in BOUNDS.items()},
        epsilon,
        {words: printed[name] for name, words in BOUNDS.items() if name in ("nca", "triplet")},
    )
    head = [f"{when} {side}" for when in ("start:", "end:") for side in SIDES.values()]
    rows = [
        [
            words,
            *(f"{end[side]:.3f}" for end in ends[name] for side in SIDES),
            f"{ends[name][-1]['largest']:.3f}" + " (says nothing)" * says_nothing(ends[name][-1]),
            f"{corrected[name][0]:,}",
            f"{printed[name][0]:,}",
        ]
        for name, words in BOUNDS.items()
    ]
    triplets = corrected["triplet"][1]
    return page.Entry(
        title=f"Sections 3.3, 4.2: do the bounds tighten? {source.title}",
        claim=(
            "The loss over proxies bounds the loss over instances, the tighter the smaller ε; "
            "Propositions 4.1 and 4.2."
        ),
        verdict=word,
        sentence=sentence,
        tables=[
            page.Table(
                "Means over triplets and seeds, with the corrected constants; violations over all "
                f"epochs, of {triplets:,} triplets for Proposition 4.2",
                ["", *head, "largest possible", "violated", "violated as printed"],
                rows,
            )
        ],
        figures=[
            page.Figure(
                "|x − p(x)|² of training items",
                "steps",
                [_series(curves, words, key) for key, words in EPSILONS.items()],
                percent=False,
            ),
            *(
                page.Figure(
                    words,
                    "steps",
                    [
                        _series(curves, "its bound", name, "right"),
                        _series(curves, "over instances", name, "left"),
                    ],
                    percent=False,
                )
                for name, words in BOUNDS.items()
            ),
        ],
        values={
            "epsilon": {"start": epsilon[0], "end": epsilon[1]},
            "bounds": {name: {"start": a, "end": b} for name, (a, b) in ends.items()},
            "violations_of_printed": {
                name: {"count": printed[name][0], "triplets": printed[name][1]}
                for name in ("nca", "triplet")
            },
        },
    )


def violations(curves: Sequence[Curve], which: str, name: str) -> tuple[int, int]:
    """Return how many triplets violate an inequality, over epochs and seeds, and of how many."""
    bounds = [row[which][name] for curve in curves for row in curve]
    violated = sum(round(bound["violations"] * bound["triplets"]) for bound in bounds)
    return violated, sum(bound["triplets"] for bound in bounds)


def says_nothing(end: Mapping[str, float]) -> bool:
    """Return whether a bound is no less than what its left side can be at most."""
    return end["right"] >= end["largest"]


def verdict(
    ends: Mapping[str, Sequence[Mapping[str, float]]],
    epsilon: Sequence[float],
    printed: Mapping[str, tuple[int, int]],
) -> tuple[page.Verdict, str]:
    """Say whether each bound is closer at the end than at the start, and says anything there.

    ends: left, right and largest before and after training; printed: violations as printed, of how
    many triplets.
    """
    empty = [name for name, (_, after) in ends.items() if says_nothing(after)]
    slacks = {n: [e["right"] - e["left"] for e in both] for n, both in ends.items()}
    tighter = [n for n, (before, after) in slacks.items() if after < before and n not in empty]
    looser = [n for n in slacks if n not in (*tighter, *empty)]
    word: page.Verdict = "partly confirmed" if tighter else "contradicted"
    if len(tighter) == len(ends):
        word = "confirmed"
    found = f"tighter at the end: {page.list_words(tighter or ['none'])}"
    found += f"; not tighter: {page.list_words(looser)}" if looser else ""
    if empty:
        found += f"; at the largest possible value, which says nothing: {page.list_words(empty)}"
    move = "falls" if epsilon[1] < epsilon[0] else "rises"
    fails = [f"{name} for {count:,} of {of:,} triplets" for name, (count, of) in printed.items()]
    return word, (
        f"In training ε {move} from {epsilon[0]:.3f} to {epsilon[1]:.3f} (of at most 4); {found}. "
        f"Violated as printed: {page.list_words(fails)}."
    )


def _series(curves: Sequence[Curve], words: str, *keys: str) -> page.Series:
    """Return a value of the corrected bounds against steps."""

    def at(row: dict[str, Any]) -> float:
        value = row["corrected"]
        for key in keys:
            value = value[key]
        return float(value)

    return page.Series(
        words,
        [
            page.point(rows[0]["step"], [at(row) for row in rows])
            for rows in zip(*curves, strict=True)
        ],
    )
