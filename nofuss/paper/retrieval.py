"""`retrieval`: queries of unseen classes with their nearest neighbours, Figures 3 and 5."""

from nofuss.paper.entry import Entry, Results
from nofuss.paper.rates import Rates
from nofuss.paper.sources import Source
from nofuss.paper.trial import Trial

LOSSES = ("proxy-nca",)


def losses(source: Source) -> tuple[str, ...]:
    """Return the methods whose rates it uses."""
    return LOSSES


def trials(source: Source, rates: Rates) -> list[Trial]:
    """Return one training with Proxy-NCA."""
    return [Trial(source.budget.config("proxy-nca", rates["proxy-nca"]), record="neighbours")]


def entry(source: Source, rates: Rates, results: Results) -> Entry:
    """Return rows of pictures: queries drawn at random, then the best and the worst."""
    result = results[trials(source, rates)[0]]
    return Entry(
        title=f"Figures 3, 5: retrieval, {source.title}",
        claim="Neighbours of queries from unseen classes, ranked by distance.",
        verdict=[
            f"{100 * result['recall@1']:.1f}% of the queries have an item of their class as the "
            "nearest neighbour (Proxy-NCA, one seed). ✓ with a solid frame is of the query's "
            "class, ✗ with a dashed one is not. The paper shows queries of its own choice; here "
            "six are drawn at random, and the best and worst are shown too."
        ],
        values={"recall@1": result["recall@1"]},
        grid=trials(source, rates)[0].key(source),
    )
