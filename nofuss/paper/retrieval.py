"""`retrieval`: queries of unseen classes with their nearest neighbours, Figures 3 and 5."""

from nofuss.paper import page
from nofuss.paper.runner import Runner
from nofuss.paper.trials import trial_of


def entry(runner: Runner) -> page.Entry:
    """Return rows of pictures: queries drawn at random, then the best and the worst."""
    source = runner.source
    trial = trial_of(source, "proxy-nca", runner.rate("proxy-nca"), record="neighbours")
    recall = runner.run({"": [trial]})[""][0]["recall@1"]
    return page.Entry(
        title=f"Figures 3, 5: retrieval, {source.title}",
        claim="Neighbours of queries from unseen classes, ranked by distance.",
        verdict="shown",
        sentence=f"{100 * recall:.1f}% of the queries have an item of their class as the nearest "
        "neighbour (Proxy-NCA, one seed). ✓ with a solid frame is of the query's class, ✗ with a "
        "dashed one is not.",
        values={"recall@1": recall},
        grid=trial.key(source),
    )
