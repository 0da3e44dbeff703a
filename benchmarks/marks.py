"""What marks on the page are worth, by a simulated user: `python -m benchmarks.marks RUN`.

RUN: of pictures, with classes kept out of training (`nofuss train DATA --test-fraction 0.5`). The
user marks the first results of one query in each of some unseen classes by their true classes,
one in ten wrongly if asked for. Scored are items of these classes without a mark, and all other
classes.
"""

import sys
import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from nofuss.evaluate.protocol import PerQuery, per_query
from nofuss.model.manifest import mapped
from nofuss.ranking.neighbours import nearest
from nofuss.search import Index
from nofuss.search.feedback import SLACK, Pairs, learned_map

SEEDS = 10
CASES = ((1, 10, 0.0), (1, 24, 0.0), (3, 24, 0.0), (10, 24, 0.0), (10, 24, 0.1))
"""Queries, marks of each, and the share of marks that is wrong."""


def simulated_marks(
    x: Tensor,
    labels: Tensor,
    classes: Tensor,
    count: int,
    wrong: float,
    random: np.random.Generator,
) -> Pairs:
    """Return the marks of one query a class, each with its first `count` results."""
    first, second, same = list[int](), list[int](), list[bool]()
    for c in classes.tolist():
        query = int(random.choice(np.flatnonzero(labels.numpy() == c)))
        found = nearest(x[query][None], x, count + 1)[1][0]
        for row in found[found != query].tolist():
            first.append(query)
            second.append(row)
            same.append(bool(labels[row] == c) != bool(random.random() < wrong))
    return Pairs(torch.tensor(first), torch.tensor(second), torch.tensor(same))


def unseen(run: Path) -> tuple[Tensor, Tensor]:
    """Return the vectors (N, D) and labels of a run's test items."""
    items = [item for item in Index.load(run / "index").items(vectors=True) if item.split == "test"]
    assert items, "the run has no unseen classes; train with --test-fraction 0.5"
    labels = np.unique([str(item.label) for item in items], return_inverse=True)[1]
    vectors = torch.stack([vector for item in items if (vector := item.vector) is not None])
    return vectors, torch.from_numpy(labels)


def main(run: Path, slack: float = SLACK) -> None:
    """Print Recall@1 and MAP@R before and after, as means over seeds."""
    x, labels = unseen(run)
    before = per_query(x, labels)
    print(f"{len(x):,} items of {len(torch.unique(labels))} unseen classes, slack {slack:g}")
    for queries, count, wrong in CASES:
        rows = []
        for seed in range(SEEDS):
            random = np.random.default_rng(seed)
            classes = torch.from_numpy(random.permutation(torch.unique(labels).numpy())[:queries])
            pairs = simulated_marks(x, labels, classes, count, wrong, random)
            began = time.perf_counter()
            matrix = learned_map(x, pairs, slack=slack)
            spent = time.perf_counter() - began
            after = per_query(mapped(x, matrix), labels)
            is_marked = torch.isin(before.rows, torch.cat([pairs.first, pairs.second]))
            is_taught = torch.isin(labels[before.rows], classes)
            taught, others = is_taught & ~is_marked, ~is_taught
            rows.append([*_scores(before, after, taught), *_scores(before, after, others), spent])
        m = np.nanmean(rows, axis=0)
        print(
            f"{queries} queries × {count}, {wrong:.0%} wrong: taught classes R@1 {m[0]:.1f} → "
            f"{m[1]:.1f}, MAP@R {m[2]:.1f} → {m[3]:.1f}; others {m[4]:.2f} → {m[5]:.2f}, "
            f"{m[6]:.2f} → {m[7]:.2f}; {m[8]:.2f} s",
            flush=True,
        )


def _scores(before: PerQuery, after: PerQuery, rows: Tensor) -> list[float]:
    pairs = ((before.recall1, after.recall1), (before.map_at_r, after.map_at_r))
    return [100 * float(scores[rows].mean()) for pair in pairs for scores in pair]


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(float, sys.argv[2:]))
