"""Batches for training: a collection's items in an order fixed by (seed, epoch, step) alone."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from nofuss.config import Preprocessing, Settings
from nofuss.data.collection import Collection
from nofuss.data.loader import Batch, batches
from nofuss.data.sampling import Indices, m_per_class, shuffled, triplet_batches
from nofuss.distributed.processes import share, world
from nofuss.errors import UsageError
from nofuss.model.activations import Activations


def class_count(data: Collection) -> int:
    """Return how many classes the proxies stand for; without labels, a fifth of the items."""
    return data.num_classes or max(2, min(1000, len(data) // 5))


def batch_of(settings: Settings, items: int, classes: int) -> int:
    """Return the batch size: as configured, at most the number of items, in whole classes."""
    batch, each = min(settings.batch_size, items), settings.per_class
    return each * max(2, min(batch // each, classes)) if each else batch


@dataclass(frozen=True)
class Batches:
    """A collection as a `Feed`: shuffled, M items a class, or triplets without labels."""

    collection: Collection
    preprocessing: Preprocessing | None
    settings: Settings
    activations: Activations | None = None
    """Cached ones to take for inputs; an epoch uses one view."""
    pin: bool = False
    """Put the inputs into pinned memory, from which a GPU copies asynchronously."""

    def __post_init__(self) -> None:
        if not (fewest := min(map(len, self.indices(0)), default=0)):
            raise UsageError(
                f"{self.collection.name} has no batch to train on; lower --test-fraction"
            )
        if fewest < world():
            raise UsageError(
                f"a batch of {fewest} leaves some of {world()} processes without an item; start "
                "fewer, or raise --batch-size"
            )

    def __len__(self) -> int:
        return len(self.indices(0))

    def __call__(self, epoch: int, start: int) -> Iterator[Batch]:
        """Yield the epoch's batches without the first `start`.

        Each has this process's inputs, and the labels of all of it; none where triplets are learned
        as they are.
        """
        c, kept = self.collection, self.activations
        chosen = self.indices(epoch)[start:]
        own = [indices[share(len(indices))] for indices in chosen]
        if kept is not None:
            found = (kept.take(epoch % kept.views, rows) for rows in own)
            loaded = (inputs.pin_memory() if self.pin else inputs for inputs in found)
        else:
            made = batches(
                c,
                self.preprocessing,
                own,
                train=True,
                seed=self.settings.seed,
                epoch=epoch,
                num_workers=self.settings.num_workers,
                pin=self.pin,
            )
            loaded = (batch.inputs for batch in made)
        labels = torch.from_numpy(c.known_labels()) if c.is_labelled else None
        for inputs, indices in zip(loaded, map(torch.from_numpy, chosen), strict=True):
            yield Batch(inputs, None if labels is None else labels[indices], indices)

    def indices(self, epoch: int) -> list[Indices]:
        """Return the rows of each batch of an epoch."""
        c, each, seed = self.collection, self.settings.per_class, self.settings.seed
        size = batch_of(self.settings, len(c), class_count(c))
        if not c.is_labelled:
            assert c.comparisons is not None
            return triplet_batches(c.comparisons.rows, size, seed=seed, epoch=epoch)
        if each:
            return m_per_class(c.labels, size, each, seed=seed, epoch=epoch)
        return shuffled(len(c), size, seed=seed, epoch=epoch, drop_last=True)
