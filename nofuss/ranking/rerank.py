"""Re-ranking by the neighbourhood, its scores, and whether a run uses it.

Each item of a query's vicinity becomes the mean of itself and its nearest there, weighted by
cosine^power (database augmentation, Arandjelović & Zisserman 2012; α-query expansion, Radenović et
al. 2018), and so does the query; the order is that of the means. Everything is a function of
cosines, so that no vector is computed. Labels are not used: what lies together with what is near is
ranked higher.

A query is no item's neighbour: it is searched from outside. In scores, too, a query that is an item
of the gallery is left out before anything is averaged.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from nofuss.evaluate.intervals import Difference, class_intervals, paired_difference
from nofuss.evaluate.protocol import KS, QueryScores, scorable
from nofuss.evaluate.retrieval import classes_of, shared_classes
from nofuss.geometry import Array, as_tensor, normalize
from nofuss.progress import Progress, silent
from nofuss.ranking.neighbours import SIZE, Gallery, Vicinity, query_blocks

TIE = 1e-6
"""Cosines that differ by less are equal, and ties count as wrong."""
QUERIES_OF_FOLD = 400
"""Queries of a fold that candidates are compared on."""
ENOUGH_CLASSES = 4
"""Classes of each fold that it takes: among fewer, nearly all neighbours are relatives, which an
index of all classes does not have."""
MARGIN = 0.01
"""What Recall@1 may lose at most, with 95% confidence: the first result is the one that counts, and
a fold has fewer classes to be confused with than an index."""


class Weighting(NamedTuple):
    """How many neighbours are averaged, and the power of their cosine that weighs them."""

    neighbours: int
    power: float


CANDIDATES = tuple(
    Weighting(*pair) for pair in ((3, 3.0), (8, 3.0), (16, 3.0), (8, 2.0), (16, 2.0), (8, 1.0))
)
"""From little smoothing to much, which raises MAP@R but may lower Recall@1."""
CAREFUL = 3
"""The first of them, which weigh near items more."""


# The order


def fitting(weighting: Weighting | None, sizes: Array) -> Weighting | None:
    """Return the weighting with no more neighbours than a typical item has relatives.

    sizes: (C,) items of each class in the gallery. More neighbours would average what has nothing
    in common; with one item a class, ranking is by distance.
    """
    items = np.asarray(sizes)
    if weighting is None or not len(items):
        return weighting
    relatives = int(np.median(np.repeat(items, items))) - 1
    neighbours = min(weighting.neighbours, relatives)
    return weighting._replace(neighbours=neighbours) if neighbours > 0 else None


class _Neighbours(NamedTuple):
    place: Tensor  # in the vicinity
    weight: Tensor


@torch.no_grad()
def rerank(around: Vicinity, weighting: Weighting) -> Tensor:
    """Return the cosine of each item's mean with the query's, (Q, M); −inf where no item is."""
    return rerank_by_each(around, [weighting])[0]


@torch.no_grad()
def rerank_by_each(around: Vicinity, weightings: Sequence[Weighting]) -> list[Tensor]:
    """Return `rerank` of each weighting; neighbours are searched for once."""
    if not weightings:
        return []
    exists = around.exists
    most = min(max(weighting.neighbours for weighting in weightings), exists.shape[1])
    of_query = around.near.masked_fill(~exists, -torch.inf).topk(most)
    cosines = around.gram.masked_fill(~exists[:, None], -torch.inf)
    cosines.diagonal(dim1=1, dim2=2).fill_(-torch.inf)  # no item is its own neighbour
    of_items = cosines.topk(most)  # (Q, M, most)
    return [
        _cosines_of_means(around, _weighed(*of_query, weighting), _weighed(*of_items, weighting))
        for weighting in weightings
    ]


def _cosines_of_means(around: Vicinity, of_query: _Neighbours, of_items: _Neighbours) -> Tensor:
    near, gram, size = around.near, around.gram, around.near.shape[1]
    query_weights = torch.zeros_like(near).scatter_(1, *of_query)
    # Means are m = Σ w x, each item in its own with weight 1; their products follow from cosines.
    itself = torch.arange(size).expand(len(near), size)[..., None]
    place = torch.cat([itself, of_items.place], 2)
    weight = torch.cat([torch.ones_like(of_items.weight[..., :1]), of_items.weight], 2)
    with_query = near + (gram @ query_weights[..., None])[..., 0]  # x·(q + Σ w x)
    product = (weight * _pick(with_query, place)).sum(2)
    pairs = place[..., :, None] * size + place[..., None, :]  # (Q, M, k + 1, k + 1)
    among = _pick(gram.flatten(1), pairs)
    lengths = torch.einsum("qmab,qma,qmb->qm", among, weight, weight)
    scale = 1 + (query_weights * (near + with_query)).sum(1, keepdim=True)  # |q + Σ w x|²
    cosine = product / (lengths * scale).clamp_min(1e-12).sqrt()
    return cosine.masked_fill(~around.exists, -torch.inf)


def _weighed(cosines: Tensor, places: Tensor, weighting: Weighting) -> _Neighbours:
    """Return the first neighbours of a descending order; weight 0 where a cosine is negative."""
    k = weighting.neighbours
    return _Neighbours(places[..., :k], cosines[..., :k].clamp_min(0) ** weighting.power)


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


def reranked_scores(
    queries: Array,
    labels: Array,
    candidates: Sequence[Weighting | None],
    gallery: Array | None = None,
    gallery_labels: Array | None = None,
    query_rows: Array | None = None,
    *,
    most: int | None = None,
    progress: Progress = silent,
) -> list[RerankedScores]:
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
    found: list[list[RerankedScores]] = [[] for _ in candidates]
    done = 0
    for block in query_blocks(len(chosen), len(task.items), task.x.shape[1]):
        progress("scoring re-ranked results", done, len(chosen))
        rows = chosen[block]
        done += len(rows)
        for parts, hits in zip(found, _hits(task, among, rows, longest, candidates), strict=True):
            parts.append(_of_hits(hits, relatives[rows], task.codes[rows]))
    progress("scoring re-ranked results", len(chosen), len(chosen))
    return [_joined(parts) for parts in found]


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
    for weighting, scores in zip(weightings, rerank_by_each(around, weightings), strict=True):
        places = (scores - TIE * near).sort(dim=1, descending=True, stable=True).indices
        # Those beyond the vicinity keep their places.
        found[weighting] = torch.cat([near.gather(1, places), hits[:, SIZE:]], 1)
    return [found[candidate] for candidate in candidates]


def _of_hits(hits: Tensor, relatives: Tensor, labels: Tensor) -> RerankedScores:
    """Return the scores of ordered hits (B, L)."""
    found, rank = hits.double(), torch.arange(1, hits.shape[1] + 1)
    at_k = torch.stack([found[:, :k].amax(1) for k in KS], 1)
    within = found * (rank <= relatives[:, None])
    average = (within.cumsum(1) / rank * within).sum(1) / relatives
    return RerankedScores(at_k, average, within.sum(1) / relatives, labels)


def of_folds(folds: Sequence[RerankedScores]) -> RerankedScores:
    """Return the queries of all folds, whose classes differ although they are numbered alike."""
    first = 0
    apart = []
    for fold in folds:
        apart.append(fold._replace(labels=fold.labels + first))
        first += int(fold.labels.max()) + 1
    return _joined(apart)


def _joined(parts: Sequence[RerankedScores]) -> RerankedScores:
    return RerankedScores(*(torch.cat(column) for column in zip(*parts, strict=True)))


def rerank_folds(
    embeddings: Sequence[Tensor],
    labels: Sequence[Tensor],
    weightings: Sequence[Weighting],
) -> dict[str, Any]:
    """Return `summary` of folds, each re-ranked by a weighting of its own."""
    each = zip(embeddings, labels, weightings, strict=True)
    found = [reranked_scores(x, y, (None, weighting)) for x, y, weighting in each]
    plain, after = (of_folds(column) for column in zip(*found, strict=True))
    return summary(after, plain)


def summary(after: RerankedScores, before: RerankedScores) -> dict[str, Any]:
    """Return the scores of re-ranking for scores.json, with its gain over the plain order."""
    results = {f"recall@{k}": after.hits[:, i] for i, k in enumerate(KS)}
    results |= {"map@r": after.map_at_r, "r_precision": after.r_precision}
    ends = class_intervals(results, after.labels)
    content: dict[str, Any] = {name: float(values.mean()) for name, values in results.items()}
    content |= {f"{name}_interval": list(interval) for name, interval in ends.items()}
    gains = _gains(after.scores, before.scores)
    return content | {"gain": {name: list(gain) for name, gain in gains.items()}}


def _gains(after: QueryScores, before: QueryScores) -> dict[str, Difference]:
    return {
        "recall@1": paired_difference(after.recall, before.recall, after.labels),
        "map@r": paired_difference(after.map_at_r, before.map_at_r, after.labels),
    }


def _unit(vectors: Array) -> Tensor:
    return normalize(as_tensor(vectors).detach().float().cpu())


# The decision


@dataclass(frozen=True)
class Rerank:
    """What folds of training classes say of re-ranking; stored in choice.json and model.json."""

    neighbours: int
    power: float
    on: bool
    """Whether it gains by more than chance."""
    scores: dict[str, list[float]]
    """Recall@1 and MAP@R, "without" and "with", each fold by the candidate of the others."""
    gains: dict[str, list[float]]
    """Their mean differences with 95% intervals over classes."""
    of_others: list[list[float]] = field(default_factory=list)
    """For each fold, neighbours and power of the candidate that the others prefer."""

    @property
    def weighting(self) -> Weighting | None:
        """Return the weighting to search with; None if re-ranking is off."""
        return Weighting(self.neighbours, self.power) if self.on else None

    @property
    def by_fold(self) -> list[Weighting] | None:
        """Return what to score each fold with, chosen on the others; None if it is off."""
        return [Weighting(int(k), power) for k, power in self.of_others] if self.on else None

    def describe(self) -> str:
        """Return one line for the user."""
        recall, average = (_points(self.gains[name]) for name in ("recall@1", "map@r"))
        change = f"Recall@1 by {recall}, MAP@R by {average}"
        if not self.on:
            return f"search ranks by distance alone: re-ranking would change {change}"
        return (
            f"search re-ranks the {SIZE} nearest by up to {self.neighbours} neighbours each, which "
            f"on held-out training classes changes {change}"
        )

    def as_dict(self) -> dict[str, Any]:
        """Return a dict for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, stored: Any) -> Self:
        """Read what `as_dict` gave; KeyError, TypeError or ValueError for anything else."""
        made = cls(**stored)
        valid = {
            "neighbours": type(made.neighbours) is int and 1 <= made.neighbours <= SIZE,
            "power": type(made.power) in (int, float) and 0 <= made.power <= 100,
            "on": type(made.on) is bool,
            "scores": _is_table(made.scores, ("without", "with"), 2),
            "gains": _is_table(made.gains, ("recall@1", "map@r"), 3),
            "of_others": _are_weightings(made.of_others),
        }
        if wrong := [name for name, is_valid in valid.items() if not is_valid]:
            raise ValueError(f"rerank has an invalid {', '.join(wrong)}")
        return made


