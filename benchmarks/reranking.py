"""Re-ranking: what new classes gain by it, and what the folds of training classes announce.

    OMP_NUM_THREADS=1 python -m benchmarks.reranking FOLDER …

The head is fitted to half of the classes by the defaults, and the other half is searched, each item
among all others of it: the official split, or three random ones.
"""

import argparse
from pathlib import Path

from benchmarks.worth import Task, fitted, tasks
from nofuss.commands import console
from nofuss.evaluate.protocol import KS
from nofuss.ranking.rerank import RerankedScores, choose_reranking, reranked_scores


def rows(t: Task) -> list[list[str]]:
    """Return the scores of a task in both orders, and what its folds say."""
    fit = fitted(t.x, t.y)
    labels = [t.y[outcome.rows] for outcome in fit.outcomes]
    decided = choose_reranking(fit.held_out(), labels)
    found = reranked_scores(fit.embed(t.test_x), t.test_y)
    announced = points(decided.gain) if decided is not None else "too few classes"
    is_on = decided is not None and decided.on
    after = "re-ranked" if is_on else "(off) re-ranked"
    return [
        [f"{t.name}, by distance", *cells(found.before), ""],
        [after, *cells(found.after), points(found.gain())],
        ["as folds announce", *[""] * len(KS), "", announced],
    ]


def cells(scores: RerankedScores) -> list[str]:
    """Return Recall@K and MAP@R in percent."""
    values = [*scores.hits.mean(0).tolist(), float(scores.map_at_r.mean())]
    return [f"{100 * value:.2f}" for value in values]


def points(gain: list[float]) -> str:
    """Return a difference in points with its interval."""
    mean, low, high = (100 * value for value in gain)
    return f"{mean:+.2f} ({low:+.2f} to {high:+.2f})"


def main() -> None:
    """Read the command line and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", nargs="+", type=Path, metavar="FOLDER")
    columns = ["%", *(f"R@{k}" for k in KS), "MAP@R", "gain in MAP@R, 95%"]
    found = [row for path in parser.parse_args().data for t in tasks(path, 3) for row in rows(t)]
    console.table("re-ranking", columns, found)


if __name__ == "__main__":
    main()
