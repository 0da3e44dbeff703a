"""Training without labels: settings for triplets and pairs, and the score of held-out ones."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from nofuss.config import TrainConfig
from nofuss.data.collection import Collection
from nofuss.data.comparisons import (
    TEST_SHARE,
    Compared,
    as_groups,
    contradicted,
    groups_of,
    links_of,
    to_learn,
    to_score,
)
from nofuss.data.split import Rows
from nofuss.errors import DataError, UsageError
from nofuss.evaluate.order import OrderScores, order_of_pairs, order_of_triplets
from nofuss.losses import INSTANCE_LOSSES
from nofuss.terminal import console


def settle_unlabelled(config: TrainConfig, collection: Collection) -> TrainConfig:
    """Choose the assignment for triplets or pairs, and how many are held out."""
    kind = "triplets" if collection.triplets is not None else "pairs"
    if config.loss in INSTANCE_LOSSES:
        raise UsageError(
            f"--loss {config.loss} needs labels, and {collection.name} has {kind} only; use a "
            "loss over proxies: proxy-nca, proxy-triplet"
        )
    if config.test_share is None:
        config = replace(config, test_share=TEST_SHARE)
        console.say(
            f"{TEST_SHARE:.0%} of the {kind} are held out for the scores; --test-share 0 learns "
            "from all"
        )
    as_they_are = config.assignment == "dynamic"
    if config.preset == "paper" and config.assignment == "static":
        as_they_are = True  # Section 4.1: without labels, p(x) is the closest proxy
    if as_they_are and kind == "pairs":
        raise UsageError(
            f"dynamic assignment learns from triplets, and {collection.name} has pairs; use "
            "--assignment balanced, and no --preset paper"
        )
    reason = contradicted(collection)
    if not as_they_are and reason is None:
        linked = links_of(collection)
        console.say(
            f"no labels: {int(linked.groups.max()) + 1:,} groups of items that the {kind} link are "
            "learned like classes; assignment is balanced"
        )
        if linked.dropped:
            console.say(
                f"note: some {kind} contradict each other; {linked.dropped:,} links that no others "
                "confirm are left out"
            )
        return replace(config, assignment="balanced")
    if not as_they_are and (kind == "pairs" or config.assignment == "balanced"):
        cure = "correct them" if kind == "pairs" else "correct them, or use --assignment dynamic"
        raise DataError(f"{collection.name} can't be learned by groups: {reason}; {cure}")
    because = "" if as_they_are else f" ({reason})"
    console.say(f"no labels: triplets are learned as they are{because}; assignment is dynamic")
    return replace(config, assignment="dynamic")


def learnable(collection: Collection, config: TrainConfig) -> Collection:
    """Return what training learns from: groups as labels, or triplets that are not held out."""
    if collection.labels is not None:
        return collection
    if config.assignment == "balanced":
        return as_groups(collection)
    return to_learn(collection, float(config.test_share or 0), config.seed)


def held_out_comparisons(
    collection: Collection, config: TrainConfig, test: Rows
) -> Compared | None:
    """Return the triplets or pairs that test items are scored by; None where there are none."""
    if collection.triplets is None and collection.pairs is None:
        return None
    compared = to_score(collection, float(config.test_share or 0), config.seed, test)
    return compared if can_compare(compared.collection) else None


def can_compare(collection: Collection) -> bool:
    """Return whether a collection has triplets or pairs to score."""
    if collection.triplets is not None:
        return len(collection.triplets) > 0
    return collection.pairs is not None and {*collection.pairs[:, 2].tolist()} == {0, 1}


def score_order(collection: Collection, embeddings: Tensor, *, seed: int) -> OrderScores:
    """Return how many of the collection's triplets or pairs embeddings put in the right order."""
    groups = groups_of(collection)
    if collection.triplets is not None:
        return order_of_triplets(embeddings, collection.triplets, groups=groups, seed=seed)
    assert collection.pairs is not None
    return order_of_pairs(embeddings, collection.pairs, groups=groups, seed=seed)


def score_orders(
    collection: Collection, columns: Mapping[str, Tensor], *, seed: int
) -> dict[str, Any]:
    """Return the scores of the first column, with the others as baselines and the gain over one."""
    scores = {name: score_order(collection, x, seed=seed) for name, x in columns.items()}
    (_, ours), *others = scores.items()
    gain = {"gain": ours.gain_over(*others[0])} if others else {}
    return ours.as_dict() | gain | {"baselines": {name: s.as_dict() for name, s in others}}
