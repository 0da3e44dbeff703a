"""How many wrong labels the report finds in small classes: `python -m benchmarks.doubts RUN`.

RUN: with classes kept out of training. Of these, a few with a few items each are drawn, a twentieth
of the labels is made wrong, and the rule says which labels it doubts.
"""

import sys
from pathlib import Path

import numpy as np

from benchmarks.marks import unseen
from nofuss.evaluate.findings import doubtful_labels
from nofuss.ranking.neighbours import neighbours

DRAWS = 40


def main(run: Path) -> None:
    """Print wrong labels found, of how many, and the precision."""
    vectors, truth = (each.numpy() for each in unseen(run))
    for classes in (4, 10, 50):
        for each in (4, 8, 12):
            found, right, wrong = 0, 0, 0
            for seed in range(DRAWS if classes < 50 else 5):
                random = np.random.default_rng(seed)
                chosen = random.permutation(np.unique(truth))[:classes]
                rows = np.concatenate(
                    [random.permutation(np.flatnonzero(truth == c))[:each] for c in chosen]
                )
                labels = np.unique(truth[rows], return_inverse=True)[1]
                bad = random.permutation(len(rows))[: max(1, len(rows) // 20)]
                labels[bad] += random.integers(1, classes, len(bad))
                labels %= classes
                near = neighbours(vectors[rows])
                doubted = {d.item for d in doubtful_labels(near, labels, most=len(rows))}
                found, wrong = found + len(doubted), wrong + len(bad)
                right += len(doubted & set(bad.tolist()))
            share = right / max(1, found)
            print(f"{classes} × {each}: {right} of {wrong}, precision {share:.2f}", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
