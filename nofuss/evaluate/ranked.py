"""Retrieval scores of re-ranked searches, beside those of the order by distance.

The query is never in the gallery, also where it is one of its items: it is left out before anything
is averaged.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nofuss.evaluate.checked import classes_of, shared_classes
from nofuss.evaluate.intervals import Difference, class_intervals, paired_difference
from nofuss.evaluate.queries import QueryScores
from nofuss.evaluate.smoothing import Weighting, fitting, reranked_by
from nofuss.evaluate.vicinity import SIZE, Gallery, query_blocks
from nofuss.geometry import Array, as_tensor, normalize
from nofuss.progress import Progress, silent

KS = (1, 2, 4, 8)
TIE = 1e-6
"""Cosines that differ by less are equal, and ties count as wrong."""


class RankedScores(NamedTuple):
    """Scores of single queries: hits at each of KS, MAP@R, R-precision, and their classes."""

    hits: Tensor  # (Q, len(KS))
    map_at_r: Tensor
    r_precision: Tensor
    labels: Tensor

    @property
    def scores(self) -> QueryScores:
        """Return what models are chosen by."""
        return QueryScores(self.hits[:, 0], self.map_at_r, self.labels)


class _Task(NamedTuple):
    """Queries and gallery with their classes, and the row of each query in the gallery, or −1."""

    x: Tensor
    codes: Tensor
    items: Tensor
    item_codes: Tensor
    itself: Tensor


def ranked_scores(
    queries: Array,
    labels: Array,
    candidates: Sequence[Weighting | None],
    gallery: Array | None = None,
    gallery_labels: Array | None = None,
    query_rows: Array | None = None,
    *,
    most: int | None = None,
    progress: Progress = silent,
) -> list[RankedScores]:
    """Score each candidate; None is the order by distance. In single precision, ties as wrong.

    The gallery is as in `recall_at_k`; queries without a relative in it are left out, and more
    than `most` are thinned out evenly. Candidates are fitted to the gallery, as search does.
    """
    task = _lay_out(queries, labels, gallery, gallery_labels, query_rows)
    sizes = torch.bincount(task.item_codes, minlength=int(task.codes.max()) + 1)
    candidates = [fitting(candidate, sizes) for candidate in candidates]
    relatives = sizes[task.codes] - (task.itself >= 0).long()
    chosen = (relatives > 0).nonzero()[:, 0]
    if most is not None and len(chosen) > most:
        chosen = chosen[torch.linspace(0, len(chosen) - 1, most).round().long()]
    longest = min(len(task.items), max(SIZE, *KS, int(relatives.max())))
    among = Gallery(task.items, len(chosen))
    found: list[list[RankedScores]] = [[] for _ in candidates]
    done = 0
    for block in query_blocks(len(chosen), len(task.items), task.x.shape[1]):
        progress("scoring re-ranked results", done, len(chosen))
        rows = chosen[block]
        done += len(rows)
        for parts, hits in zip(found, _hits(task, among, rows, longest, candidates), strict=True):
            parts.append(_of_hits(hits, relatives[rows], task.codes[rows]))
    progress("scoring re-ranked results", len(chosen), len(chosen))
    return [joined_queries(parts) for parts in found]


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
def _hits(
    task: _Task,
    among: Gallery,
    rows: Tensor,
    longest: int,
    candidates: Sequence[Weighting | None],
) -> list[Tensor]:
    """Return by candidate which of the first `longest` results are relatives, (B, longest)."""
    q, codes, itself = task.x[rows], task.codes[rows, None], task.itself[rows]
    cosines = q @ task.items.T
    s = cosines - TIE * (task.item_codes == codes)
    inside = (itself >= 0).nonzero()[:, 0]
    s[inside, itself[inside]] = -torch.inf
    best, order = s.topk(longest)
    order = order.masked_fill(best.isinf(), -1)
    hits = (task.item_codes[order.clamp_min(0)] == codes) & (order >= 0)
    nearest, near = order[:, :SIZE], hits[:, :SIZE]
    around = among.vicinity(cosines.gather(1, nearest.clamp_min(0)), nearest)
    weightings = [weighting for weighting in candidates if weighting is not None]
    found: dict[Weighting | None, Tensor] = {None: hits}
    for weighting, scores in zip(weightings, reranked_by(around, weightings), strict=True):
        places = (scores - TIE * near).sort(dim=1, descending=True, stable=True).indices
        # Those beyond the vicinity keep their places.
        found[weighting] = torch.cat([near.gather(1, places), hits[:, SIZE:]], 1)
    return [found[candidate] for candidate in candidates]


def _of_hits(hits: Tensor, relatives: Tensor, labels: Tensor) -> RankedScores:
    """Return the scores of ordered hits (B, L)."""
    found, rank = hits.double(), torch.arange(1, hits.shape[1] + 1)
    at_k = torch.stack([found[:, :k].amax(1) for k in KS], 1)
    within = found * (rank <= relatives[:, None])
    average = (within.cumsum(1) / rank * within).sum(1) / relatives
    return RankedScores(at_k, average, within.sum(1) / relatives, labels)


def joined_queries(parts: Sequence[RankedScores]) -> RankedScores:
    """Return the queries of all parts together."""
    return RankedScores(*(torch.cat(column) for column in zip(*parts, strict=True)))


def of_folds(folds: Sequence[RankedScores]) -> RankedScores:
    """Return the queries of all folds, whose classes differ although they are numbered alike."""
    first = 0
    apart = []
    for fold in folds:
        apart.append(fold._replace(labels=fold.labels + first))
        first += int(fold.labels.max()) + 1
    return joined_queries(apart)


def gains_of(after: QueryScores, before: QueryScores, *, seed: int) -> dict[str, Difference]:
    """Return the paired differences of Recall@1 and MAP@R."""
    return {
        "recall@1": paired_difference(after.recall, before.recall, after.labels, seed),
        "map@r": paired_difference(after.map_at_r, before.map_at_r, after.labels, seed),
    }


def reranking_summary(after: RankedScores, before: RankedScores, *, seed: int) -> dict[str, Any]:
    """Return the scores of re-ranking for scores.json, with its gain over the plain order."""
    results = {f"recall@{k}": after.hits[:, i] for i, k in enumerate(KS)}
    results |= {"map@r": after.map_at_r, "r_precision": after.r_precision}
    ends = class_intervals(results, after.labels, seed=seed, resamples=1000)
    content: dict[str, Any] = {name: float(values.mean()) for name, values in results.items()}
    content |= {f"{name}_interval": list(interval) for name, interval in ends.items()}
    gains = gains_of(after.scores, before.scores, seed=seed)
    return content | {"gain": {name: list(gain) for name, gain in gains.items()}}


def _unit(vectors: Array) -> Tensor:
    return normalize(as_tensor(vectors).detach().float().cpu())
