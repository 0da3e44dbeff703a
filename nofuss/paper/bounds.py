"""`bounds`: ε and both sides of each inequality of Sections 3.3 and 4.2 while Proxy-NCA learns.

Constants are the corrected ones (see proxies/bounds.py); violations of the printed ones are counted
too. A bound that reaches the largest value its left side can have says nothing, however it moved.
"""

from collections.abc import Mapping, Sequence
from statistics import mean

from nofuss.paper import page
from nofuss.paper.runner import Runner
from nofuss.training.callbacks import flat_numbers

BOUNDS = {
    "ranking": "ranking, d = |x − y|",
    "expected_ranking": "expected ranking",
    "nca": "Proposition 4.1 (NCA)",
    "triplet": "Proposition 4.2 (triplet)",
    "total": "Eq. 7 (all triplets)",
}
EPSILONS = {"epsilon": "largest (ε)", "epsilon_95": "95th percentile", "epsilon_mean": "mean"}
SIDES = {"left": "instances", "right": "bound"}
Rows = Sequence[Mapping[str, float]]
"""What one epoch measured, a row per seed; the first epoch is from before training."""
Ends = tuple[Mapping[str, float], Mapping[str, float]]
"""Left and right side of a bound, and its largest value, before and after training."""


def entry(runner: Runner) -> page.Entry:
    """Return a figure of ε, one for each bound, and what the last epoch shows."""
    found = runner.run({"": runner.seeds("proxy-nca", record="bounds")})[""]
    curves = zip(*(result["curve"] for result in found), strict=True)
    epochs: list[Rows] = [[flat_numbers(row) for row in rows] for rows in curves]
    first, last = (
        {key: mean(row[key] for row in rows) for key in rows[0]} for rows in (epochs[0], epochs[-1])
    )
    ends: dict[str, Ends] = {name: (_sides(first, name), _sides(last, name)) for name in BOUNDS}
    epsilon = [first["corrected/epsilon"], last["corrected/epsilon"]]
    word, sentence = verdict({words: ends[name] for name, words in BOUNDS.items()}, epsilon)
    rows = [
        [
            words,
            *(f"{end[side]:.3f}" for end in ends[name] for side in SIDES),
            f"{ends[name][-1]['largest']:.3f}" + " (says nothing)" * says_nothing(ends[name][-1]),
            *(
                f"{violations(epochs, f'{which}/{name}')[0]:,}"
                for which in ("corrected", "printed")
            ),
        ]
        for name, words in BOUNDS.items()
    ]
    head = [f"{when} {side}" for when in ("start:", "end:") for side in SIDES.values()]
    about = (
        "Means over triplets and seeds, with the corrected constants; violations over all epochs, "
        f"of {violations(epochs, 'corrected/triplet')[1]:,} triplets for Proposition 4.2"
    )
    lines = {"|x − p(x)|² of training items": EPSILONS} | {
        words: {f"{name}/{side}": of for side, of in SIDES.items()}
        for name, words in BOUNDS.items()
    }
    return page.Entry(
        title=f"Sections 3.3, 4.2: do the bounds tighten? {runner.source.title}",
        claim="The loss over proxies bounds the loss over instances, the tighter the smaller ε; "
        "Propositions 4.1 and 4.2.",
        verdict=word,
        sentence=sentence,
        tables=[
            page.Table(
                about, ["", *head, "largest possible", "violated", "violated as printed"], rows
            )
        ],
        figures=[_figure(epochs, title, keys) for title, keys in lines.items()],
        values={
            "epsilon": dict(zip(("start", "end"), epsilon, strict=True)),
            "bounds": {name: {"start": a, "end": b} for name, (a, b) in ends.items()},
            "violations_of_printed": {
                name: dict(
                    zip(("count", "triplets"), violations(epochs, f"printed/{name}"), strict=True)
                )
                for name in ("nca", "triplet")
            },
        },
    )


def violations(epochs: Sequence[Rows], bound: str) -> tuple[int, int]:
    """Return how many triplets violate an inequality, over epochs and seeds, and of how many."""
    rows = [row for rows in epochs for row in rows]
    violated = sum(round(row[f"{bound}/violations"] * row[f"{bound}/triplets"]) for row in rows)
    return violated, sum(round(row[f"{bound}/triplets"]) for row in rows)


def says_nothing(end: Mapping[str, float]) -> bool:
    """Return whether a bound is no less than what its left side can be at most."""
    return end["right"] >= end["largest"]


def verdict(ends: Mapping[str, Ends], epsilon: Sequence[float]) -> tuple[page.Verdict, str]:
    """Say which bounds are closer at the end than at the start, and say anything there."""
    empty = [name for name, (_, b) in ends.items() if says_nothing(b)]
    tighter = [
        name
        for name, (a, b) in ends.items()
        if b["right"] - b["left"] < a["right"] - a["left"] and name not in empty
    ]
    word: page.Verdict = "partly confirmed" if tighter else "contradicted"
    if len(tighter) == len(ends):
        word = "confirmed"
    move = "falls" if epsilon[1] < epsilon[0] else "rises"
    return word, (
        f"In training ε {move} from {epsilon[0]:.3f} to {epsilon[1]:.3f} (of at most 4); tighter "
        f"at the end: {page.list_words(tighter or ['none'])}; at the largest possible value, which "
        f"says nothing: {page.list_words(empty or ['none'])}."
    )


def _sides(means: Mapping[str, float], name: str) -> dict[str, float]:
    """Return the sides of a bound and its largest value."""
    return {key: means[f"corrected/{name}/{key}"] for key in (*SIDES, "largest")}


def _figure(epochs: Sequence[Rows], title: str, lines: Mapping[str, str]) -> page.Figure:
    """Return values of the corrected bounds against steps, a line for each key."""
    series = [
        page.Series(
            words,
            [
                page.point(rows[0]["step"], [row[f"corrected/{key}"] for row in rows])
                for rows in epochs
            ],
        )
        for key, words in lines.items()
    ]
    return page.Figure(title, "steps", series, percent=False)
