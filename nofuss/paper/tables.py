"""`cub`, `cars`, `products`, and likewise `characters`: Recall@K and NMI of all methods.

Tables 1 and 2 and Figure 4 of the paper, with untrained baselines beside them.
"""

from collections.abc import Iterable, Sequence
from itertools import combinations
from statistics import mean
from typing import Any

from nofuss.evaluate.intervals import SeededDifference
from nofuss.paper.entry import Entry, Results, Table, plus_minus
from nofuss.paper.further import FURTHER, NAMES
from nofuss.paper.published import METHODS, PUBLISHED, order_of
from nofuss.paper.rates import Rates
from nofuss.paper.sources import Source
from nofuss.paper.statistics import (
    NOT_TIMED,
    comparable_times,
    difference,
    list_words,
    span,
    summary,
)
from nofuss.paper.stopwatch import STAGES
from nofuss.paper.trial import Result, Trial

LOSSES = tuple(NAMES)
PLACES = {
    "cars": "Table 1",
    "cub": "Table 2",
    "products": "Figure 4",
    "han": "Figure 4",
    "characters": "Tables 1, 2",
}


def seeds_of(source: Source, rates: Rates, loss: str) -> list[Trial]:
    """Return the trainings of a method, a seed each."""
    b = source.budget
    return [
        Trial(b.config(loss, rates[loss], seed=seed), record="curve") for seed in range(b.seeds)
    ]


def starts_of(source: Source) -> list[Trial]:
    """Return trainings of no epoch, a seed each: what every method starts from."""
    b = source.budget
    return [
        Trial(b.config("proxy-nca", b.rates[0], epochs=0, seed=seed)) for seed in range(b.seeds)
    ]


def untrained_of(source: Source) -> Trial:
    """Return what scores the baselines that nothing is trained for."""
    b = source.budget
    return Trial(b.config("proxy-nca", b.rates[0], epochs=0), record="untrained")


def losses(source: Source) -> tuple[str, ...]:
    """Return the methods whose rates it uses."""
    return LOSSES


def trials(source: Source, rates: Rates) -> list[Trial]:
    """Return every method with every seed."""
    each = [seeds_of(source, rates, loss) for loss in LOSSES]
    return [*starts_of(source), *(t for some in each for t in some), untrained_of(source)]


def entry(source: Source, rates: Rates, results: Results) -> Entry:
    """Return the table, the order of the methods, and the paper's numbers."""
    results_of = {m: [results[t] for t in seeds_of(source, rates, m)] for m in LOSSES}
    order = order_of(source.name)
    published = PUBLISHED.get(source.name, {})
    columns = [f"recall@{k}" for k in source.ks] + ["nmi"]
    pairs = {
        pair: difference(results_of[pair[0]], results_of[pair[1]])
        for pair in combinations(order, 2)
    }
    further = {m: difference(results_of[m], results_of["proxy-nca"]) for m in FURTHER}
    ranked = sorted(results_of, key=lambda m: -mean(r["recall@1"] for r in results_of[m]))
    starts = [results[trial] for trial in starts_of(source)]
    untrained: dict[str, Result] = results[untrained_of(source)]["baselines"]
    baselines = {name: [result] for name, result in untrained.items()}
    baselines["where all start"] = starts
    rows = [_row(NAMES[m], results_of[m], columns, published, m) for m in ranked]
    rows += [_row(name, some, columns, published) for name, some in baselines.items()]
    head = ["%", *(_title(c) for c in columns)]
    if published:
        head += [f"paper: {_title(c)}" for c in ("recall@1", "nmi")]
    values = {m: {c: summary([r[c] for r in results_of[m]]) for c in columns} for m in LOSSES}
    return Entry(
        title=f"{PLACES[source.name]}: {source.title}",
        claim=(
            f"In the paper, by Recall@1 on {'Cars196' if len(published) < 3 else source.title}: "
            + " > ".join(METHODS[m] for m in order)
            + "."
        ),
        verdict=[
            ordering(order, pairs, ranked),
            beyond_the_paper(further),
            against_start(results_of, mean(r["recall@1"] for r in starts)),
            *levels(source, results_of, published),
        ],
        tables=[
            Table("Unseen classes, last epoch; ± is the 95% t-interval over seeds", head, rows),
            _pair_table(pairs),
            _stages_table(results_of),
        ],
        values={
            "methods": values,
            "untrained": {
                n: {c: mean(r[c] for r in some) for c in columns} for n, some in baselines.items()
            },
            "pairs": {
                f"{a} − {b}": vars(d) | {"verdict": d.verdict} for (a, b), d in pairs.items()
            },
            "further": {m: vars(d) | {"verdict": d.verdict} for m, d in further.items()},
            "stages": {m: [r.get("stages", {}) for r in results_of[m]] for m in LOSSES},
            "paper": published,
        },
    )


