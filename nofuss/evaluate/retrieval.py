"""A retrieval task laid out for counting: both sides sorted by class, similarity as one product.

What is counted is exact. Points are the vectors on the unit sphere, or as given; their squared
distances in float64, as a sum of squared differences, decide. But a product in float32 is many
times faster and decides nearly all pairs: `left @ right.T` is the cosine, or −|x − y|²/2 around the
mean where the points lie so close together that their cosines would hardly differ. `band` says
between which similarities its rounding leaves a pair undecided; only the distances of such pairs
are computed in float64 (`pairs`). Sorting by class puts every positive pair near the diagonal.

Ties count as wrong in all scores: an item of another class at the distance of a positive ranks
before it. Duplicates across classes are thus misses, a network that maps everything to one point
scores nothing, and neither the order of the items nor the size of the blocks changes that. Equal is
what differs by no more than the rounding of float64 (`reach`).
"""

import math
from collections.abc import Callable
from typing import NamedTuple, TypedDict

import numpy as np
import torch
from torch import Tensor

from nofuss.distributed.threads import blocks
from nofuss.geometry import Array, as_tensor

CONE = 0.7  # unit vectors with a longer mean than this are compared by −d²/2 around it
FARTHEST = -4.0  # below the similarity of any pair that is not hidden
PAIRS = 2**20  # numbers of pairs of vectors that are held in float64 at once
SINGLE, DOUBLE = torch.finfo(torch.float32), torch.finfo(torch.float64)


# Input, checked


def vectors_of(embeddings: Array, *, name: str = "embeddings") -> Tensor:
    """Return the embeddings as a detached (N, D) matrix, float32 unless they are float64."""
    x = as_tensor(embeddings).detach()
    if x.ndim != 2:
        raise ValueError(f"{name} have shape {tuple(x.shape)}; expected (N, D), one row an item")
    if x.numel() == 0:
        raise ValueError(f"{name} have shape {tuple(x.shape)}; there is nothing to score")
    if x.is_complex():
        raise ValueError(f"{name} are complex; expected real numbers")
    if x.dtype != torch.float64:
        x = x.float()
    if not torch.isfinite(x).all():
        bad = int((~torch.isfinite(x).all(1)).sum())
        raise ValueError(f"{bad} of {len(x)} {name} hold NaN or infinity; score finite vectors")
    return x.contiguous()


def lengths_of(x: Tensor) -> Tensor:
    """Return |x| of each row in float64, (N,); a float32 square can't overflow or vanish there."""
    norm: Tensor = torch.linalg.vector_norm(x, dim=1, dtype=torch.float64)
    if not norm.isfinite().all():
        raise ValueError("embeddings have lengths beyond float64; rescale them")
    return norm


def directions(x: Tensor) -> Tensor:
    """Return x / |x| of each row in the precision of x, whatever its size; zero stays zero."""
    norm = lengths_of(x)
    return torch.div(x, torch.where(norm > 0, norm, 1.0)[:, None], out=torch.empty_like(x))


def classes_of(labels: Array, items: int) -> Tensor:
    """Return class numbers 0 … C − 1 (N,), in the order of the sorted labels (numbers or names)."""
    return _numbered(_column(labels, items, "labels"))


def shared_classes(
    labels: Array, items: int, gallery_labels: Array, gallery_items: int
) -> tuple[Tensor, Tensor]:
    """Return class numbers of queries and gallery, numbered together."""
    query = _column(labels, items, "labels")
    gallery = _column(gallery_labels, gallery_items, "gallery_labels")
    if {query.dtype.kind, gallery.dtype.kind} == {"i", "u"}:  # numpy would round them to floats
        query, gallery = query.astype(object), gallery.astype(object)
    numbers = _numbered(np.concatenate([query, gallery]))
    return numbers[:items], numbers[items:]


