"""The shell of every loss over instances: checks, precision, one calling convention."""

from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from nofuss.geometry import Array
from nofuss.losses.checks import (
    check_embeddings,
    check_labels,
    full_precision,
    one_or_nan,
    without_autocast,
)


class Pairs(NamedTuple):
    """Anchors among the batch, each with positives and negatives among the references."""

    positive: Tensor
    """(B, R) True where a reference is a positive of the anchor."""
    negative: Tensor
    """(B, R) True where it is a negative."""


class InstanceLoss(nn.Module):
    """`criterion(embeddings (B, D), labels (B,)) → scalar`, with pairs from the batch.

    A batch without a positive pair, or of one class only, gives zero with a graph.
    """

    takes_pairs: ClassVar[bool] = False
    """Whether pairs can be given: from a miner, or with separate references."""
    per_class: ClassVar[int] = 4
    """Items of each class in a batch of training."""

    def forward(
        self,
        embeddings: Array,
        labels: Array | None = None,
        indices_tuple: tuple[Tensor, ...] | None = None,
        ref_emb: Array | None = None,
        ref_labels: Array | None = None,
    ) -> Tensor:
        """Return the mean loss of the batch.

        labels: (B,); not needed where `indices_tuple` says which pairs there are.
        indices_tuple: the result of a miner of pytorch-metric-learning: anchors, positives,
            anchors, negatives, or anchors, positives, negatives.
        ref_emb, ref_labels: (R, D) and (R,), from which positives and negatives are then taken. The
            batch itself once more, with its labels, means pairs within it: no item with itself.
        """
        if ref_emb is embeddings and ref_labels is labels:
            ref_emb = ref_labels = None
        x = check_embeddings(embeddings)
        if labels is None and indices_tuple is None:
            raise ValueError("got no labels; pass them, or the pairs of a miner as indices_tuple")
        if labels is not None:
            labels = check_labels(labels, x)
        with without_autocast(x):
            x = full_precision(x)
            within = indices_tuple is None and ref_emb is None and ref_labels is None
            if within and labels is not None:
                return self._loss(x, labels) * one_or_nan(x)
            if not self.takes_pairs:
                raise ValueError(
                    f"{type(self).__name__} chooses its pairs within the batch; leave out the "
                    "miner and ref_emb (Triplet, SemiHardTriplet and NCA take them)"
                )
            ref = x if ref_emb is None else _references(x, ref_emb)
            x = full_precision(x, ref)
            if indices_tuple is not None:
                loss = self._loss_of_mined(x, ref, indices_tuple)
            elif labels is None or ref_emb is None or ref_labels is None:
                raise ValueError("got one of ref_emb and ref_labels; pass both")
            else:
                ref_labels = check_labels(ref_labels, ref).to(labels.device)
                same = labels[:, None] == ref_labels
                loss = self._loss_of_pairs(x, ref, Pairs(same, ~same))
            return loss * one_or_nan(x, ref)

    def _loss(self, x: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of a batch."""
        return self._loss_of_pairs(x, x, pair_masks(labels))

    def _loss_of_pairs(self, x: Tensor, ref: Tensor, pairs: Pairs) -> Tensor:
        """Return the loss of anchors x (B, D) and references (R, D), if `takes_pairs`."""
        raise NotImplementedError

    def _loss_of_mined(self, x: Tensor, ref: Tensor, indices_tuple: tuple[Tensor, ...]) -> Tensor:
        a, y, b, z = mined_pairs(indices_tuple)
        none = torch.zeros(len(x), len(ref), dtype=torch.bool, device=x.device)
        yes = torch.ones((), dtype=torch.bool, device=x.device)
        pairs = Pairs(none.index_put((a, y), yes), none.index_put((b, z), yes))
        return self._loss_of_pairs(x, ref, pairs)


def _references(x: Tensor, ref_emb: Array) -> Tensor:
    """Return references (R, D), in the precision of x (B, D) or their own if it is wider."""
    ref_emb = check_embeddings(ref_emb, name="ref_emb")
    if ref_emb.shape[1] != x.shape[1]:
        raise ValueError(
            f"ref_emb have {ref_emb.shape[1]} columns but embeddings {x.shape[1]}; make them equal"
        )
    return full_precision(ref_emb, x)


def pair_masks(labels: Tensor) -> Pairs:
    """Return (B, B) masks of positive pairs (same label, another item) and of negative pairs."""
    same = labels[:, None] == labels
    itself = torch.eye(len(labels), dtype=torch.bool, device=labels.device)
    return Pairs(same & ~itself, ~same)


def mined_pairs(indices_tuple: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return mined pairs as they are, mined triplets (a, y, z) as pairs (a, y) and (a, z)."""
    if len(indices_tuple) == 3:
        a, y, z = indices_tuple
        return a, y, a, z
    if len(indices_tuple) != 4:
        raise ValueError(
            f"got {len(indices_tuple)} mined index tensors; expected three: anchors, positives, "
            "negatives, or four: anchors, positives, anchors, negatives"
        )
    return indices_tuple