def _points(gain: Sequence[float]) -> str:
    mean, low, high = (100 * value for value in gain)
    return f"{mean:+.2f} points (95%: {low:+.2f} to {high:+.2f})"


def _are_weightings(pairs: Any) -> bool:
    return isinstance(pairs, list) and all(
        isinstance(pair, list)
        and len(pair) == 2
        and all(type(value) in (int, float) for value in pair)
        and 1 <= pair[0] <= SIZE
        and 0 <= pair[1] <= 100
        for pair in pairs
    )


def _is_table(table: Any, names: Sequence[str], width: int) -> bool:
    return (
        isinstance(table, Mapping)
        and list(table) == list(names)
        and all(isinstance(row, list) and len(row) == width for row in table.values())
        and all(type(v) in (int, float) and abs(v) <= 1 for row in table.values() for v in row)
    )


def choose_reranking(
    embeddings: Sequence[Tensor],
    labels: Sequence[Tensor],
    *,
    progress: Progress = silent,
) -> Rerank | None:
    """Decide on held-out classes of folds; None where they are too few.

    Each fold is scored with the candidate that the *other* folds prefer, so that choosing among
    candidates is not mistaken for a gain. One fold is halved by class.
    """
    if len(embeddings) == 1:
        embeddings, labels = _halved(embeddings[0], labels[0])
    if len(embeddings) < 2 or not all(scorable(y) for y in labels):
        return None
    if min(len(torch.unique(y)) for y in labels) < ENOUGH_CLASSES:
        return None
    what, folds = "trying re-ranking on folds of the classes", list[list[RerankedScores]]()
    for x, y in zip(embeddings, labels, strict=True):
        progress(what, len(folds), 1 + len(embeddings))
        folds.append(reranked_scores(x, y, (None, *CANDIDATES), most=QUERIES_OF_FOLD))
    progress(what, len(embeddings), 1 + len(embeddings))
    found = _decide(folds)
    if not found.on:  # the careful candidates alone
        found = _decide([fold[: 1 + CAREFUL] for fold in folds])
    progress(what, 1 + len(embeddings), 1 + len(embeddings))
    return found