def _column(labels: Array, items: int, name: str) -> np.ndarray:
    column = labels.detach().cpu().numpy() if isinstance(labels, Tensor) else np.asarray(labels)
    if column.ndim != 1 or len(column) != items:
        raise ValueError(f"{name} have shape {column.shape}; expected ({items},), one an embedding")
    if column.dtype.kind == "f" and not np.isfinite(column).all():
        raise ValueError(f"{name} hold NaN or infinity; give every item a class")
    return column


def _numbered(column: np.ndarray) -> Tensor:
    return torch.from_numpy(np.unique(column, return_inverse=True)[1].astype(np.int64))


# The task


class Options(TypedDict, total=False):
    """What all retrieval scores take besides embeddings and labels."""

    gallery: Array | None
    """Vectors (M, D) to search in; the embeddings themselves if not given."""
    gallery_labels: Array | None
    query_rows: Array | None
    """The row of each query in the gallery (−1: not in it), left out of its own search."""
    normalize: bool
    """Distances on the unit sphere, the default, or between the vectors as given."""


class Side(NamedTuple):
    """Queries or gallery: the vectors as given, sorted by class, and what to divide them by."""

    vectors: Tensor
    scale: Tensor  # (N, 1) float64

    def points(self, rows: slice | Tensor) -> Tensor:
        """Return some points in float64: on the unit sphere, or as given."""
        return self.vectors[rows].double() / self.scale[rows]


