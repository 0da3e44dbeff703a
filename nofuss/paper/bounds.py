"""`bounds`: ε and both sides of each inequality of Sections 3.3 and 4.2 while Proxy-NCA learns.

Constants are the corrected ones (see proxies/bounds.py); violations of the printed ones are counted
too. A bound that reaches the largest value its left side can have says nothing, however it moved.
"""

from collections.abc import Mapping, Sequence
from statistics import mean
from typing import Any

from nofuss.paper import page
from nofuss.paper.runner import Runner

BOUNDS = {
    "ranking": "ranking, d = |x − y|",
    "expected_ranking": "expected ranking",
    "nca": "Proposition 4.1 (NCA)",
    "triplet": "Proposition 4.2 (triplet)",
    "total": "Eq. 7 (all triplets)",
}
EPSILONS = {"epsilon": "largest (ε)", "epsilon_95": "95th percentile", "epsilon_mean": "mean"}
SIDES = {"left": "instances", "right": "bound"}
Row = Mapping[str, Any]
"""What one epoch measured; the first row is from before training."""
Ends = tuple[Mapping[str, float], Mapping[str, float]]
"""Left and right side of a bound, and its largest value, before and after training."""


def entry(runner: Runner) -> page.Entry:
    """Return a figure of ε, one for each bound, and what the last epoch shows."""
    found = runner.run({"": runner.seeds("proxy-nca", record="bounds")})[""]
    epochs: list[tuple[Row, ...]] = list(zip(*(r["curve"] for r in found), strict=True))
    ends: dict[str, Ends] = {
        name: (_means(epochs[0], name), _means(epochs[-1], name)) for name in BOUNDS
    }
    epsilon = [mean(row["corrected"]["epsilon"] for row in epochs[at]) for at in (0, -1)]
    word, sentence = verdict({words: ends[name] for name, words in BOUNDS.items()}, epsilon)
    violated = {
        which: {name: violations(epochs, which, name) for name in BOUNDS}
        for which in ("corrected", "printed")
    }
    head = [f"{when} {side}" for when in ("start:", "end:") for side in SIDES.values()]
    rows = [
        [
            words,
            *(f"{end[side]:.3f}" for end in ends[name] for side in SIDES),
            f"{ends[name][-1]['largest']:.3f}" + " (says nothing)" * says_nothing(ends[name][-1]),
            *(f"{violated[which][name][0]:,}" for which in violated),
        ]
        for name, words in BOUNDS.items()
    ]
    triplets = violated["corrected"]["triplet"][1]
    return page.Entry(
        title=f"Sections 3.3, 4.2: do the bounds tighten? {runner.source.title}",
        claim="The loss over proxies bounds the loss over instances, the tighter the smaller ε; "
        "Propositions 4.1 and 4.2.",
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
            _figure(
                epochs, "|x − p(x)|² of training items", {w: (k,) for k, w in EPSILONS.items()}
            ),
            *(
                _figure(epochs, words, {w: (name, side) for side, w in SIDES.items()})
                for name, words in BOUNDS.items()
            ),
        ],
        values={
            "epsilon": dict(zip(("start", "end"), epsilon, strict=True)),
            "bounds": {name: {"start": a, "end": b} for name, (a, b) in ends.items()},
            "violations_of_printed": {
                name: dict(zip(("count", "triplets"), violated["printed"][name], strict=True))
                for name in ("nca", "triplet")
            },
        },
    )


def violations(epochs: Sequence[Sequence[Row]], which: str, name: str) -> tuple[int, int]:
    """Return how many triplets violate an inequality, over epochs and seeds, and of how many."""
    bounds = [row[which][name] for rows in epochs for row in rows]
    violated = sum(round(bound["violations"] * bound["triplets"]) for bound in bounds)
    return violated, sum(bound["triplets"] for bound in bounds)


def says_nothing(end: Mapping[str, float]) -> bool:
    """Return whether a bound is no less than what its left side can be at most."""
    return end["right"] >= end["largest"]


def verdict(ends: Mapping[str, Ends], epsilon: Sequence[float]) -> tuple[page.Verdict, str]:
    """Say which bounds are closer at the end than at the start, and say anything there."""
    tighter = [
        name
        for name, (a, b) in ends.items()
        if b["right"] - b["left"] < a["right"] - a["left"] and not says_nothing(b)
    ]
    empty = [name for name, (_, b) in ends.items() if says_nothing(b)]
    word: page.Verdict = "partly confirmed" if tighter else "contradicted"
    if len(tighter) == len(ends):
        word = "confirmed"
    move = "falls" if epsilon[1] < epsilon[0] else "rises"
    return word, (
        f"In training ε {move} from {epsilon[0]:.3f} to {epsilon[1]:.3f} (of at most 4); tighter "
        f"at the end: {page.list_words(tighter or ['none'])}; at the largest possible value, which "
        f"says nothing: {page.list_words(empty or ['none'])}."
    )


def _means(rows: Sequence[Row], name: str) -> dict[str, float]:
    """Return the sides of a bound in one epoch, as means over seeds."""
    keys = (*SIDES, "largest")
    return {k: mean(row["corrected"][name][k] for row in rows) for k in keys}


def _figure(
    epochs: Sequence[Sequence[Row]], title: str, lines: Mapping[str, Sequence[str]]
) -> page.Figure:
    """Return values of the corrected bounds against steps, each by its keys."""

    def at(row: Row, keys: Sequence[str]) -> float:
        value = row["corrected"]
        for key in keys:
            value = value[key]
        return float(value)

    series = [
        page.Series(
            words, [page.point(rows[0]["step"], [at(row, keys) for row in rows]) for rows in epochs]
        )
        for words, keys in lines.items()
    ]
    return page.Figure(title, "steps", series, percent=False)
