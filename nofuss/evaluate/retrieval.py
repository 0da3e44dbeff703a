"""A retrieval task laid out for counting: both sides sorted by class, similarity as one product.

Similarity is the cosine on the unit sphere, or −|x − y|²/2 where vectors are taken as given or lie
so close together that their cosines would lose the digits that tell them apart. Either way it is
`left @ right.T`, ranks like the Euclidean distance, and is symmetric when the queries are their own
gallery. Sorting by class puts every positive pair near the diagonal.

Ties count as wrong in all scores: an item of another class at the distance of a positive, or
further by no more than rounding (`TIE`), ranks before it. Duplicates across classes are thus
misses, a network that maps everything to one point scores nothing, and neither the order of the
items nor the size of the blocks changes that.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from nofuss.evaluate.inputs import classes_of, shared_classes, vectors_of
from nofuss.geometry import Array
from nofuss.geometry import normalize as to_unit_sphere

BLOCK = 384  # a product and its comparison, 1.2 MB together, stay in a core's cache
TIE = 8  # similarities within this many roundings of each other are equal
CONE = 0.7  # unit vectors with a longer mean than this are compared by −d²/2 around it


class Retrieval(NamedTuple):
    """Queries and gallery, sorted by class; `left @ right.T` is the similarity of all pairs."""

    left: Tensor  # (N, D) queries
    right: Tensor  # (M, D) gallery
    classes: Tensor  # (N,) of the queries, ascending, as floats
    gallery_classes: Tensor  # (M,), ascending
    order: Tensor  # (N,) the place of each query in the caller's order
    positives: Tensor  # (N,) items of the query's class in the gallery, itself left out
    lengths: Tensor  # (N,) |x| of the queries: the scale of their rounding errors
    symmetric: bool  # the queries are the gallery

    def tie_width(self, similarity: Tensor, rows: slice) -> Tensor:
        """How far rounding can move similarities of the queries in `rows`, (b, …) → (b, …)."""
        length = self.lengths[rows].view(-1, *[1] * (similarity.ndim - 1))
        # Items at distance d from x are at most |x| + d long.
        reach = length + (-2 * similarity).clamp_min(0).sqrt()
        width = TIE * torch.finfo(similarity.dtype).eps * (length.square() + reach.square()) / 2
        return width.nan_to_num_(posinf=0.0)  # nothing is near −inf

    def gallery_span(self, rows: slice) -> slice:
        """Where the gallery holds the classes of some queries."""
        ends = self.classes[[rows.start, rows.stop - 1]]
        first = torch.searchsorted(self.gallery_classes, ends[0])
        stop = torch.searchsorted(self.gallery_classes, ends[1], right=True)
        return slice(int(first), int(stop))

    def hide_positives(self, similarity: Tensor, rows: slice, cols: slice) -> None:
        """Lower a block's pairs of one class below any threshold."""
        self._hide(similarity, torch.eq, rows, cols)

    def hide_others(self, similarity: Tensor, rows: slice, cols: slice) -> None:
        """Lower a block's pairs of different classes, and each item beside itself."""
        self._hide(similarity, torch.ne, rows, cols)
        if self.symmetric:
            similarity.diagonal(rows.start - cols.start).fill_(-torch.inf)

    def _hide(
        self, similarity: Tensor, which: Callable[..., Tensor], rows: slice, cols: slice
    ) -> None:
        # Comparing floats into floats takes a sixth of the time of a boolean mask.
        hidden = torch.empty_like(similarity)
        which(self.classes[rows, None], self.gallery_classes[cols], out=hidden)
        similarity.sub_(hidden, alpha=torch.finfo(similarity.dtype).max / 2)

    def back(self, values: Tensor) -> Tensor:
        """Values of the queries in the caller's order."""
        return torch.empty_like(values).index_copy_(0, self.order, values)


def retrieval(
    embeddings: Array,
    labels: Array,
    *,
    gallery: Array | None = None,
    gallery_labels: Array | None = None,
    normalize: bool = True,
) -> Retrieval:
    """Check the input and lay it out; queries without a positive stay in, with `positives` 0."""
    if (gallery is None) != (gallery_labels is None):
        raise ValueError("gallery and gallery_labels belong together; give both or neither")
    x = vectors_of(embeddings)
    if gallery is None or gallery_labels is None:
        y, classes = x, classes_of(labels, len(x))
        gallery_classes = classes
    else:
        y = vectors_of(gallery, name="gallery").to(x)
        if x.shape[1] != y.shape[1]:
            raise ValueError(f"gallery has {y.shape[1]} dimensions, the embeddings {x.shape[1]}")
        classes, gallery_classes = shared_classes(labels, len(x), gallery_labels, len(y))
    classes, order = classes.to(x.device).sort(stable=True)
    gallery_classes, gallery_order = gallery_classes.to(x.device).sort(stable=True)
    symmetric = gallery is None
    sizes = torch.bincount(gallery_classes, minlength=int(classes[-1]) + 1)
    positives = sizes[classes] - int(symmetric)
    if not positives.any():
        cure = "no class has two items" if symmetric else "gallery and queries share no class"
        raise ValueError(f"there is nothing to retrieve: {cure}")
    x = x[order]
    y = x if symmetric else y[gallery_order]
    if normalize:
        x = to_unit_sphere(x)
        y = x if symmetric else to_unit_sphere(y)
    center = y.mean(0)
    if normalize and center.norm() < CONE and x.any(1).all() and y.any(1).all():
        left, right, lengths = x, y, x.new_ones(len(x))
    else:
        x, y = x - center, y - center  # leaves distances alone and makes the squares small
        left, right, lengths = _distance_factors(x)[0], _distance_factors(y)[1], x.norm(dim=1)
    classes, gallery_classes = classes.to(left), gallery_classes.to(left)
    return Retrieval(left, right, classes, gallery_classes, order, positives, lengths, symmetric)


def blocks(start: int, stop: int, size: int) -> Iterator[slice]:
    """Slices of at most `size` from start to stop."""
    return (slice(i, min(i + size, stop)) for i in range(start, stop, size))


def _distance_factors(x: Tensor) -> tuple[Tensor, Tensor]:
    """a, b with aᵢ·bⱼ = −|xᵢ − xⱼ|²/2."""
    half = -x.square().sum(1, keepdim=True) / 2
    if not half.isfinite().all():
        raise ValueError("embeddings are too long for their squares; rescale them")
    one = torch.ones_like(half)
    return torch.cat([x, half, one], 1), torch.cat([x, one, half], 1)