class Retrieval(NamedTuple):
    """Queries and gallery, sorted by class; `left @ right.T` is the similarity of all pairs."""

    queries: Side
    gallery: Side
    left: Tensor  # (N, …) queries
    right: Tensor  # (M, …) gallery
    classes: Tensor  # (N,) of the queries, ascending, as floats
    gallery_classes: Tensor  # (M,), ascending
    order: Tensor  # (N,) the place of each query in the caller's order
    itself: Tensor  # (N,) the place of each query in the gallery, −1 where it is not in it
    positives: Tensor  # (N,) items of the query's class in the gallery, itself left out
    lengths: Tensor | None  # (N,) |left|, the scale of its rounding; None for the cosine
    unit: float  # the distance that is 1 in `left` and `right`
    normalize: bool
    symmetric: bool  # the queries are the gallery

    def reach(self, squared: Tensor) -> Tensor:
        """Return the largest squared distances that count as equal to these, within rounding."""
        roundings = self.queries.vectors.shape[1] * DOUBLE.eps
        shift = roundings + 16 * DOUBLE.eps if self.normalize else 0.0  # of a point on the sphere
        return (squared.sqrt() + shift).square() * (1 + roundings)

    def band(self, squared: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        """Return low, high: below low a pair is farther than `squared`, from high up it is not.

        For squared distances (b, …) of the queries in `rows`. A dot product of n terms in float32
        is off by less than n roundings of |x|·|y|, and for all but one in 10¹³ by less than 8·√n.
        """
        dim = self.queries.vectors.shape[1]
        roundings = (min(dim, 8 * math.sqrt(dim)) + 8) * SINGLE.eps / 2
        if self.lengths is None:
            similarity = 1 - squared / 2
            width = torch.full_like(squared, roundings)
        else:
            length = self.lengths[rows].view(-1, *[1] * (squared.ndim - 1))
            # Items at distance d from x are at most |x| + d long.
            reach = 2 * length + squared.sqrt() / self.unit
            similarity = squared / (-2 * self.unit**2)
            width = roundings * reach.square() / 2 + dim * SINGLE.tiny
        return (similarity - width).float(), (similarity + width).float()

    def distance(self, similarity: Tensor) -> Tensor:
        """Return the squared distance of a similarity, up to the rounding of float32."""
        whole = 1.0 if self.lengths is None else 0.0
        return (whole - similarity.double()).clamp_min_(0) * 2 * self.unit**2

    def pairs(self, i: Tensor, j: Tensor) -> Tensor:
        """Return squared distances in float64 of queries i to items j of the gallery, (P,)."""
        squared = i.new_empty(len(i), dtype=torch.float64)
        for at in blocks(0, len(i), max(1, PAIRS // self.queries.vectors.shape[1])):
            difference = self.queries.points(i[at]).sub_(self.gallery.points(j[at]))
            squared[at] = difference.square_().sum(1)
        return squared

    def strip(self, rows: slice) -> "Retrieval":
        """Return the task of some queries, which search the whole gallery."""
        return self._replace(
            queries=Side(self.queries.vectors[rows], self.queries.scale[rows]),
            left=self.left[rows],
            classes=self.classes[rows],
            order=self.order[rows],
            itself=self.itself[rows],
            positives=self.positives[rows],
            lengths=None if self.lengths is None else self.lengths[rows],
            symmetric=False,
        )

    def gallery_span(self, rows: slice) -> slice:
        """Return where the gallery holds the classes of some queries."""
        ends = self.classes[[rows.start, rows.stop - 1]]
        first = torch.searchsorted(self.gallery_classes, ends[0])
        stop = torch.searchsorted(self.gallery_classes, ends[1], right=True)
        return slice(int(first), int(stop))

    def hide_positives(self, similarity: Tensor, rows: slice, cols: slice) -> None:
        """Lower a block's similarities within a class below any threshold."""
        self._hide(similarity, torch.eq, rows, cols)

    def hide_others(self, similarity: Tensor, rows: slice, cols: slice) -> None:
        """Lower a block's similarities between classes, and of each item with itself."""
        self._hide(similarity, torch.ne, rows, cols)
        place = self.itself[rows]
        i = ((place >= cols.start) & (place < cols.stop)).nonzero()[:, 0]
        similarity[i, place[i] - cols.start] = -torch.inf

    def _hide(
        self, similarity: Tensor, which: Callable[..., Tensor], rows: slice, cols: slice
    ) -> None:
        # Comparing floats into floats takes a sixth of the time of a boolean mask.
        hidden = torch.empty_like(similarity)
        which(self.classes[rows, None], self.gallery_classes[cols], out=hidden)
        similarity.sub_(hidden, alpha=SINGLE.max / 2)

    def back(self, values: Tensor) -> Tensor:
        """Return values of the queries in the caller's order."""
        return torch.empty_like(values).index_copy_(0, self.order, values)


def retrieval(
    embeddings: Array,
    labels: Array,
    *,
    gallery: Array | None = None,
    gallery_labels: Array | None = None,
    query_rows: Array | None = None,
    normalize: bool = True,
) -> Retrieval:
    """Check the input and lay it out; queries without a positive stay, with `positives` 0."""
    if (gallery is None) != (gallery_labels is None):
        raise ValueError("gallery and gallery_labels belong together; give both or neither")
    if gallery is None and query_rows is not None:
        raise ValueError("query_rows are rows of a gallery; give gallery and gallery_labels too")
    x = vectors_of(embeddings)
    if gallery is None or gallery_labels is None:
        y, classes = x, classes_of(labels, len(x))
        gallery_classes, itself = classes, torch.arange(len(x))
    else:
        y = vectors_of(gallery, name="gallery").to(x.device)
        if x.shape[1] != y.shape[1]:
            raise ValueError(f"gallery has {y.shape[1]} dimensions, the embeddings {x.shape[1]}")
        classes, gallery_classes = shared_classes(labels, len(x), gallery_labels, len(y))
        itself = _rows_of_queries(query_rows, classes, gallery_classes)
    symmetric = gallery is None
    sizes = torch.bincount(gallery_classes, minlength=int(classes.max()) + 1)
    positives = sizes[classes] - (itself >= 0).long()
    if not positives.any():
        reason = "no class has two items" if symmetric else "gallery and queries share no class"
        raise ValueError(f"there is nothing to retrieve: {reason}")
    classes, order = classes.sort(stable=True)
    gallery_classes, gallery_order = gallery_classes.sort(stable=True)
    place = torch.empty_like(gallery_order)
    place[gallery_order] = torch.arange(len(place))
    itself = torch.where(itself[order] >= 0, place[itself[order]], -1)
    queries = _side(x, order, normalize=normalize)
    items = queries if symmetric else _side(y, gallery_order, normalize=normalize)
    left, right, lengths, unit = _factors(queries, items, normalize=normalize)
    return Retrieval(
        queries,
        items,
        left,
        right,
        classes.to(left),
        gallery_classes.to(left),
        order.to(x.device),
        itself.to(x.device),
        positives[order].to(x.device),
        lengths,
        unit,
        normalize,
        symmetric,
    )


def _rows_of_queries(rows: Array | None, classes: Tensor, gallery_classes: Tensor) -> Tensor:
    """Check and return `query_rows`; all −1 if not given."""
    if rows is None:
        return torch.full_like(classes, -1)
    itself = as_tensor(rows).cpu()
    if itself.shape != classes.shape or itself.is_floating_point():
        shape = tuple(itself.shape)
        raise ValueError(f"query_rows have shape {shape}; expected whole numbers, one a query")
    itself, last = itself.long(), len(gallery_classes) - 1
    if itself.min() < -1 or itself.max() > last:
        ends = f"{int(itself.min())} to {int(itself.max())}"
        raise ValueError(f"query_rows are {ends}; expected rows of the gallery 0 to {last}, or -1")
    differs = (itself >= 0) & (gallery_classes[itself] != classes)
    if differs.any():
        i = int(differs.nonzero()[0, 0])
        raise ValueError(
            f"query_rows say that query {i} is row {int(itself[i])} of the gallery, but their "
            "labels differ; correct the labels or the rows"
        )
    return itself


def _side(x: Tensor, order: Tensor, *, normalize: bool) -> Side:
    x = x[order.to(x.device)]
    if normalize:
        length = lengths_of(x)
        return Side(x, torch.where(length > 0, length, 1.0)[:, None])
    lengths_of(x.view(1, -1))  # if the sum of all squares is within float64, so is any distance
    return Side(x, torch.ones(len(x), 1, dtype=torch.float64, device=x.device))


def _factors(
    queries: Side, gallery: Side, *, normalize: bool
) -> tuple[Tensor, Tensor, Tensor | None, float]:
    """Return left, right, the lengths of left and the distance that is 1 in them."""
    n, m, rows = len(queries.vectors), len(gallery.vectors), 4096
    total = sum(gallery.points(j).sum(0) for j in blocks(0, m, rows))
    assert isinstance(total, Tensor)
    center = total / m
    some_zero = not (queries.vectors.any(1).all() and gallery.vectors.any(1).all())
    if normalize and center.norm() < CONE and not some_zero:
        left = torch.cat([queries.points(i).float() for i in blocks(0, n, rows)])
        if gallery is queries:
            return left, left, None, 1.0
        right = torch.cat([gallery.points(j).float() for j in blocks(0, m, rows)])
        return left, right, None, 1.0
    # Points relative to their mean, in units of the farthest: squares then can't overflow, and are
    # not large beside the differences, which would lose the digits that matter.
    sides = [queries] if gallery is queries else [queries, gallery]
    far = max(
        float((s.points(i) - center).norm(dim=1).max())
        for s in sides
        for i in blocks(0, len(s.vectors), rows)
    )
    unit = far or 1.0
    parts = [_distance_factors((queries.points(i) - center) / unit) for i in blocks(0, n, rows)]
    left = torch.cat([part[0] for part in parts])
    right = torch.cat([part[1] for part in parts])
    lengths = torch.cat([part[2] for part in parts])
    if gallery is not queries:
        right = torch.cat(
            [_distance_factors((gallery.points(j) - center) / unit)[1] for j in blocks(0, m, rows)]
        )
    return left, right, lengths, unit


def _distance_factors(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return a, b in float32 with aᵢ·bⱼ = −|xᵢ − xⱼ|²/2, and |x|."""
    half = x.square().sum(1, keepdim=True) / -2
    one = torch.ones_like(half)
    left, right = torch.cat([x, half, one], 1), torch.cat([x, one, half], 1)
    return left.float(), right.float(), x.norm(dim=1)
