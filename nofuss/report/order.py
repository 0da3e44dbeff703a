"""Score held-out triplets and pairs: how many are in the right order."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from nofuss.config import TrainConfig
from nofuss.data.collection import Collection
from nofuss.data.comparisons import Compared, groups_of, to_score
from nofuss.data.split import Rows
from nofuss.evaluate.order import OrderScores, order_of_pairs, order_of_triplets


def held_out_comparisons(
    collection: Collection, config: TrainConfig, test: Rows
) -> Compared | None:
    """Return the triplets or pairs that test items are scored by; None where there are none."""
    if collection.triplets is None and collection.pairs is None:
        return None
    compared = to_score(collection, float(config.test_fraction or 0), config.seed, test)
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
