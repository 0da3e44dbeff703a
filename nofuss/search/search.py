"""`search`: what is most like a picture, and whether anything is; for command, page and Python.

    embed the query → its 200 nearest (index) → re-rank them, if the run's folds gained by it
    → is anything like it there (open set) → the first k

Distances are those to the items themselves, re-ranked or not. Of items that pass a filter, the
nearest are found by distance alone, without a verdict: both are about the whole index.
"""

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from nofuss.data.columns import Value
from nofuss.errors import RunError
from nofuss.geometry import normalize
from nofuss.model.encoder import Encoder
from nofuss.model.manifest import mapped
from nofuss.ranking.neighbours import SIZE, Vicinity, query_blocks, vicinity_of
from nofuss.ranking.open_set import RULES, OpenSet, calibrate
from nofuss.ranking.rerank import Rerank, Weighting, fitting
from nofuss.ranking.rerank import rerank as rerank_vicinity
from nofuss.search.filter import Condition
from nofuss.search.folder import FolderIndex
from nofuss.search.index import About, Hits, Index, Item

Match = Literal["good", "unsure", "nothing", "unknown"]
_Kept = TypeVar("_Kept", OpenSet, Rerank)
_MATCH: dict[str, Match] = {"here": "good", "perhaps": "unsure", "nothing": "nothing"}
VOTERS = 10
"""Neighbours that say which class a picture most likely is of."""
COPIED = 5_000
"""Most items of a database that are read to calibrate on."""
OPEN_SET, RERANK = "open_set", "rerank"
"""Keys of what training keeps with the model."""


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
    """The same in a sentence; empty without a rule."""
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
    query: str | Path | Image.Image | np.ndarray[Any, Any] | Tensor,
    k: int = 10,
    *,
    where: Condition | None = None,
    without: str | None = None,
    rerank: bool = True,
) -> Answer:
    """Return the k best of a picture, or of a vector (D,) as a tensor.

    without: the name of an item to leave out. rerank: False ranks by distance alone.
    """
    began = time.perf_counter()
    vector = query if isinstance(query, Tensor) else encoder.embed([query])[0]
    [answer] = search_all(
        index, encoder, vector[None], k, where=where, without=without, rerank=rerank
    )
    return replace(answer, milliseconds=1000 * (time.perf_counter() - began))


def search_all(
    index: Index,
    encoder: Encoder,
    vectors: Tensor,
    k: int = 10,
    *,
    where: Condition | None = None,
    without: str | None = None,
    rerank: bool = True,
) -> list[Answer]:
    """Return the k best of each vector (Q, D) by the model as it was trained; see `search`."""
    about = index.about
    weighting = weighting_of(about, encoder) if rerank and where is None else None
    rule = about.open_set if where is None else None
    wanted = (max(k, SIZE) if where is None else k) + (without is not None)
    answers = list[Answer]()
    for block in query_blocks(len(vectors), 1, about.dim):
        queries = mapped(normalize(vectors[block].float()), index.matrix)
        hits = [_without(each, without) for each in index.search(queries, wanted, where=where)]
        is_judged = weighting is not None or rule is not None
        looked_at = {name for each in hits for name in each.names[: SIZE if is_judged else k]}
        looked_at |= {name for each in hits for name in each.names[:k]}
        items = {item.name: item for item in index.get(list(looked_at), vectors=is_judged)}
        order = [list(range(len(each.names))) for each in hits]
        verdicts: list[tuple[Match, str]] = [("unknown", "")] * len(hits)
        if is_judged and items:
            around = _vicinity(queries, hits, items, index.matrix)
            if weighting is not None:
                order = _reranked(around, weighting, hits)
            if rule is not None:
                verdicts = _judged(around, rule, hits, items)
        for query, each, places, verdict in zip(vectors[block], hits, order, verdicts, strict=True):
            found = [(each.names[at], each.distances[at]) for at in places]
            known = [(items[name], far) for name, far in found if name in items][:k]
            shown = tuple(Hit(item.name, item.label, far, item.columns) for item, far in known)
            answers.append(Answer(shown, *verdict, _vote(shown, verdict[0]), query))
    return answers


def _without(hits: Hits, name: str | None) -> Hits:
    kept = [at for at, each in enumerate(hits.names) if each != name]
    return Hits([hits.names[at] for at in kept], [hits.distances[at] for at in kept])


def _vicinity(
    queries: Tensor, hits: Sequence[Hits], items: Mapping[str, Item], matrix: Tensor | None
) -> Vicinity:
    """Return the vicinity of each query (Q, D): −1 and zeros where it has fewer items."""
    place = {name: at for at, name in enumerate(items)}
    vectors = torch.stack([v for item in items.values() if (v := item.vector) is not None])
    vectors = mapped(vectors, matrix)
    size = min(SIZE, max(len(each.names) for each in hits))
    rows = torch.full((len(hits), size), -1)
    for i, each in enumerate(hits):
        near = [place.get(name, -1) for name in each.names[:size]]
        rows[i, : len(near)] = torch.tensor(near, dtype=torch.int64)
    return vicinity_of(queries, vectors[rows.clamp_min(0)], rows)


