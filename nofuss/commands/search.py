"""`nofuss search`: find the most similar items in a run's index."""

from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from nofuss.commands import IndexUrl, RunPath, console
from nofuss.errors import DataError, UsageError

if TYPE_CHECKING:
    from nofuss.data.columns import Type
    from nofuss.model.encoder import Encoder
    from nofuss.search.index import Index
    from nofuss.search.search import Answer
    from nofuss.search.verdict import Query

MARKS = {"good": "✓", "unsure": "?", "nothing": "✗"}
LIMITS = ("far_limit", "near_limit", "items", "classes")
NO_VERDICT = (
    "search can't say whether anything similar is there: the index has fewer than five pictures, "
    "or none with features"
)
METRIC = "Euclidean distance on the unit sphere: 0 equal, 2 opposite"


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
    """Find the most similar items in a run's index.

    The index holds the pictures of the training, and those that `nofuss index RUN DIR` added.

    Args:
        run: A run directory of `nofuss train`.
        pictures: One or more pictures (or an .npz of vectors, for a run on vectors).
        k: Number of neighbours.
        where: Find only items whose columns match, as in "price<20 and shop=='north'". Columns are
            those of a CSV besides path, label and split, and `label`; see docs/engines.md. Matching
            items are ranked by distance alone, without a verdict on whether anything similar is
            there.
        index: The database that `nofuss index --to URL` wrote to.
        json: Print the results as JSON.
        rerank: none ranks by distance alone; auto re-ranks if that helped on held-out classes when
            the run was trained.
    """
    if k < 1:
        raise UsageError(f"-k is {k}; expected 1 or more")
    # here, so that --help does not load torch
    from nofuss.run.directory import Run
    from nofuss.search.filter import FilterError, parse_filter
    from nofuss.search.search import averaged_by, open_search, search_all

    opened = open_search(Run.open(run), index)
    encoder, searched = opened.encoder, opened.index
    with closing(searched):
        names, queries = _embed(searched, encoder, pictures)
        about = searched.about
        try:
            condition = None if where is None else parse_filter(where, about.types)
        except FilterError as error:
            raise UsageError(f"--where: {error}") from None
        is_reranked = rerank == "auto"
        answers = search_all(searched, encoder, queries, k, where=condition, rerank=is_reranked)
    if not json:
        for name, answer in zip(names, answers, strict=True):
            _show(name, answer, about.types, filtered=where is not None)
        if where is None and about.open_set is None:
            console.say(NO_VERDICT)
        return
    is_whole = where is None  # with a filter, by distance alone
    averaged = averaged_by(about, encoder) if is_reranked and is_whole else 0
    rule = about.open_set if is_whole else None
    console.print_json(
        {
            "run": str(run),
            "metric": METRIC,
            "rerank": {"neighbours": averaged} if averaged else None,
            "open_set": rule and {name: getattr(rule, name) for name in LIMITS},
            "queries": [_as_json(name, each) for name, each in zip(names, answers, strict=True)],
        }
    )


def _embed(
    index: "Index", encoder: "Encoder", paths: Sequence[Path]
) -> "tuple[list[str], list[Query]]":
    """Embed pictures, and every row of files of arrays, before anything is printed."""
    from nofuss.data.collection import printable
    from nofuss.data.open import open_data
    from nofuss.search.verdict import queries_of

    names, queries = list[str](), list["Query"]()
    for path in paths:
        if path.suffix.lower() in (".npz", ".safetensors"):
            collection = open_data(path)
            names += [f"{path}#{row}" for row in range(len(collection))]
            queries += queries_of(index, encoder.encode_collection(collection))
        elif not encoder.preprocessing:
            raise DataError(f"{printable(path)}: the model takes vectors; give an .npz of them")
        else:
            names.append(str(path))
            queries += queries_of(index, encoder.encode([path]))
    return names, queries


def _as_json(query: str, answer: "Answer") -> dict[str, Any]:
    return {
        "query": query,
        "found": answer.found,
        "match": answer.match,
        "sentence": answer.sentence,
        "open_set": dict(answer.numbers) or None,
        "neighbours": [
            {"path": hit.name, "label": hit.label, "distance": hit.distance}
            | {"columns": dict(hit.columns)}
            for hit in answer.hits
        ],
    }


def _show(query: str, answer: "Answer", types: "Mapping[str, Type]", *, filtered: bool) -> None:
    """Print a heading and a line a neighbour."""
    from nofuss.data.collection import printable
    from nofuss.data.columns import shown

    console.say(printable(query))
    if filtered and not answer.hits:
        console.say("  nothing passes the filter")
    if answer.sentence:
        console.say(f"  {MARKS[answer.match]} {answer.sentence}")
    for hit in answer.hits:
        label = printable(hit.label) if hit.label is not None else "–"
        cells = "".join(
            f"  {printable(name)}: {shown(value, types.get(name, 'text'))}"
            for name, value in hit.columns.items()
        )
        console.say(f"  {hit.distance:.3f}  {label}  {printable(hit.name)}{cells}")
