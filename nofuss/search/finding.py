"""Find what is most like a picture, in a run's index or its test items: `nofuss search`."""

from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nofuss.data.collection import printable
from nofuss.data.columns import Type
from nofuss.data.open import open_data
from nofuss.errors import DataError, UsageError
from nofuss.model.encoder import Encoder, load
from nofuss.progress import Progress, silent
from nofuss.run.directory import Run
from nofuss.search.filter import Condition, FilterError, parse_filter
from nofuss.search.index import Index
from nofuss.search.searchable import open_searchable
from nofuss.search.searcher import COPIED, OPEN_SET, Found, RerankMode, Searcher
from nofuss.search.stores import Searched

METRIC = "Euclidean distance on the unit sphere: 0 equal, 2 opposite"


class Answers(NamedTuple):
    """What a search found."""

    content: dict[str, Any]
    """As --json prints it: metric, re-ranking, the open-set rule, queries."""
    types: dict[str, Type]
    """Of the columns."""
    why_no_verdict: str
    """Why it can't be said that nothing like a query is there; empty if it can."""


def find_similar(
    run: Path,
    pictures: Sequence[Path],
    *,
    k: int,
    where: str | None = None,
    url: str | None = None,
    rerank: RerankMode = "auto",
    progress: Progress = silent,
) -> Answers:
    """Return the `k` nearest neighbours of each picture that pass a filter."""
    opened, encoder = Run.open(run), load(run)
    names, vectors = _embed_queries(encoder, pictures)
    with closing(
        open_searchable(opened, encoder, url, rerank=rerank, progress=progress)
    ) as searchable:
        searcher, types = searchable.searcher, searchable.index.types
        condition = None if where is None else read_filter(where, types)
        found = searcher.search_all(vectors, k, where=condition)
        results = [
            answer(name, each, searchable.index) for name, each in zip(names, found, strict=True)
        ]
    filtered = condition is not None
    content = {"run": str(run), "metric": METRIC} | about(searcher, filtered=filtered)
    reason = "" if filtered else why_no_verdict(searcher, encoder)
    return Answers(content | {"queries": results}, dict(types), reason)


def about(searcher: Searcher, *, filtered: bool = False) -> dict[str, Any]:
    """Return how the index is searched, ready for JSON: re-ranking, and the open-set rule.

    Neither is used with a filter, so both are None then.
    """
    weighting, open_set = searcher.weighting, searcher.open_set
    if filtered:
        weighting = open_set = None
    names = ("rule", "auroc", "rejected", "false_rejections", "useful", "items", "classes")
    return {
        "rerank": weighting and weighting._asdict(),
        "open_set": open_set and {name: getattr(open_set, name) for name in names},
    }


def why_no_verdict(searcher: Searcher, encoder: Encoder) -> str:
    """Return why search can't say "nothing like this"; empty if it can."""
    if searcher.open_set is not None:
        return "" if searcher.open_set.useful else searcher.open_set.describe()
    if encoder.extra.get(OPEN_SET) is None and not encoder.class_names:
        reason = "that needs labels, and the run was trained without"
    elif encoder.extra.get(OPEN_SET) is None:
        reason = "training had too few held-out classes to find a rule; train on more classes"
    elif isinstance(searcher.index, Index):
        reason = "that needs labels of more classes in the index"
    else:
        reason = (
            f"that needs labels of more classes in the index, and at most {COPIED:,} items in a "
            "database"
        )
    return f"search can't say whether a class is in the index at all: {reason}"


def answer(query: str, found: Found, index: Searched) -> dict[str, Any]:
    """Return a query's neighbours, ready for JSON; `found` is None where that can't be told."""
    items = zip(index.items(found.rows), found.rows, found.distances, strict=True)
    neighbours = [
        {"path": name, "label": label, "distance": distance, "row": row, "columns": dict(cells)}
        for (name, label, cells), row, distance in items
    ]
    return {
        "query": query,
        "found": found.found,
        "confidence": found.confidence,
        "verdict": found.verdict,
        "neighbours": neighbours,
    }


def _embed_queries(encoder: Encoder, queries: Sequence[Path]) -> tuple[list[str], Tensor]:
    """Embed pictures, and every row of files of arrays, before anything is printed."""
    names, vectors = list[str](), list[Tensor]()
    for query in queries:
        if query.suffix.lower() in (".npz", ".safetensors"):
            collection = open_data(query)
            names += [f"{query}#{row}" for row in range(len(collection))]
            vectors.append(encoder.embed_collection(collection))
        elif encoder.preprocessing is None:
            raise DataError(f"{printable(query)}: the model takes vectors; give an .npz of them")
        else:
            names.append(str(query))
            vectors.append(encoder.embed([query]))
    return names, torch.cat(vectors)


def read_filter(text: str, types: Mapping[str, Type]) -> Condition:
    """Return what --where says; UsageError if it can't be read."""
    try:
        return parse_filter(text, types)
    except FilterError as error:
        raise UsageError(f"--where: {error}") from None
