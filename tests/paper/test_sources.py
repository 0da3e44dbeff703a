"""Data sets and budgets: halves of the training classes, triplets without labels."""

from dataclasses import replace

import numpy as np

from nofuss.paper.sources import Source, bare_triplets, budget_of
from nofuss.paper.trials import trial_of


def test_tries_on_some_classes_stay_on_their_half(source: Source) -> None:
    few = replace(source, budget=replace(source.budget, try_classes=2))
    for fold in (0, 1):
        whole, some = source.split(fold), few.split(fold)
        assert all(set(s) < set(w) for s, w in zip(some, whole, strict=True))
        assert [len(np.unique(source.labels(rows))) for rows in some] == [2, 2]
    trial = trial_of(source, "lifted", 1e-3, fold=0)
    assert trial.key(source) != trial.key(few)
    assert replace(trial, fold=None).key(source) == replace(trial, fold=None).key(few)


def test_bare_triplets_say_what_the_labels_say(source: Source) -> None:
    train_rows = source.split(None)[0]
    data = bare_triplets(source, train_rows, 500, seed=0)
    assert not data.is_labelled
    triplets = data.comparisons.rows
    x, y, z = (source.labels(triplets[:, i]) for i in range(3))
    assert (x == y).all()
    assert (x != z).all()
    assert (triplets[:, 0] != triplets[:, 1]).all()
    assert np.isin(triplets, train_rows).all()
    assert len(np.unique(triplets[:, 0])) == len(train_rows)


def test_only_the_papers_setting_has_two_batches() -> None:
    batches = {
        name: [budget_of("cub", name).batch_of(m) for m in ("proxy-nca", "lifted")]
        for name in ("minutes", "hours", "paper")
    }
    assert batches == {"minutes": [64, 64], "hours": [64, 64], "paper": [32, 128]}
