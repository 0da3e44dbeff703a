"""`nofuss search`: find what is most like a picture in a run's index."""

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
    from nofuss.search.filter import Condition
    from nofuss.search.index import Index
    from nofuss.search.search import Answer
    from nofuss.search.verdict import Query

MARKS = {"good": "✓", "unsure": "?", "nothing": "✗"}
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
    """Find what is most like a picture in a run's index.

    The index holds the pictures of the training, and those that `nofuss index RUN DIR` added.

    Args:
        run: A run directory of `nofuss train`.
        pictures: One or more pictures (or an .npz of vectors, for a run on vectors).
        k: Number of neighbours.
        where: Find only items whose columns match, as in "price<20 and shop=='north'". Columns are
            those of a CSV besides path, label and split, and `label`; see docs/engines.md. What
            passes is ranked by distance alone, without saying whether anything similar is there.
        index: The database that `nofuss index --to URL` wrote to.
        json: Print the results as JSON.
        rerank: none ranks by distance alone; auto re-ranks if the run's folds gained by it.
    """
    if k < 1:
        raise UsageError(f"-k is {k}; expected 1 or more")
    # here, so that --help does not load torch
    from nofuss.run.directory import Run
    from nofuss.search.open import open_search
    from nofuss.search.search import search_all
    from nofuss.search.verdict import why_no_verdict

    opened = open_search(Run.open(run), index)
    encoder, searched = opened.encoder, opened.index
    with closing(searched):
        names, queries = _embed(searched, encoder, pictures)
        types = searched.about.types
        condition = None if where is None else _read_filter(where, types)
        is_reranked = rerank == "auto"
        answers = search_all(searched, encoder, queries, k, where=condition, rerank=is_reranked)
        if json:
            about = {"run": str(run), "metric": METRIC}
            about |= _how(searched, encoder, rerank=is_reranked, filtered=where is not None)
            found = [_as_json(name, each) for name, each in zip(names, answers, strict=True)]
            console.print_json(about | {"queries": found})
            return
        for name, answer in zip(names, answers, strict=True):
            _show(name, answer, types, filtered=where is not None)
        if where is None and (reason := why_no_verdict(searched)):
            console.say(reason)


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
        elif encoder.preprocessing is None:
            raise DataError(f"{printable(path)}: the model takes vectors; give an .npz of them")
        else:
            names.append(str(path))
            queries += queries_of(index, encoder.encode([path]))
    return names, queries


def _read_filter(text: str, types: "Mapping[str, Type]") -> "Condition":
    from nofuss.search.filter import FilterError, parse_filter

    try:
        return parse_filter(text, types)
    except FilterError as error:
        raise UsageError(f"--where: {error}") from None


def _how(index: "Index", encoder: "Encoder", *, rerank: bool, filtered: bool) -> dict[str, Any]:
    """Return how the index is searched, ready for JSON; with a filter, by distance alone."""
    from nofuss.search.search import averaged_by

    about = index.about
    averaged = averaged_by(about, encoder) if rerank and not filtered else 0
    open_set = None if filtered else about.open_set
    names = ("far_limit", "near_limit", "items", "classes")
    return {
        "rerank": {"neighbours": averaged} if averaged else None,
        "open_set": open_set and {name: getattr(open_set, name) for name in names},
    }


def _as_json(query: str, answer: "Answer") -> dict[str, Any]:
    neighbours = [
        {
            "path": hit.name,
            "label": hit.label,
            "distance": hit.distance,
            "columns": dict(hit.columns),
        }
        for hit in answer.hits
    ]
    verdict = {"found": answer.found, "match": answer.match, "sentence": answer.sentence}
    numbers = dict(answer.numbers) or None
    return {"query": query, **verdict, "open_set": numbers, "neighbours": neighbours}


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
