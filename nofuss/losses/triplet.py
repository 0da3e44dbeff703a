"""The margin triplet loss, Eq. 3, over all triplets of the batch."""

from typing import ClassVar

from torch import Tensor

from nofuss.geometry import squared_distances, unit_squared_distances
from nofuss.losses.checks import check_number, zero_with_graph
from nofuss.losses.instance_loss import InstanceLoss, Pairs, mined_pairs, pair_masks


def triplet(
    embeddings: Tensor, labels: Tensor, *, margin: float = 0.1, unit_norm: bool = True
) -> Tensor:
    """Eq. 3, mean of [d(x,y) + M − d(x,z)]₊ over all triplets of the batch."""
    pairs = pair_masks(labels)
    return triplet_of_pairs(embeddings, embeddings, pairs, margin=margin, unit_norm=unit_norm)


def triplet_of_pairs(
    embeddings: Tensor, references: Tensor, pairs: Pairs, *, margin: float, unit_norm: bool
) -> Tensor:
    """Return the same loss for every (x, y) with every (x, z), y and z among the references."""
    d = (unit_squared_distances if unit_norm else squared_distances)(embeddings, references)
    anchor, y = pairs.positive.nonzero(as_tuple=True)  # (T,)
    negative = pairs.negative[anchor]
    hinge = (d[anchor, y, None] + margin - d[anchor]).clamp_min(0)  # (T, R)
    count = negative.sum()
    if count == 0:
        return zero_with_graph(embeddings)
    return (hinge * negative).sum() / count


def triplets_of_pairs(a: Tensor, y: Tensor, b: Tensor, z: Tensor) -> tuple[Tensor, ...]:
    """Join mined pairs (a, y) and (b, z) that share the anchor into triplets (a, y, z)."""
    pair, other = (a[:, None] == b).nonzero(as_tuple=True)
    return a[pair], y[pair], z[other]


class Triplet(InstanceLoss):
    """Eq. 3 over all triplets of the batch, or over the triplets (or pairs) of a miner.

    `unit_norm=False` takes distances between the embeddings as they are.
    """

    takes_pairs: ClassVar[bool] = True

    def __init__(self, *, margin: float = 0.1, unit_norm: bool = True) -> None:
        super().__init__()
        check_number("margin", margin)
        self.margin = margin
        self.unit_norm = unit_norm

    def _loss_of_pairs(self, x: Tensor, ref: Tensor, pairs: Pairs) -> Tensor:
        return triplet_of_pairs(x, ref, pairs, margin=self.margin, unit_norm=self.unit_norm)

    def _loss_of_mined(self, x: Tensor, ref: Tensor, indices_tuple: tuple[Tensor, ...]) -> Tensor:
        if len(indices_tuple) != 3:
            indices_tuple = triplets_of_pairs(*mined_pairs(indices_tuple))
        i, j, k = indices_tuple
        if len(i) == 0:
            return zero_with_graph(x)
        d = (unit_squared_distances if self.unit_norm else squared_distances)(x, ref)  # (B, R)
        return (d[i, j] + self.margin - d[i, k]).clamp_min(0).mean()
