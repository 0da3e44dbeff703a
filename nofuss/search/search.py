"""`search`: what is most like a picture, and whether anything is; for command, page and Python.

    embed the query → its nearest (index) → re-rank them, if the run's folds gained by it
                    → is anything like it there (verdict.py)

Distances are those to the items themselves, re-ranked or not. Of items that pass a filter, the
nearest are found by distance alone, without a verdict: both are about the whole index.
"""

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from nofuss.config import read_as
from nofuss.data.columns import Value
from nofuss.errors import DataError, RunError, command
from nofuss.geometry import normalize
from nofuss.model.encoder import Encoder, load
from nofuss.model.manifest import mapped
from nofuss.model.saved import model_digest
from nofuss.ranking.neighbours import SIZE, query_blocks, vicinity_of
from nofuss.ranking.open_set import Match
from nofuss.ranking.rerank import NEIGHBOURS, Rerank, reordered
from nofuss.run.directory import Run
from nofuss.search.engines import open_engine
from nofuss.search.feedback import Feedback, corrected, read_feedback
from nofuss.search.filter import Condition
from nofuss.search.folder import FolderIndex
from nofuss.search.index import About, Index, Item, vectors_of
from nofuss.search.verdict import Query, Verdict, judged, queries_of

Found = list[tuple[Item, float]]
"""Items and their distances."""
VOTERS = 10
"""Neighbours that say which class a picture most likely is of."""
RERANK = "rerank"
"""Key of what training keeps with the model."""


@dataclass(frozen=True)
class Searched:
    """An index, the model whose vectors it holds, and what people said of both."""

    encoder: Encoder
    """As it was trained."""
    stored: Index
    """As it is kept, with the map in force that feedback taught."""
    feedback: Feedback
    """None in a database."""

    @property
    def index(self) -> Index:
        """The index with the labels that are corrected."""
        return corrected(self.stored, self.feedback)


def open_search(run: Run, url: str | None = None) -> Searched:
    """Open a run's model with what `nofuss search` and the page search in.

    That is the run's own index, which holds the trained pictures from the beginning and what
    `nofuss index` added, or the one in the database at a URL. The data are never opened for it.
    """
    encoder = load(run.path, feedback=False)
    index: Index
    try:
        if url is None:
            index = FolderIndex.open(run.index, encoder.digest, encoder.dim)
        else:
            index = open_engine(url, About(encoder.digest, encoder.dim))
    except RunError:
        if model_digest(run.model) == encoder.digest:
            raise
        return open_search(run, url)  # another command has just replaced the model
    if not index.count():
        index.close()
        cure = f"{command('nofuss', 'index', run.path)} DIR{' --to URL' if url else ''}"
        raise DataError(f"the index in {index.place} is empty; add pictures: {cure}")
    return Searched(encoder, index, Feedback() if url else read_feedback(run.path))


@dataclass(frozen=True)
class Hit:
    """An item that was found."""

    name: str
    label: str | None
    distance: float
    columns: Mapping[str, Value]


@dataclass(frozen=True)
class Vote:
    """The class of most of the first neighbours; of equal ones the nearest."""

    label: str
    votes: int
    voters: int


@dataclass(frozen=True)
class Answer:
    """What a search found, in order, and whether that is like the query."""

    hits: tuple[Hit, ...]
    match: Match
    """unknown: among filtered items, or in an index without a rule."""
    sentence: str
    """The same in a sentence; empty for unknown."""
    numbers: Mapping[str, float | None]
    """What it follows from, see `Verdict`."""
    likely: Vote | None
    vector: Tensor
    """(D,) of the query, by the model as it was trained."""
    milliseconds: float = 0.0

    @property
    def found(self) -> bool | None:
        """Whether something like the query is there; None if that can't be told."""
        return None if self.match == "unknown" else self.match != "nothing"


