"""Batches for training: a collection's items in an order that (seed, epoch, step) alone decide."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from nofuss.config import Preprocessing
from nofuss.data.collection import Collection
from nofuss.data.loader import batches
from nofuss.data.sampling import m_per_class, shuffled


class TrainBatch(NamedTuple):
    """Items of a step; without labels, anchors, positives and negatives in thirds."""

    inputs: Tensor
    labels: Tensor | None
    indices: Tensor


@dataclass(frozen=True)
class CollectionFeed:
    """A collection as a `Feed`: shuffled, M items a class, or triplets without labels."""

    collection: Collection
    preprocessing: Preprocessing | None
    batch: int
    per_class: int = 0
    seed: int = 0
    workers: int = 0

    def __len__(self) -> int:
        return len(self._indices(0))

    def __call__(self, epoch: int, start: int) -> Iterator[TrainBatch]:
        """The epoch's batches, leaving out the first `start`."""
        labelled = self.collection.labels is not None
        for batch in batches(
            self.collection,
            self.preprocessing,
            self._indices(epoch)[start:],
            train=True,
            seed=self.seed,
            epoch=epoch,
            workers=self.workers,
        ):
            yield TrainBatch(batch.inputs, batch.labels if labelled else None, batch.indices)

    def _indices(self, epoch: int) -> list[np.ndarray[Any, np.dtype[np.int64]]]:
        c = self.collection
        if c.labels is None:
            assert c.triplets is not None
            rows = shuffled(len(c.triplets), self.batch, seed=self.seed, epoch=epoch)
            return [c.triplets[row].T.reshape(-1) for row in rows]  # anchors, positives, negatives
        if self.per_class:
            return m_per_class(c.labels, self.batch, self.per_class, seed=self.seed, epoch=epoch)
        return shuffled(len(c), self.batch, seed=self.seed, epoch=epoch, drop_last=True)
