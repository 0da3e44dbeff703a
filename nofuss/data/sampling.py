"""Which items form each batch: pure functions of (seed, epoch); a step is an index into them.

They have no state, so a resumed run continues with the same batches.
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

Indices = NDArray[np.int64]


def shuffled(
    count: int, batch: int, *, seed: int, epoch: int, drop_last: bool = False
) -> list[Indices]:
    """Return every item once, in random order, in batches; the last may be smaller.

    drop_last: leave out a smaller last batch (unless it is the only one), because statistics of
    tiny batches are poor.
    """
    return _chunks(_generator(seed, epoch).permutation(count), batch, drop_last)


def in_order(count: int, batch: int) -> list[Indices]:
    """Return every item once, in order, in batches: for evaluation."""
    return _chunks(np.arange(count), batch, False)


def m_per_class(labels: ArrayLike, batch: int, m: int, *, seed: int, epoch: int) -> list[Indices]:
    """Return batches of batch/m classes with m items each, for losses over pairs in a batch.

    Classes are visited in random order, and so are the items of a class; a class with fewer
    than m items repeats some. An epoch has as many batches as the items fill (at least one).
    """
    labels = np.asarray(labels)
    if batch % m:
        raise ValueError(
            f"a batch of {batch} can't hold {m} items per class; make it a multiple of {m}"
        )
    generator, per_batch = _generator(seed, epoch), batch // m
    order = generator.permutation(len(labels))
    order = order[np.argsort(labels[order], kind="stable")]  # by class, at random within it
    _, sizes = np.unique(labels, return_counts=True)
    starts = np.cumsum(sizes) - sizes  # where the items of each class begin in `order`
    groups = len(sizes) // per_batch  # batches that one pass over all classes fills
    if not groups:
        raise ValueError(
            f"{len(sizes)} classes can't fill a batch of {batch} with {m} items each; "
            f"use a batch of at most {len(sizes) * m}"
        )
    steps = max(len(labels) // batch, 1)
    visits = np.zeros(len(sizes), dtype=np.int64)
    batches: list[Indices] = []
    while len(batches) < steps:
        turn = generator.permutation(len(sizes))[: groups * per_batch].reshape(groups, per_batch)
        for classes in turn[: steps - len(batches)]:
            # Each visit of a class takes its next m items, and starts again after the last.
            within = (visits[classes, None] * m + np.arange(m)) % sizes[classes, None]
            batches.append(order[starts[classes, None] + within].reshape(-1))
            visits[classes] += 1
    return batches


def triplet_batches(
    triplets: NDArray[np.int64], batch: int, *, seed: int, epoch: int
) -> list[Indices]:
    """Return every triplet once: batches of b anchors, then b positives, then b negatives.

    `inputs.chunk(3)` separates the three again.
    """
    rows = shuffled(len(triplets), batch, seed=seed, epoch=epoch)
    return [triplets[chosen].T.reshape(-1) for chosen in rows]


def _chunks(order: Indices, batch: int, drop_last: bool) -> list[Indices]:
    if batch < 1:
        raise ValueError(f"batch is {batch}; expected at least 1")
    batches = [order[i : i + batch] for i in range(0, len(order), batch)]
    return batches[:-1] if drop_last and len(batches) > 1 and len(batches[-1]) < batch else batches


def _generator(seed: int, epoch: int) -> np.random.Generator:
    return np.random.default_rng((seed, epoch))