def _reranked(around: Vicinity, weighting: Weighting, hits: Sequence[Hits]) -> list[list[int]]:
    """Return the places of each query's hits in their new order; those beyond the vicinity stay."""
    scores = rerank_vicinity(around, weighting)
    order = scores.sort(dim=1, descending=True, stable=True).indices.tolist()
    found = []
    for each, places in zip(hits, order, strict=True):
        near = [at for at in places if at < len(each.names)]
        found.append(near + list(range(len(near), len(each.names))))
    return found


def _judged(
    around: Vicinity, rule: OpenSet, hits: Sequence[Hits], items: Mapping[str, Item]
) -> list[tuple[Match, str]]:
    codes = torch.full_like(around.rows, -1)
    for i, each in enumerate(hits):
        near = [item.label if (item := items.get(n)) else None for n in each.names]
        some = codes_of(near[: codes.shape[1]])
        codes[i, : len(some)] = torch.from_numpy(some)
    verdicts = [rule.judge(value) for value in RULES[rule.rule](around, codes).tolist()]
    found = [(_MATCH.get(word, "unknown"), sentence) for word, sentence in verdicts]
    return [each if hit.names else ("unknown", "") for each, hit in zip(found, hits, strict=True)]


def _vote(hits: Sequence[Hit], match: Match) -> Vote | None:
    labels = [hit.label for hit in hits[:VOTERS]]
    votes = Counter(label for label in labels if label is not None)
    if match == "nothing" or not votes:
        return None
    label, count = votes.most_common(1)[0]  # of equal counts the first met
    return Vote(label, count, len(labels))


# What training and the index decide


def weighting_of(about: About, encoder: Encoder) -> Weighting | None:
    """Return how this index is re-ranked; None by distance alone."""
    decision = kept_reranking(encoder)
    if decision is None:
        return None
    sizes = [] if about.relatives is None else [about.relatives + 1]
    return fitting(decision.weighting, np.array(sizes, np.int64))


def kept_reranking(encoder: Encoder) -> Rerank | None:
    """Return what the folds of the run decided; None if they were too few to decide."""
    return _read(Rerank, encoder.extra.get(RERANK))


def calibrated(index: Index, encoder: Encoder) -> About:
    """Return what holds for the index, with what unknown classes look like among its present ones.

    A large database is not read for it: it is searched by distance, and gives no verdict.
    """
    about = index.about._replace(open_set=None, relatives=0)
    if isinstance(index, FolderIndex):
        labels, vectors = index.labels, index.vectors
    else:
        names = index.sample(COPIED + 1)
        if not 0 < len(names) <= COPIED:
            return about
        items = index.get(names, vectors=True)
        labels = [item.label for item in items]
        vectors = torch.stack([v for item in items if (v := item.vector) is not None])
    codes = codes_of(labels)
    sizes = np.bincount(codes[codes >= 0])
    relatives = int(np.median(np.repeat(sizes, sizes))) - 1 if len(sizes) else None
    rule = _read(OpenSet, encoder.extra.get(OPEN_SET))
    if rule is not None:
        learned = set(encoder.class_names)
        seen = torch.tensor([label in learned for label in labels], dtype=torch.bool)
        rule = calibrate(vectors, torch.from_numpy(codes), rule, seen=seen)
    return about._replace(open_set=rule, relatives=relatives)


def codes_of(labels: Sequence[str | None]) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return a number for each label, in the order of the sorted labels; −1 for none."""
    place = {name: i for i, name in enumerate(sorted({c for c in labels if c is not None}))}
    return np.array([-1 if label is None else place[label] for label in labels], np.int64)


def why_no_verdict(index: Index, encoder: Encoder) -> str:
    """Return why search can't say "nothing like this"; empty if it can."""
    rule = index.about.open_set
    if rule is not None:
        return "" if rule.useful else rule.describe()
    if encoder.extra.get(OPEN_SET) is None and not encoder.class_names:
        reason = "that needs labels, and the run was trained without"
    elif encoder.extra.get(OPEN_SET) is None:
        reason = "training had too few held-out classes to find a rule; train on more classes"
    elif isinstance(index, FolderIndex):
        reason = "that needs labels of more classes in the index"
    else:
        reason = (
            f"that needs labels of more classes in the index, and at most {COPIED:,} items in a "
            "database"
        )
    return f"search can't say whether a class is in the index at all: {reason}"


def _read(kind: type[_Kept], stored: object) -> _Kept | None:
    if stored is None:
        return None
    try:
        return kind.from_dict(stored)
    except (KeyError, TypeError, ValueError) as error:
        reason = " ".join(str(error).split())
        name = OPEN_SET if kind is OpenSet else RERANK
        raise RunError(
            f"model.json holds {name} that nofuss did not write ({reason:.100}); restore it, or "
            "make it again"
        ) from None
