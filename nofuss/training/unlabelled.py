"""Training without labels: settings for triplets and pairs, and what is learned from them."""

import logging
from dataclasses import replace

from nofuss.config import TrainConfig
from nofuss.data.collection import Collection
from nofuss.data.comparisons import (
    TEST_FRACTION,
    as_groups,
    contradicted,
    links_of,
    to_learn,
)
from nofuss.errors import DataError, UsageError
from nofuss.losses import INSTANCE_LOSSES

log = logging.getLogger("nofuss")


def settle_unlabelled(config: TrainConfig, collection: Collection) -> TrainConfig:
    """Choose the assignment for triplets or pairs, and how many are held out."""
    kind = "triplets" if collection.triplets is not None else "pairs"
    if config.loss in INSTANCE_LOSSES:
        raise UsageError(
            f"--loss {config.loss} needs labels, and {collection.name} has {kind} only; use a "
            "loss over proxies: proxy-nca, proxy-triplet"
        )
    if config.test_fraction is None:
        config = replace(config, test_fraction=TEST_FRACTION)
        log.info(
            f"{TEST_FRACTION:.0%} of the {kind} are held out for the scores; --test-fraction 0 "
            "learns from all"
        )
    as_they_are = config.assignment == "dynamic"
    if config.preset == "paper" and config.assignment == "static":
        as_they_are = True  # Section 4.1: without labels, p(x) is the closest proxy
    if as_they_are and kind == "pairs":
        raise UsageError(
            f"dynamic assignment learns from triplets, and {collection.name} has pairs; use "
            "--assignment balanced"
        )
    reason = contradicted(collection)
    if not as_they_are and reason is None:
        linked = links_of(collection)
        log.info(
            f"no labels: {int(linked.groups.max()) + 1:,} groups of items that the {kind} link are "
            "treated as classes; assignment is balanced"
        )
        if linked.dropped:
            log.warning(
                f"some {kind} contradict each other; {linked.dropped:,} links that no others "
                "confirm are left out"
            )
        return replace(config, assignment="balanced")
    if not as_they_are and (kind == "pairs" or config.assignment == "balanced"):
        cure = "correct them" if kind == "pairs" else "correct them, or use --assignment dynamic"
        raise DataError(f"{collection.name} can't be trained on groups: {reason}; {cure}")
    because = "" if as_they_are else f" ({reason})"
    log.info(f"no labels: training takes the triplets as they are{because}; assignment is dynamic")
    return replace(config, assignment="dynamic")


def learnable(collection: Collection, config: TrainConfig) -> Collection:
    """Return what training learns from: groups as labels, or triplets that are not held out."""
    if collection.labels is not None:
        return collection
    if config.assignment == "balanced":
        return as_groups(collection)
    return to_learn(collection, float(config.test_fraction or 0), config.seed)
