"""Re-ranking by the neighbourhood, its scores, and whether a run uses it.

Each item of a query's vicinity becomes the mean of itself and its eight nearest there, weighted by
cosine (database augmentation, Arandjelović & Zisserman 2012; α-query expansion, Radenović et al.
2018), and so does the query; the order is that of the means. Everything is a function of cosines,
so that no vector is computed. Labels are not used: what lies together with what is near is ranked
higher.

The eight nearest stay where they are, and with them Recall@1 to @8. Means find more relatives
further down, but where they err they err together: with fewer that stay, MAP@R rose a little more,
and Recall@8 fell (docs/lab).

A query is no item's neighbour: it is searched from outside. In scores, too, a query that is an item
of the gallery is left out before anything is averaged.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from nofuss.evaluate.intervals import class_intervals, in_points, paired_difference
from nofuss.evaluate.protocol import KS, scorable
from nofuss.evaluate.retrieval import classes_of, shared_classes
from nofuss.geometry import Array, as_tensor, normalize
from nofuss.progress import Progress, silent
from nofuss.ranking.neighbours import SIZE, Vicinity, query_blocks, vicinity_of

NEIGHBOURS = 8
"""Items that are averaged at most; with more, or by a power of their cosine, little changes."""
STAY = max(KS)
"""Nearest items that keep their places."""
TIE = 1e-6
"""Cosines that differ by less are equal, and ties count as wrong."""
QUERIES_OF_FOLD = 400
"""Queries of a fold that re-ranking is tried on."""
ENOUGH_CLASSES = 4
"""Classes of each fold that it takes: among fewer, nearly all neighbours are relatives, which an
index of all classes does not have."""


# The order


def fitting(sizes: Array) -> int:
    """Return how many neighbours are averaged in a gallery: no more than an item has relatives.

    sizes: (C,) items of each class, empty where that is unknown. More neighbours would average what
    has nothing in common; with one item a class it is 0, and ranking is by distance.
    """
    items = np.asarray(sizes)
    if not len(items):
        return NEIGHBOURS
    return min(NEIGHBOURS, int(np.median(np.repeat(items, items))) - 1)


class _Neighbours(NamedTuple):
    place: Tensor  # in the vicinity
    weight: Tensor


def reordered(around: Vicinity, neighbours: int, *, ties: Tensor | float = 0.0) -> Tensor:
    """Return the places of each vicinity in their new order, (Q, M).

    ties: (Q, M) is subtracted from the cosines.
    """
    scores = cosines_of_means(around, neighbours) - ties
    # Above every cosine, in their order.
    scores[:, :STAY] = torch.arange(STAY + 1.0, 1.0, -1.0)[: scores.shape[1]]
    scores.masked_fill_(~around.exists, -torch.inf)
    return scores.sort(dim=1, descending=True, stable=True).indices


@torch.no_grad()
def cosines_of_means(around: Vicinity, neighbours: int) -> Tensor:
    """Return the cosine of each item's mean with the query's, (Q, M); −inf where no item is."""
    near, gram, size = around.near, around.gram, around.near.shape[1]
    exists, count = around.exists, min(neighbours, size)
    place, weight = _weighed(near.masked_fill(~exists, -torch.inf), count)
    query_weights = torch.zeros_like(near).scatter_(1, place, weight)
    among_items = gram.masked_fill(~exists[:, None], -torch.inf)
    among_items.diagonal(dim1=1, dim2=2).fill_(-torch.inf)  # no item is its own neighbour
    of_items = _weighed(among_items, count)  # (Q, M, count)
    # Means are m = Σ w x, each item in its own with weight 1; their products follow from cosines.
    itself = torch.arange(size).expand(len(near), size)[..., None]
    place = torch.cat([itself, of_items.place], 2)
    weight = torch.cat([torch.ones_like(of_items.weight[..., :1]), of_items.weight], 2)
    with_query = near + (gram @ query_weights[..., None])[..., 0]  # x·(q + Σ w x)
    product = (weight * _pick(with_query, place)).sum(2)
    pairs = place[..., :, None] * size + place[..., None, :]  # (Q, M, count + 1, count + 1)
    among = _pick(gram.flatten(1), pairs)
    lengths = torch.einsum("qmab,qma,qmb->qm", among, weight, weight)
    scale = 1 + (query_weights * (near + with_query)).sum(1, keepdim=True)  # |q + Σ w x|²
    cosine = product / (lengths * scale).clamp_min(1e-12).sqrt()
    return cosine.masked_fill(~exists, -torch.inf)


def _weighed(cosines: Tensor, count: int) -> _Neighbours:
    """Return the nearest, weighted by cosine; by 0 where that is negative."""
    best, places = cosines.topk(count)
    return _Neighbours(places, best.clamp_min(0))


def _pick(values: Tensor, places: Tensor) -> Tensor:
    """Return values (Q, n) at places (Q, …)."""
    return values.gather(1, places.flatten(1)).view(places.shape)


# Its scores


class RerankedScores(NamedTuple):
    """Scores of single queries: hits at each of KS, MAP@R, R-precision, and their classes."""

    hits: Tensor  # (Q, len(KS))
    map_at_r: Tensor
    r_precision: Tensor
    labels: Tensor


class Reranked(NamedTuple):
    """Scores of the same queries by distance and re-ranked."""

    before: RerankedScores
    after: RerankedScores

    def gain(self) -> list[float]:
        """Return the mean change of MAP@R and its 95% interval over classes."""
        before, after = self
        return list(paired_difference(after.map_at_r, before.map_at_r, before.labels))

    def as_dict(self) -> dict[str, Any]:
        """Return the re-ranked scores for scores.json, with what changes."""
        results = {f"recall@{k}": self.after.hits[:, i] for i, k in enumerate(KS)}
        results |= {"map@r": self.after.map_at_r, "r_precision": self.after.r_precision}
        ends = class_intervals(results, self.after.labels)
        content: dict[str, Any] = {name: float(values.mean()) for name, values in results.items()}
        content |= {f"{name}_interval": list(interval) for name, interval in ends.items()}
        return content | {"gain": {"map@r": self.gain()}}


class _Task(NamedTuple):
    """Queries and gallery with their classes, and the row of each query in the gallery, or −1."""

    x: Tensor
    codes: Tensor
    items: Tensor
    item_codes: Tensor
    itself: Tensor


def reranked_scores(
    queries: Array,
    labels: Array,
    gallery: Array | None = None,
    gallery_labels: Array | None = None,
    query_rows: Array | None = None,
    *,
    most: int | None = None,
    progress: Progress = silent,
) -> Reranked:
    """Score both orders, as search has them. In single precision, ties as wrong.

    The gallery is as in `recall_at_k`; queries without a relative in it are left out, and more
    than `most` are thinned out evenly.
    """
    task = _lay_out(queries, labels, gallery, gallery_labels, query_rows)
    sizes = torch.bincount(task.item_codes, minlength=int(task.codes.max()) + 1)
    neighbours = fitting(sizes)
    relatives = sizes[task.codes] - (task.itself >= 0).long()
    chosen = (relatives > 0).nonzero()[:, 0]
    if most is not None and len(chosen) > most:
        chosen = chosen[torch.linspace(0, len(chosen) - 1, most).round().long()]
    longest = min(len(task.items), max(SIZE, *KS, int(relatives.max())))
    found: list[Reranked] = []
    done = 0
    for block in query_blocks(len(chosen), len(task.items), task.x.shape[1]):
        progress("scoring re-ranked results", done, len(chosen))
        rows = chosen[block]
        done += len(rows)
        both = _hits(task, rows, longest, neighbours)
        found.append(Reranked(*(_of_hits(h, relatives[rows], task.codes[rows]) for h in both)))
    progress("scoring re-ranked results", len(chosen), len(chosen))
    return _joined(found)


def _lay_out(
    queries: Array,
    labels: Array,
    gallery: Array | None,
    gallery_labels: Array | None,
    query_rows: Array | None,
) -> _Task:
    x = _unit(queries)
    if gallery is None or gallery_labels is None:
        codes = classes_of(labels, len(x))
        return _Task(x, codes, x, codes, torch.arange(len(x)))
    items = _unit(gallery)
    own, others = shared_classes(labels, len(x), gallery_labels, len(items))
    itself = torch.full((len(x),), -1) if query_rows is None else as_tensor(query_rows)
    return _Task(x, own, items, others, itself.long())


@torch.no_grad()
def _hits(task: _Task, rows: Tensor, longest: int, neighbours: int) -> tuple[Tensor, Tensor]:
    """Return which of the first `longest` results are relatives in both orders, (B, longest)."""
    q, codes, itself = task.x[rows], task.codes[rows, None], task.itself[rows]
    s = q @ task.items.T - TIE * (task.item_codes == codes)
    inside = (itself >= 0).nonzero()[:, 0]
    s[inside, itself[inside]] = -torch.inf
    best, order = s.topk(longest)
    order = order.masked_fill(best.isinf(), -1)
    hits = (task.item_codes[order.clamp_min(0)] == codes) & (order >= 0)
    if neighbours < 1:
        return hits, hits
    nearest, near = order[:, :SIZE], hits[:, :SIZE]
    around = vicinity_of(q, task.items[nearest.clamp_min(0)], nearest)
    places = reordered(around, neighbours, ties=TIE * near)
    # Those beyond the vicinity keep their places.
    return hits, torch.cat([near.gather(1, places), hits[:, SIZE:]], 1)


def _of_hits(hits: Tensor, relatives: Tensor, labels: Tensor) -> RerankedScores:
    """Return the scores of ordered hits (B, L)."""
    found, rank = hits.double(), torch.arange(1, hits.shape[1] + 1)
    at_k = torch.stack([found[:, :k].amax(1) for k in KS], 1)
    within = found * (rank <= relatives[:, None])
    average = (within.cumsum(1) / rank * within).sum(1) / relatives
    return RerankedScores(at_k, average, within.sum(1) / relatives, labels)


def of_folds(folds: Sequence[Reranked]) -> Reranked:
    """Return the queries of all folds, whose classes differ although they are numbered alike."""
    first, apart = 0, []
    for fold in folds:
        labels = fold.before.labels + first
        apart.append(Reranked(*(scores._replace(labels=labels) for scores in fold)))
        first = int(labels.max()) + 1
    return _joined(apart)


def _joined(parts: Sequence[Reranked]) -> Reranked:
    return Reranked(
        *(
            RerankedScores(*(torch.cat(column) for column in zip(*scores, strict=True)))
            for scores in zip(*parts, strict=True)
        )
    )


def _unit(vectors: Array) -> Tensor:
    return normalize(as_tensor(vectors).detach().float().cpu())


# The decision


@dataclass(frozen=True)
class Rerank:
    """What held-out classes gain by re-ranking; stored in model.json where search does it."""

    gain: list[float]
    """Mean change of MAP@R, and its 95% interval over classes."""

    def __post_init__(self) -> None:
        if len(self.gain) != 3:
            raise ValueError("has another gain than a mean and its interval")

    @property
    def on(self) -> bool:
        """Whether MAP@R gains by more than chance."""
        return self.gain[1] > 0

    def describe(self) -> str:
        """Return one line for the user."""
        change = f"MAP@R by {in_points(self.gain)}"
        if not self.on:
            return f"search ranks by distance alone: re-ranking would change {change}"
        return (
            f"search re-ranks the {SIZE} nearest but the first {STAY}, which on held-out training "
            f"classes changes {change}"
        )


def choose_reranking(
    embeddings: Sequence[Tensor], labels: Sequence[Tensor], *, progress: Progress = silent
) -> Rerank | None:
    """Try re-ranking on held-out classes, fold by fold; None where they are too few."""
    if not embeddings or not all(scorable(y) for y in labels):
        return None
    if min(len(torch.unique(y)) for y in labels) < ENOUGH_CLASSES:
        return None
    what, folds = "trying re-ranking on held-out classes", list[Reranked]()
    for x, y in zip(embeddings, labels, strict=True):
        progress(what, len(folds), len(embeddings))
        folds.append(reranked_scores(x, y, most=QUERIES_OF_FOLD))
    progress(what, len(folds), len(embeddings))
    return Rerank(of_folds(folds).gain())
