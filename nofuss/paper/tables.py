"""`cub`, `cars`, `products`, and likewise `characters`: Recall@K and NMI of all methods.

Tables 1 and 2 and Figure 4 of the paper, with untrained baselines beside them. Networks differ from
the paper's, so that only the order within a column can be compared with it.
"""

from collections.abc import Sequence
from itertools import combinations
from statistics import mean

from nofuss.evaluate.intervals import SeededDifference
from nofuss.paper import page
from nofuss.paper.published import FURTHER, METHODS, NAMES, PUBLISHED, Row, order_of
from nofuss.paper.sources import Source
from nofuss.paper.trials import Rates, Result, Results, Trial, seeds_of, starts_of, untrained_of

LOSSES = tuple(NAMES)
PLACES = {
    "cars": "Table 1",
    "cub": "Table 2",
    "products": "Figure 4",
    "han": "Figure 4",
    "characters": "Tables 1, 2",
}
Pairs = dict[tuple[str, str], SeededDifference]
"""(method, method that is worse in the paper) → the difference of their Recall@1."""


def losses(source: Source) -> tuple[str, ...]:
    """Return the methods whose rates it uses."""
    return LOSSES


def trials(source: Source, rates: Rates) -> list[Trial]:
    """Return every method with every seed, and what needs no training."""
    trained = [trial for loss in LOSSES for trial in seeds_of(source, rates, loss)]
    return [*starts_of(source), *trained, untrained_of(source)]


def entry(source: Source, rates: Rates, results: Results) -> page.Entry:
    """Return the table, the order of the methods, and the paper's numbers."""
    results_of = {m: [results[t] for t in seeds_of(source, rates, m)] for m in LOSSES}
    order = order_of(source.name)
    pairs = {
        (a, b): page.difference(results_of[a], results_of[b]) for a, b in combinations(order, 2)
    }
    further = {m: page.difference(results_of[m], results_of["proxy-nca"]) for m in FURTHER}
    ranked = sorted(LOSSES, key=lambda m: -mean(page.recalls(results_of[m])))
    untrained: dict[str, Result] = results[untrained_of(source)]["baselines"]
    baselines = {name: [result] for name, result in untrained.items()}
    baselines["where all start"] = [results[trial] for trial in starts_of(source)]
    published = PUBLISHED.get(source.name, {})
    columns = [f"recall@{k}" for k in source.ks] + ["nmi"]
    word, sentence = verdict(order, pairs, ranked)
    return page.Entry(
        title=f"{PLACES[source.name]}: {source.title}",
        claim=(
            f"In the paper, by Recall@1 on {'Cars196' if len(published) < 3 else source.title}: "
            + " > ".join(METHODS[m] for m in order)
            + "."
        ),
        verdict=word,
        sentence=sentence + page.collapses(results_of),
        tables=[
            _score_table({m: results_of[m] for m in ranked}, baselines, columns, published),
            _pair_table(pairs, further),
        ],
        values={
            "methods": {
                m: {c: page.summary([r[c] for r in results_of[m]]) for c in columns} for m in LOSSES
            },
            "untrained": {
                n: {c: mean(r[c] for r in some) for c in columns} for n, some in baselines.items()
            },
            "pairs": {
                f"{a} − {b}": vars(d) | {"verdict": d.verdict} for (a, b), d in pairs.items()
            },
            "further": {m: vars(d) | {"verdict": d.verdict} for m, d in further.items()},
            "spread": {m: [r["spread"] for r in results_of[m]] for m in LOSSES},
            "paper": published,
        },
    )


def verdict(order: Sequence[str], pairs: Pairs, ranked: Sequence[str]) -> tuple[page.Verdict, str]:
    """Say whether the paper's order holds, by the intervals.

    order: methods from best to worst in the paper; ranked: here.
    """
    first = order[0]
    beside: dict[str, list[str]] = {"above": [], "indistinguishable": [], "below": []}
    for other in order[1:]:
        beside[pairs[first, other].verdict].append(METHODS[other])
    count = {found: sum(d.verdict == found for d in pairs.values()) for found in beside}
    word: page.Verdict = "contradicted" if count["below"] else "undecided"
    if count["above"] == len(pairs):
        word = "confirmed"
    links = {"above": "above", "indistinguishable": "indistinguishable from", "below": "below"}
    parts = [f"{links[found]} {page.list_words(some)}" for found, some in beside.items() if some]
    place = [m for m in ranked if m in order].index(first) + 1
    return word, (
        f"{METHODS[first]}, first in the paper, is number {place} of {len(order)}: "
        f"{'; '.join(parts)}; of the {len(pairs)} pairs of the paper's order {count['above']} are "
        f"confirmed, {count['below']} reversed and {count['indistinguishable']} "
        f"indistinguishable ({page.certainty(pairs.values())})."
    )


def _score_table(
    results_of: dict[str, list[Result]],
    baselines: dict[str, list[Result]],
    columns: Sequence[str],
    published: dict[str, Row],
) -> page.Table:
    """Return a row per method and per baseline, with the paper's numbers if it has any."""
    beside = ("recall@1", "nmi") if published else ()
    titles = {c: c.upper() if c == "nmi" else c.replace("recall", "R") for c in columns}
    head = ["%", *titles.values(), *(f"paper: {titles[c]}" for c in beside)]
    rows = []
    for method, results in (results_of | baselines).items():
        paper = published.get(method, {})
        rows.append(
            [
                NAMES.get(method, method),
                *(page.plus_minus([r[c] for r in results]) for c in columns),
                *(f"{paper[c]:.2f}" if c in paper else "–" for c in beside),
            ]
        )
    return page.Table("Unseen classes, last epoch; ± is the 95% t-interval over seeds", head, rows)


def _pair_table(pairs: Pairs, further: dict[str, SeededDifference]) -> page.Table:
    """Return a row per pair of the paper's order, then what is beyond the paper."""
    words = {"above": "confirmed", "below": "reversed", "indistinguishable": "indistinguishable"}
    compared = [
        (f"{METHODS[a]} − {METHODS[b]}", d, words[d.verdict]) for (a, b), d in pairs.items()
    ]
    first = METHODS["proxy-nca"]
    compared += [
        (f"beyond the paper: {NAMES[m]} − {first}", d, d.verdict) for m, d in further.items()
    ]
    rows = [
        [name, page.signed(d.mean), page.span(d.over_seeds), page.span(d.over_classes), word]
        for name, d, word in compared
    ]
    head = ["the paper's better − worse", "difference of R@1", "95%, seeds", "95%, classes", "so"]
    return page.Table("The paper's order, pair by pair", head, rows)
