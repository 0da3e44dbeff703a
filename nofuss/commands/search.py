"""`nofuss search`: find what is most like a picture, in the run's index or its test items."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from nofuss.commands import IndexUrl, RunPath, console
from nofuss.errors import UsageError

if TYPE_CHECKING:
    from nofuss.data.columns import Type


def main(
    run: RunPath,
    /,
    *pictures: Annotated[Path, Parameter(name="PICTURE", required=True)],
    k: Annotated[int, Parameter(alias="-k", metavar="N")] = 10,
    where: Annotated[str | None, Parameter(metavar="FILTER")] = None,
    index: IndexUrl = None,
    json: bool = False,
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
        rerank: none ranks by distance alone; auto re-ranks if the run's folds gained by it.
    """
    if k < 1:
        raise UsageError(f"-k is {k}; expected 1 or more")
    from nofuss.search.finding import find_similar  # here, so that --help does not load torch

    found = find_similar(
        run,
        pictures,
        k=k,
        where=where,
        url=index,
        rerank=rerank,
        progress=console.progress,
    )
    if json:
        console.print_json(found.content)
        return
    for result in found.content["queries"]:
        _show(result, found.types, filtered=where is not None)
    if found.why_no_verdict:
        console.say(found.why_no_verdict)


def _show(result: dict[str, Any], types: "Mapping[str, Type]", *, filtered: bool) -> None:
    """Print a heading and a line a neighbour."""
    from nofuss.data.collection import printable
    from nofuss.data.columns import shown

    console.say(printable(result["query"]))
    if filtered and not result["neighbours"]:
        console.say("  nothing passes the filter")
    if result["found"] is not None:
        console.say(f"  {result['verdict']}")
    for neighbour in result["neighbours"]:
        label = neighbour["label"] if neighbour["label"] is not None else "–"
        cells = "".join(
            f"  {printable(name)}: {shown(value, types.get(name, 'text'))}"
            for name, value in neighbour["columns"].items()
        )
        path = printable(neighbour["path"])
        console.say(f"  {neighbour['distance']:.3f}  {printable(label)}  {path}{cells}")
