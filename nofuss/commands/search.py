"""`nofuss search`: find what is most like a picture, in the run's index or its test items."""

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from nofuss.commands import IndexUrl, RunPath, check_new_png
from nofuss.errors import UsageError


def main(
    run: RunPath,
    /,
    *pictures: Annotated[Path, Parameter(name="PICTURE", required=True)],
    k: Annotated[int, Parameter(alias="-k", metavar="N")] = 10,
    where: Annotated[str | None, Parameter(metavar="FILTER")] = None,
    index: IndexUrl = None,
    json: bool = False,
    show: Annotated[Path | None, Parameter(metavar="FILE.png")] = None,
    rerank: Literal["auto", "none"] = "auto",
) -> None:
    """Find what is most like a picture: in the run's index, or without one in its test items.

    `nofuss serve` searches the same items. Test items are those of the classes kept out of
    training; where there are none, all items of the run's data. `nofuss index RUN DIR` makes an
    index.

    Args:
        run: A run directory of `nofuss train`.
        pictures: One or more pictures (or an .npz of vectors, for a run on vectors).
        k: Number of neighbours.
        where: Find only items whose columns match, as in "price<20 and shop=='north'". Columns are
            those of a CSV besides path, label and split, and `label`; see docs/engines.md. What
            passes is ranked by distance alone, without a verdict "nothing like this".
        index: The database that `nofuss index --to URL` wrote to.
        json: Print the results as JSON.
        show: Also draw the results, a row a query, the query on the left; never overwritten.
        rerank: none ranks by distance alone; auto re-ranks if the run's folds gained by it.
    """
    if k < 1:
        raise UsageError(f"-k is {k}; expected 1 or more")
    if show is not None:
        check_new_png("--show", show)
    from nofuss.search.finding import find_similar  # here, so that --help does not load torch

    find_similar(run, pictures, k=k, where=where, url=index, as_json=json, show=show, rerank=rerank)
