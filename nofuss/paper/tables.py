"""`cub`, `cars`, `products`, and likewise `characters`: Recall@K and NMI of all methods.

Tables 1 and 2 and Figure 4 of the paper, with untrained baselines beside them. Networks differ from
the paper's, so that only the order within a column can be compared with it.
"""

from collections.abc import Mapping, Sequence
from itertools import combinations
from statistics import mean

from nofuss.evaluate.intervals import SeededDifference
from nofuss.paper import page
from nofuss.paper.published import FURTHER, METHODS, NAMES, PUBLISHED, Row, order_of
from nofuss.paper.runner import Runner
from nofuss.paper.trials import Result, starts_of

PLACES = {
    "cars": "Table 1",
    "cub": "Table 2",
    "products": "Figure 4",
    "han": "Figure 4",
    "characters": "Tables 1, 2",
}
Pairs = Mapping[tuple[str, str], SeededDifference]
"""(method, method that is worse in the paper) → the difference of their Recall@1."""


def entry(runner: Runner) -> page.Entry:
    """Return the table, the order of the methods, and the paper's numbers."""
    source, start = runner.source, "before training"
    seeds = {m: runner.seeds(m) for m in NAMES}
    untrained = starts_of(source, "untrained")[:1]
    results = runner.run({start: starts_of(source), **seeds, "": untrained})
    order = order_of(source.name)
    pairs = {(a, b): page.difference(results[a], results[b]) for a, b in combinations(order, 2)}
    further = {m: page.difference(results[m], results["proxy-nca"]) for m in FURTHER}
    ranked = sorted(NAMES, key=lambda m: -mean(page.recalls(results[m])))
    baselines = {name: [result] for name, result in results[""][0]["baselines"].items()}
    baselines[start] = results[start]
    published = PUBLISHED.get(source.name, {})
    columns = [f"recall@{k}" for k in source.ks] + ["nmi"]
    word, sentence = verdict(pairs, [m for m in ranked if m in order].index(order[0]) + 1)
    said = source.title if len(published) > 2 else "Cars196"
    return page.Entry(
        title=f"{PLACES[source.name]}: {source.title}",
        claim=f"In the paper, by Recall@1 on {said}: {' > '.join(METHODS[m] for m in order)}.",
        verdict=word,
        sentence=sentence,
        tables=[
            _score_table({m: results[m] for m in ranked} | baselines, columns, published),
            _pair_table(pairs, further),
        ],
        values={
            "methods": {
                m: {c: page.summary([r[c] for r in results[m]]) for c in columns} for m in NAMES
            },
            "untrained": {
                n: {c: mean(r[c] for r in some) for c in columns} for n, some in baselines.items()
            },
            "pairs": {
                f"{a} − {b}": vars(d) | {"verdict": d.verdict} for (a, b), d in pairs.items()
            },
            "further": {m: vars(d) | {"verdict": d.verdict} for m, d in further.items()},
            "spread": {m: [r["spread"] for r in results[m]] for m in NAMES},
            "paper": published,
        },
    )


def verdict(pairs: Pairs, place: int) -> tuple[page.Verdict, str]:
    """Say whether the paper's order holds, by the intervals.

    place: here, by Recall@1, of the method that is first in the paper.
    """
    found = [d.verdict for d in pairs.values()]
    return page.word_of(found), (
        f"Proxy-NCA, first in the paper, is number {place}; of the {len(pairs)} pairs of the "
        f"paper's order {found.count('above')} are confirmed, {found.count('below')} reversed and "
        f"{found.count('indistinguishable')} indistinguishable ({page.CERTAINTY})."
    )


def _score_table(
    results: Mapping[str, Sequence[Result]], columns: Sequence[str], published: Mapping[str, Row]
) -> page.Table:
    """Return a row per method and per baseline, with the paper's numbers if it has any."""
    beside = ("recall@1", "nmi") if published else ()
    titles = {c: c.upper() if c == "nmi" else c.replace("recall", "R") for c in columns}
    head = ["%", *titles.values(), *(f"paper: {titles[c]}" for c in beside)]
    rows = []
    for name, some in results.items():
        paper = published.get(name, {})
        rows.append(
            [
                NAMES.get(name, name),
                *(page.plus_minus([r[c] for r in some]) for c in columns),
                *(f"{paper[c]:.2f}" if c in paper else "–" for c in beside),
            ]
        )
    return page.Table("Unseen classes, last epoch; ± is the 95% t-interval over seeds", head, rows)


def _pair_table(pairs: Pairs, further: Mapping[str, SeededDifference]) -> page.Table:
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
    head = [
        "better − worse in the paper",
        "difference of R@1",
        "95%, seeds",
        "95%, classes",
        "verdict",
    ]
    return page.Table("The paper's order, pair by pair", head, rows)
