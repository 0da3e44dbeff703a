"""`retrieval`: queries of unseen classes with their nearest neighbours, Figures 3 and 5."""

from nofuss.paper import page
from nofuss.paper.sources import Source
from nofuss.paper.trials import Rates, Results, Trial, trial_of

LOSSES = ("proxy-nca",)


def losses(source: Source) -> tuple[str, ...]:
    """Return the methods whose rates it uses."""
    return LOSSES


def trials(source: Source, rates: Rates) -> list[Trial]:
    """Return one training with Proxy-NCA."""
    return [trial_of(source, "proxy-nca", rates["proxy-nca"], record="neighbours")]


def entry(source: Source, rates: Rates, results: Results) -> page.Entry:
    """Return rows of pictures: queries drawn at random, then the best and the worst."""
    (trial,) = trials(source, rates)
    recall = results[trial]["recall@1"]
    return page.Entry(
        title=f"Figures 3, 5: retrieval, {source.title}",
        claim="Neighbours of queries from unseen classes, ranked by distance.",
        verdict="shown",
        sentence=f"{100 * recall:.1f}% of the queries have an item of their class as the nearest "
        "neighbour (Proxy-NCA, one seed); six queries are drawn at random, then the best and the "
        "worst follow. ✓ with a solid frame is of the query's class, ✗ with a dashed one is not.",
        values={"recall@1": recall},
        grid=trial.key(source),
    )