def ordering(
    order: Sequence[str], pairs: dict[tuple[str, str], SeededDifference], ranked: Sequence[str]
) -> str:
    """Say whether the paper's order holds, by the intervals."""
    first = order[0]
    verdicts: dict[str, list[str]] = {"above": [], "below": [], "indistinguishable": []}
    for other in order[1:]:
        verdicts[pairs[first, other].verdict].append(METHODS[other])
    place = [m for m in ranked if m in order].index(first) + 1
    parts = []
    if verdicts["above"]:
        parts.append(f"above {list_words(verdicts['above'])}")
    if verdicts["indistinguishable"]:
        parts.append(f"indistinguishable from {list_words(verdicts['indistinguishable'])}")
    if verdicts["below"]:
        parts.append(f"below {list_words(verdicts['below'])}")
    counts = {v: sum(d.verdict == v for d in pairs.values()) for v in verdicts}
    whole = (
        "The paper's order holds in full"
        if counts["above"] == len(pairs)
        else "The paper's order is contradicted"
        if counts["below"]
        else "The paper's order is neither confirmed in full nor contradicted"
    )
    return (
        f"{METHODS[first]}, first in the paper, is number {place} of {len(order)} here: "
        f"{'; '.join(parts)}. {whole}: of its {len(pairs)} pairs {counts['above']} are confirmed, "
        f"{counts['below']} reversed and {counts['indistinguishable']} are indistinguishable "
        f"({certainty(pairs.values())})."
    )


def beyond_the_paper(further: dict[str, SeededDifference]) -> str:
    """Compare Proxy-NCA as the field uses it with the paper's, by the intervals."""
    parts = [
        f"{NAMES[m]} {100 * d.mean:+.2f} points, {d.verdict}".replace(" -", " −")
        for m, d in further.items()
    ]
    return (
        f"Beside Proxy-NCA as the paper writes it, in Recall@1: {'; '.join(parts)} "
        f"({certainty(further.values())})."
    )


def certainty(differences: Iterable[SeededDifference]) -> str:
    """Say how certain verdicts are; some of many will be wrong."""
    several = all(d.over_seeds for d in differences)
    over = "over seeds and over classes" if several else "over classes alone: one seed"
    return f"95%, each by itself, {over}"


def against_start(results_of: dict[str, list[Result]], start: float) -> str:
    """Say which methods training has improved."""
    ends = {NAMES[m]: mean(r["recall@1"] for r in rs) for m, rs in results_of.items()}
    gained = [name for name, end in ends.items() if end > start]
    lost = [name for name in ends if name not in gained]
    base = f"{100 * start:.2f}"
    if not lost:
        return f"Every method ends above where it started ({base})."
    if not gained:
        return f"No method ends above where it started ({base})."
    return (
        f"Above where all start ({base}) end {list_words(gained)}; {list_words(lost)} "
        f"{'ends' if len(lost) == 1 else 'end'} below it (by means)."
    )


def levels(
    source: Source, results_of: dict[str, list[Result]], published: dict[str, Any]
) -> list[str]:
    """Say why the numbers themselves are not the paper's."""
    if not published:
        return ["The paper has no such table; its order on Cars196 is what is compared."]
    why = {
        "minutes": "a head on fixed features of another, better backbone is trained here, where "
        "the paper fine-tunes Inception",
        "hours": "only the last stage of another, better backbone is fine-tuned here, where the "
        "paper fine-tunes all of Inception",
        "paper": "the paper gives neither rates nor epochs, so ours may differ"
        + ("" if "weights" in source.budget.settings else "; and no ImageNet weights were given"),
    }[source.budget.name]
    gaps = {
        m: 100 * mean(r["recall@1"] for r in results_of[m]) - row["recall@1"]
        for m, row in published.items()
        if "recall@1" in row
    }
    if not gaps:
        return [f"The paper prints no Recall@1 for it; {why}."]
    low, high = min(gaps.values()), max(gaps.values())
    return [
        f"Ours differ from the paper's Recall@1 by {low:+.1f} to {high:+.1f} points: {why}. So the "
        "levels say nothing about the losses; only the order within a column does."
    ]


def _row(
    name: str,
    results: Sequence[Result],
    columns: Sequence[str],
    published: dict[str, Any],
    loss: str = "",
) -> list[str]:
    cells = [name, *(plus_minus([r[c] for r in results]) for c in columns)]
    if published:
        numbers = published.get(loss, {})
        cells += [f"{numbers[c]:.2f}" if c in numbers else "–" for c in ("recall@1", "nmi")]
    return cells


def _pair_table(pairs: dict[tuple[str, str], SeededDifference]) -> Table:
    head = ["the paper's better − worse", "difference of R@1", "95%, seeds", "95%, classes", "so"]
    words = {"above": "confirmed", "below": "reversed", "indistinguishable": "indistinguishable"}
    rows = [
        [
            f"{METHODS[a]} − {METHODS[b]}",
            f"{100 * d.mean:+.2f}".replace("-", "−"),
            span(d.over_seeds, sign=True),
            span(d.over_classes, sign=True),
            words[d.verdict],
        ]
        for (a, b), d in pairs.items()
    ]
    return Table("The paper's order, pair by pair", head, rows)


def _stages_table(results_of: dict[str, list[Result]]) -> Table:
    """Return a row a method; "–" where earlier versions did not record it."""
    rows = []
    for m, results in results_of.items():
        stages = [r["stages"] for r in results if "stages" in r]
        cells = [f"{mean(s[stage] for s in stages):.1f}" if stages else "–" for stage in STAGES]
        memory = [r["peak_bytes"] / 2**30 for r in results if "peak_bytes" in r]
        rows.append([NAMES[m], *cells, f"{max(memory):.2f}" if memory else "–"])
    timed = comparable_times([r for results in results_of.values() for r in results])
    title = "Seconds of each stage, mean over seeds; memory is the peak of the process until then"
    return Table(
        title if timed else f"{title}. {NOT_TIMED}",
        ["", *STAGES.values(), "memory, GB"],
        rows,
    )


def _title(column: str) -> str:
    return column.upper() if column == "nmi" else column.replace("recall", "R")
