"""Batches are a pure function of (seed, epoch, step)."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from nofuss.config import Preprocessing
from nofuss.data.collection import Collection
from nofuss.data.loader import Batch
from nofuss.data.triplets import Comparisons
from nofuss.training.feed import Batches, batch_of, class_count
from tests.asked import settings_of

LOOK = Preprocessing(size=8, resize=8, mode="L", mean=(127.5,), std=(127.5,), affine=0.1)


def vectors(n: int = 23, classes: int = 4) -> Collection:
    x = np.random.default_rng(0).normal(size=(n, 3)).astype(np.float32)
    return Collection(
        name="x",
        layout="arrays",
        array=x,
        labels=np.arange(n) % classes,
        class_names=tuple("abcdefgh"[:classes]),
    )


def pictures(n: int = 23, classes: int = 4) -> Collection:
    x = np.random.default_rng(0).integers(0, 256, (n, 8, 8), dtype=np.uint8)
    return replace(vectors(n, classes), array=x)


def batches_of(
    collection: Collection, look: Preprocessing | None = None, **options: Any
) -> Batches:
    settings = replace(settings_of(), **{"batch_size": 5, "seed": 3} | options)
    return Batches(collection, look, settings)


TRIPLETS = replace(
    vectors(),
    labels=np.full(23, -1),
    class_names=(),
    comparisons=Comparisons("triplets", np.array([[i, i + 1, i + 2] for i in range(12)])),
)
FEEDS = {
    "vectors": batches_of(vectors()),
    "pictures": batches_of(pictures(), LOOK),
    "workers": batches_of(pictures(), LOOK, num_workers=2),
    "per class": batches_of(vectors(), batch_size=8, per_class=2),
    "triplets": batches_of(TRIPLETS),
}


def same(a: Batch, b: Batch) -> bool:
    labels = (a.labels is None) == (b.labels is None) and (
        a.labels is None or torch.equal(a.labels, b.labels)  # type: ignore[arg-type]
    )
    return labels and torch.equal(a.inputs, b.inputs) and torch.equal(a.indices, b.indices)


@pytest.mark.parametrize("name", FEEDS)
def test_the_same_moment_has_the_same_batch(name: str) -> None:
    feed = FEEDS[name]
    for epoch in (0, 1, 5):
        first, again = list(feed(epoch, 0)), list(feed(epoch, 0))
        assert len(first) == len(again) == len(feed)
        assert all(map(same, first, again))


@pytest.mark.parametrize("name", FEEDS)
def test_start_leaves_out_exactly_the_first(name: str) -> None:
    feed = FEEDS[name]
    whole = list(feed(2, 0))
    for start in range(len(feed) + 1):
        rest = list(feed(2, start))
        assert len(rest) == len(whole) - start
        assert all(map(same, rest, whole[start:]))


@pytest.mark.parametrize("name", FEEDS)
def test_epochs_and_seeds_differ(name: str) -> None:
    feed = FEEDS[name]
    other = replace(feed, settings=replace(feed.settings, seed=4))
    assert not same(next(iter(feed(0, 0))), next(iter(feed(1, 0))))
    assert not same(next(iter(feed(0, 0))), next(iter(other(0, 0))))


def test_the_number_of_workers_changes_nothing() -> None:
    assert all(map(same, FEEDS["pictures"](1, 1), FEEDS["workers"](1, 1)))


def test_a_view_does_not_depend_on_its_neighbours() -> None:
    """Augmentation is of (seed, epoch, item): another batch size shows the same views."""
    small, large = FEEDS["pictures"], batches_of(pictures(), LOOK, batch_size=20)
    views = {}
    for feed in (small, large):
        for batch in feed(4, 0):
            for index, view in zip(batch.indices.tolist(), batch.inputs, strict=True):
                assert torch.equal(views.setdefault(index, view), view)
    assert len(views) > 15


def test_indices_name_the_rows() -> None:
    collection = vectors()
    for batch in FEEDS["vectors"](0, 0):
        assert np.array_equal(batch.inputs.numpy(), np.asarray(collection.array)[batch.indices])
        assert batch.labels is not None
        assert np.array_equal(batch.labels.numpy(), collection.labels[batch.indices])


def test_triplets_come_in_thirds_without_labels() -> None:
    rows = []
    for batch in FEEDS["triplets"](0, 0):
        assert batch.labels is None
        anchors, positives, negatives = batch.indices.chunk(3)
        rows += torch.stack((anchors, positives, negatives), 1).tolist()
    assert sorted(rows) == [[i, i + 1, i + 2] for i in range(12)]


def test_an_epoch_shows_no_item_twice() -> None:
    seen = torch.cat([batch.indices for batch in FEEDS["vectors"](0, 0)])
    assert len(seen.unique()) == len(seen) == 20  # a last batch of three is left out


def test_batches_of_whole_classes() -> None:
    """As the program, the estimator and the experiments make them."""
    assert batch_of(settings_of(batch_size=10), 100, 30) == 10
    assert batch_of(settings_of(batch_size=10), 7, 3) == 7
    assert batch_of(settings_of(batch_size=10, per_class=4), 100, 30) == 8
    assert batch_of(settings_of(batch_size=64, per_class=4), 100, 5) == 20


def test_proxies_of_items_without_labels_are_a_fifth_of_them() -> None:
    assert class_count(vectors()) == 4
    assert class_count(TRIPLETS) == 4
    assert class_count(TRIPLETS.subset(np.arange(5))) == 2
