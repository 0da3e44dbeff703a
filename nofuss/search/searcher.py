"""What a search answers: rows in order, their distances, and whether the query's class is there.

The order is that of the distances or, if the run's folds gained by it, the re-ranked one; the
distances are those to the items themselves either way. All of it is computed from one search.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

import numpy as np
import torch
from torch import Tensor

from nofuss.errors import RunError
from nofuss.geometry import normalize
from nofuss.model.encoder import Encoder
from nofuss.ranking.neighbours import SIZE, Vicinity, query_blocks, vicinity_of
from nofuss.ranking.open_set import RULES, Confidence, OpenSet, calibrate
from nofuss.ranking.rerank import Rerank, Weighting, fitting
from nofuss.ranking.rerank import rerank as rerank_vicinity
from nofuss.search.filter import Condition
from nofuss.search.index import Index, Label
from nofuss.search.stores import Searched

RerankMode = Literal["auto", "none"]
_Kept = TypeVar("_Kept", OpenSet, Rerank)
COPIED = 5_000
"""Most items of a database that are read to calibrate on."""
OPEN_SET, RERANK = "open_set", "rerank"
"""Keys of what training and `nofuss index` keep in `extra`."""


@dataclass(frozen=True)
class Found:
    """Rows of the index in order, their distances, and how likely the query's class is there."""

    rows: list[int]
    distances: list[float]
    confidence: Confidence | None = None
    """None where training or the index had too few classes to find out."""
    verdict: str = ""
    """The same in a sentence."""
    milliseconds: float = 0.0

    @property
    def nothing(self) -> bool:
        """Whether nothing like the query is there."""
        return self.confidence == "nothing"

    @property
    def found(self) -> bool | None:
        """Whether something like the query is there; None if that can't be told."""
        return None if self.confidence in (None, "unknown") else not self.nothing


class Searcher:
    """Searches an index as the run's folds decided, with an answer to "is it here at all"."""

    def __init__(
        self,
        index: Searched,
        weighting: Weighting | None = None,
        open_set: OpenSet | None = None,
    ) -> None:
        self.index, self.weighting, self.open_set = index, weighting, open_set

    def of(self, index: Index, encoder: Encoder) -> "Searcher":
        """Return the same way to search an index whose vectors have changed, calibrated again."""
        return Searcher(index, self.weighting, calibrated(index, encoder))

    def search_all(self, queries: Tensor, k: int, *, where: Condition | None = None) -> list[Found]:
        """Return the k best of each vector (Q, D); of those that pass a filter, the nearest."""
        if where is not None:
            return [self.search(query, k, where=where) for query in queries]
        found: list[Found] = []
        for block in query_blocks(len(queries), 1, self.index.dim):
            distances, rows = self.index.search(queries[block], max(k, SIZE))
            found += self._answers(queries[block], distances, rows, k)
        return found

    def search(
        self,
        query: Tensor,
        k: int,
        *,
        where: Condition | None = None,
        without: int | None = None,
    ) -> Found:
        """Return the k best of a vector (D,), leaving out item `without`.

        Of those that pass a filter: the k nearest, without a verdict, which is about everything.
        """
        wanted = (k if where is not None else max(k, SIZE)) + (without is not None)
        distances, rows = self.index.search(query[None], wanted, where=where)
        kept = rows[0] != (-1 if without is None else without)
        if where is not None:
            kept &= rows[0] >= 0
            return Found(rows[0, kept][:k].tolist(), distances[0, kept][:k].tolist())
        return self._answers(query[None], distances[:, kept], rows[:, kept], k)[0]

    def _answers(self, queries: Tensor, distances: Tensor, rows: Tensor, k: int) -> list[Found]:
        """Put what was found in order, and judge it."""
        nearest = self._vectors(rows[:, :SIZE])
        around = vicinity_of(normalize(queries.float()), nearest, rows[:, :SIZE])
        if self.weighting is not None and rows.shape[1]:
            order = rerank_vicinity(around, self.weighting).sort(
                dim=1, descending=True, stable=True
            )
            for column in (rows, distances):
                column[:, :SIZE] = column[:, :SIZE].gather(1, order.indices)
        verdicts = self._judge(around)
        found = []
        for near, far, verdict in zip(rows[:, :k], distances[:, :k], verdicts, strict=True):
            exists = near >= 0
            found.append(Found(near[exists].tolist(), far[exists].tolist(), *verdict))
        return found

    def _vectors(self, rows: Tensor) -> Tensor:
        """Return the vectors (Q, n, D) of rows (Q, n), zeros where there is none."""
        exists = rows >= 0
        vectors = torch.zeros(*rows.shape, self.index.dim)
        vectors[exists] = self.index.vectors_of(rows[exists].tolist())
        return vectors

    def _judge(self, around: Vicinity) -> list[tuple[Confidence | None, str]]:
        if self.open_set is None or not around.rows.shape[1]:
            return [(None, "")] * len(around.rows)
        rows = around.rows.tolist()
        known = sorted({row for each in rows for row in each if row >= 0})
        label = {-1: None} | {
            row: item.label for row, item in zip(known, self.index.items(known), strict=True)
        }
        names = [[label[row] for row in each] for each in rows]
        codes = torch.from_numpy(np.stack([_codes(labels)[0] for labels in names]))
        novelty = RULES[self.open_set.rule](around, codes)
        return [self.open_set.judge(value) for value in novelty.tolist()]


