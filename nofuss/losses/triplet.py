"""The margin triplet loss, Eq. 3, over all triplets of the batch."""

from torch import Tensor

from nofuss.geometry import normalize, squared_distances
from nofuss.losses.inputs import zero_with_graph
from nofuss.losses.instance_loss import InstanceLoss, pair_masks


def triplet(
    embeddings: Tensor, labels: Tensor, *, margin: float = 0.1, unit_norm: bool = True
) -> Tensor:
    """Eq. 3, mean of [d(x,y) + M − d(x,z)]₊ over all triplets of the batch."""
    x = normalize(embeddings) if unit_norm else embeddings
    positive, negative = pair_masks(labels)
    d = squared_distances(x, x)
    anchor, y = positive.nonzero(as_tuple=True)  # (T,)
    hinge = (d[anchor, y, None] + margin - d[anchor]).clamp_min(0)  # (T, B)
    count = negative[anchor].sum()
    if count == 0:
        return zero_with_graph(embeddings)
    return (hinge * negative[anchor]).sum() / count


def triplets_of_pairs(a: Tensor, y: Tensor, b: Tensor, z: Tensor) -> tuple[Tensor, ...]:
    """Mined pairs (a, y) and (b, z) joined where they share the anchor: rows of (a, y, z)."""
    pair, other = (a[:, None] == b).nonzero(as_tuple=True)
    return a[pair], y[pair], z[other]


class Triplet(InstanceLoss):
    """Eq. 3 over all triplets of the batch, or over the triplets (or pairs) that a miner hands in.

    `unit_norm=False` takes distances between the embeddings as they are.
    """

    def __init__(self, *, margin: float = 0.1, unit_norm: bool = True) -> None:
        super().__init__()
        self.margin = margin
        self.unit_norm = unit_norm

    def _loss(self, x: Tensor, labels: Tensor) -> Tensor:
        return triplet(x, labels, margin=self.margin, unit_norm=self.unit_norm)

    def _mined(self, x: Tensor, indices_tuple: tuple[Tensor, ...]) -> Tensor:
        if len(indices_tuple) == 4:
            indices_tuple = triplets_of_pairs(*indices_tuple)
        if len(indices_tuple) != 3:
            raise ValueError(
                f"got {len(indices_tuple)} mined index tensors; expected three: anchors, "
                "positives, negatives, or four: anchors, positives, anchors, negatives"
            )
        if len(indices_tuple[0]) == 0:
            return zero_with_graph(x)
        a, y, z = ((normalize(x) if self.unit_norm else x)[i] for i in indices_tuple)
        d_y, d_z = (a - y).square().sum(1), (a - z).square().sum(1)
        return (d_y + self.margin - d_z).clamp_min(0).mean()
