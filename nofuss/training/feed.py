"""Batches for training: a collection's items in an order fixed by (seed, epoch, step) alone."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

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
class CollectionFeed:
    """A collection as a `Feed`: shuffled, M items a class, or triplets without labels."""

    collection: Collection
    preprocessing: Preprocessing | None
    batch_size: int
    per_class: int = 0
    seed: int = 0
    num_workers: int = 0
    pin: bool = False
    """Put the inputs into pinned memory, from which a GPU copies asynchronously."""

    @classmethod
    def of(
        cls,
        collection: Collection,
        preprocessing: Preprocessing | None,
        settings: Settings,
        *,
        pin: bool = False,
    ) -> "CollectionFeed":
        """Return the batches that the settings ask for."""
        return cls(
            collection,
            preprocessing,
            batch_of(settings, len(collection), class_count(collection)),
            per_class=settings.per_class,
            seed=settings.seed,
            num_workers=settings.num_workers,
            pin=pin,
        )

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
        """Yield the epoch's batches without the first `start`."""
        chosen = self.indices(epoch)[start:]
        own = batches(
            self.collection,
            self.preprocessing,
            [indices[share(len(indices))] for indices in chosen],
            train=True,
            seed=self.seed,
            epoch=epoch,
            num_workers=self.num_workers,
            pin=self.pin,
        )
        for batch, indices in zip(own, chosen, strict=True):
            yield self.batch(batch.inputs, indices)

    def batch(self, inputs: Tensor, indices: Indices) -> Batch:
        """Return this process's inputs of a batch with the labels of all of it.

        It has none where triplets are learned as they are.
        """
        c = self.collection
        labels = torch.from_numpy(c.known_labels()[indices]) if c.is_labelled else None
        return Batch(inputs, labels, torch.from_numpy(indices))

    def indices(self, epoch: int) -> list[Indices]:
        """Return the rows of each batch of an epoch."""
        c = self.collection
        if not c.is_labelled:
            assert c.comparisons is not None
            triplets = c.comparisons.rows
            return triplet_batches(triplets, self.batch_size, seed=self.seed, epoch=epoch)
        if self.per_class:
            return m_per_class(
                c.labels, self.batch_size, self.per_class, seed=self.seed, epoch=epoch
            )
        return shuffled(len(c), self.batch_size, seed=self.seed, epoch=epoch, drop_last=True)


@dataclass(frozen=True)
class ActivationFeed:
    """The batches of another feed with kept activations for inputs; an epoch uses one view."""

    feed: CollectionFeed
    activations: Activations

    def __len__(self) -> int:
        return len(self.feed)

    def __call__(self, epoch: int, start: int) -> Iterator[Batch]:
        """Yield the epoch's batches without the first `start`."""
        view = epoch % self.activations.views
        for indices in self.feed.indices(epoch)[start:]:
            inputs = self.activations.take(view, indices[share(len(indices))])
            yield self.feed.batch(inputs.pin_memory() if self.feed.pin else inputs, indices)