def open_searcher(index: Searched, encoder: Encoder, *, rerank: RerankMode = "auto") -> Searcher:
    """Return how the run searches this index; calibrated now if the index was not yet.

    A large database is not read for it: it is searched by distance, and gives no open-set verdict.
    """
    local = index if isinstance(index, Index) else _copy(index)
    if local is None:
        return Searcher(index)
    weighting = None
    if rerank == "auto" and (decision := kept_reranking(encoder)) is not None:
        weighting = fitting(decision.weighting, _codes(local.labels)[1])
    open_set = _read(OpenSet, local.extra.get(OPEN_SET), "the index")
    if OPEN_SET not in local.extra:
        open_set = calibrated(local, encoder)
    return Searcher(index, weighting, open_set)


def _copy(index: Searched) -> Index | None:
    """Return a database's items in memory; None if they are many."""
    rows = index.sample(COPIED + 1)
    if len(rows) > COPIED:
        return None
    names, labels, _ = zip(*index.items(rows), strict=True)
    return Index.build(index.vectors_of(rows), names=names, labels=labels)


def kept_reranking(encoder: Encoder) -> Rerank | None:
    """Return what the folds of the run decided; None if they were too few to decide."""
    return _read(Rerank, encoder.extra.get(RERANK), "model.json")


def calibrated(index: Index, encoder: Encoder) -> OpenSet | None:
    """Return what novelty means in this index; None if it or training had too few classes."""
    rule = _read(OpenSet, encoder.extra.get(OPEN_SET), "model.json")
    if rule is None:
        return None
    learned = set(encoder.class_names)
    seen = torch.tensor([label in learned for label in index.labels], dtype=torch.bool)
    return calibrate(index.vectors, torch.from_numpy(_codes(index.labels)[0]), rule, seen=seen)


def _codes(labels: Sequence[Label]) -> tuple[np.ndarray, np.ndarray]:
    """Return a number for each label, −1 for none, and how many items each number has."""
    place = {name: i for i, name in enumerate(sorted({c for c in labels if c is not None}))}
    codes = np.array([-1 if label is None else place[label] for label in labels], np.int64)
    return codes, np.bincount(codes[codes >= 0], minlength=len(place))


def _read(kind: type[_Kept], stored: object, where: str) -> _Kept | None:
    if stored is None:
        return None
    try:
        return kind.from_dict(stored)
    except (KeyError, TypeError, ValueError) as error:
        reason = " ".join(str(error).split())
        name = OPEN_SET if kind is OpenSet else RERANK
        raise RunError(
            f"{where} holds {name} that nofuss did not write ({reason:.100}); "
            "restore it, or make it again"
        ) from None