def _decide(folds: Sequence[Sequence[RerankedScores]]) -> Rerank:
    """Return the verdict of folds on candidates; the first of their scores are without."""
    best = [_best([*folds[:k], *folds[k + 1 :]]) for k in range(len(folds))]
    after = of_folds([fold[1 + i] for fold, i in zip(folds, best, strict=True)]).scores
    before = of_folds([fold[0] for fold in folds]).scores
    gains = _gains(after, before)
    objective = paired_difference(after.objective, before.objective, after.labels)
    return Rerank(
        *CANDIDATES[_best(folds)],
        on=objective.low > 0 and gains["recall@1"].low >= -MARGIN,
        scores={
            name: [float(of.recall.mean()), float(of.map_at_r.mean())]
            for name, of in (("without", before), ("with", after))
        },
        gains={name: list(gain) for name, gain in gains.items()},
        of_others=[list(CANDIDATES[i]) for i in best],
    )


def _halved(x: Tensor, y: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    sides = [torch.isin(y, classes) for classes in torch.unique(y).chunk(2)]
    return [x[side] for side in sides], [y[side] for side in sides]


def _best(folds: Sequence[Sequence[RerankedScores]]) -> int:
    """Return the candidate with the highest objective among those that don't lose Recall@1.

    With half of the margin, since the choice must hold on other classes. The first, which changes
    least, if none is safe.
    """
    before, *after = (of_folds(column).scores for column in zip(*folds, strict=True))
    losses = [paired_difference(of.recall, before.recall, of.labels).low for of in after]
    safe = [i for i, low in enumerate(losses) if low >= -MARGIN / 2]
    return max(safe, key=lambda i: float(after[i].objective.mean()), default=0)
