"""The shell of every loss over instances: checks, precision, one calling convention."""

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

from nofuss.geometry import Array
from nofuss.losses.inputs import check_embeddings, check_labels, full_precision, without_autocast


class InstanceLoss(nn.Module, ABC):
    """`criterion(embeddings (B, D), labels (B,)) → scalar`, pairs taken within the batch.

    A batch without a positive pair, or of one class only, gives zero with a graph.
    """

    def forward(
        self, embeddings: Tensor, labels: Array, indices_tuple: tuple[Tensor, ...] | None = None
    ) -> Tensor:
        """The mean loss of the batch; `indices_tuple` is what a miner of other libraries found."""
        check_embeddings(embeddings)
        labels = check_labels(labels, embeddings)
        with without_autocast(embeddings):
            x = full_precision(embeddings)
            if indices_tuple is None:
                return self._loss(x, labels)
            return self._mined(x, indices_tuple)

    @abstractmethod
    def _loss(self, x: Tensor, labels: Tensor) -> Tensor: ...

    def _mined(self, x: Tensor, indices_tuple: tuple[Tensor, ...]) -> Tensor:
        raise ValueError(
            f"{type(self).__name__} chooses its pairs itself; leave out the miner "
            "(only Triplet takes mined triplets)"
        )


def pair_masks(labels: Tensor) -> tuple[Tensor, Tensor]:
    """(B, B) masks of positive pairs (same label, not the same item) and of negative pairs."""
    same = labels[:, None] == labels
    return same & ~torch.eye(len(labels), dtype=torch.bool, device=labels.device), ~same