def search(
    index: Index,
    encoder: Encoder,
    query: str | Path | Image.Image | np.ndarray[Any, Any] | Tensor | Query,
    k: int = 10,
    *,
    where: Condition | None = None,
    without: str | None = None,
    rerank: bool = True,
) -> Answer:
    """Return the k best of a picture, or of a vector (D,) as a tensor.

    A vector alone is never told "nothing similar": that takes the picture, or what a `Query` says
    of it. without: the name of an item to leave out. rerank: False ranks by distance alone.
    """
    began = time.perf_counter()
    if isinstance(query, Tensor):
        query = Query(query)
    elif not isinstance(query, Query):
        [query] = queries_of(index, encoder.encode([query]))
    [answer] = search_all(index, encoder, [query], k, where=where, without=without, rerank=rerank)
    return replace(answer, milliseconds=1000 * (time.perf_counter() - began))


def search_all(
    index: Index,
    encoder: Encoder,
    queries: Sequence[Query],
    k: int = 10,
    *,
    where: Condition | None = None,
    without: str | None = None,
    rerank: bool = True,
) -> list[Answer]:
    """Return the k best of each query; see `search`."""
    about = index.about
    averaged = averaged_by(about, encoder) if rerank and where is None else 0
    wanted = (max(k, SIZE) if averaged else k) + (without is not None)
    answers = list[Answer]()
    for block in query_blocks(len(queries), 1, about.dim):
        some = queries[block]
        vectors = normalize(torch.stack([query.vector for query in some]).float())
        x = mapped(vectors, index.matrix)
        hits = index.search(x, wanted, where=where)
        names = {name: None for each in hits for name in each.names if name != without}
        items = {item.name: item for item in index.get([*names], vectors=averaged > 0)}
        found = [
            [(items[n], far) for n, far in zip(*each, strict=True) if n in items] for each in hits
        ]
        # In an index that was emptied a moment ago there is nothing to say.
        verdicts = [Verdict()] * len(some)
        if averaged and items:
            found = _reranked(x, found, averaged, index.matrix)
        if where is None and items:
            verdicts = judged(index, some, without=without)
        for vector, each, verdict in zip(vectors, found, verdicts, strict=True):
            shown = tuple(Hit(item.name, item.label, far, item.columns) for item, far in each[:k])
            likely = _vote(shown, verdict.match)
            said = (verdict.match, verdict.sentence, verdict.numbers)
            answers.append(Answer(shown, *said, likely, vector))
    return answers


def _reranked(
    queries: Tensor, found: Sequence[Found], averaged: int, matrix: Tensor | None
) -> list[Found]:
    """Return what was found of each query (Q, D) in its new order; beyond the vicinity it stays."""
    items = {item.name: item for each in found for item, _ in each}
    place = {name: at for at, name in enumerate(items)}
    rows = torch.full((len(found), min(SIZE, max(map(len, found)))), -1)
    for i, each in enumerate(found):  # −1 where a query has fewer items
        near = [place[item.name] for item, _ in each[: rows.shape[1]]]
        rows[i, : len(near)] = torch.tensor(near, dtype=torch.int64)
    vectors = mapped(vectors_of(items.values(), queries.shape[1]), matrix)
    around = vicinity_of(queries, vectors[rows.clamp_min(0)], rows)
    reranked = list[Found]()
    for each, places in zip(found, reordered(around, averaged).tolist(), strict=True):
        order = [at for at in places if at < len(each)]
        reranked.append([each[at] for at in order] + each[len(order) :])
    return reranked


def _vote(hits: Sequence[Hit], match: Match) -> Vote | None:
    labels = [hit.label for hit in hits[:VOTERS]]
    votes = Counter(label for label in labels if label is not None)
    if match == "nothing" or not votes:
        return None
    label, count = votes.most_common(1)[0]  # of equal counts the first met
    return Vote(label, count, len(labels))


def averaged_by(about: About, encoder: Encoder) -> int:
    """Return how many neighbours are averaged to re-rank an index; 0 ranks by distance alone.

    No more than a typical item has relatives, see `fitting`.
    """
    stored = encoder.extra.get(RERANK)
    if stored is None:
        return 0
    try:
        is_on = read_as(Rerank, stored).on
    except ValueError:
        raise RunError(
            f"model.json holds {RERANK} that nofuss did not write; restore it, or train again"
        ) from None
    relatives = NEIGHBOURS if about.relatives is None else about.relatives
    return min(NEIGHBOURS, relatives) if is_on else 0
