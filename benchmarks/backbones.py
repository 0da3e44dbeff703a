"""Several networks: what the one that folds choose finds among new classes, beside all others.

    python -m benchmarks.backbones FOLDER … [--networks NAME,NAME,…] [--no-mirror]
    python -m benchmarks.backbones --time

The closed form is fitted to half of the classes, the other half is searched: the official split, or
three random ones. Folds of the first half choose among each network alone and several side by
side; every combination is then scored on the second. Regret: Recall@1 + MAP@R that the best of
them, in hindsight, has more than the chosen one. Gains are over the first network, with 95%
intervals over classes, on the same queries. --time: choice and fit on made-up features of 10,000
items.
"""

import argparse
import time
from collections.abc import Mapping
from itertools import combinations
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.worth import Task, features_by, fitted, halves, task
from nofuss.commands import console
from nofuss.data.collection import Collection
from nofuss.data.open import open_data
from nofuss.evaluate.intervals import paired_difference
from nofuss.evaluate.protocol import QueryScores
from nofuss.model.backbones import build_backbone, joined
from nofuss.model.embedder import build_embedder, for_inference
from nofuss.model.features import multiplications
from nofuss.training.choose_networks import pick, try_networks
from nofuss.training.folds import class_folds, query_scores

NETWORKS = "efficientnet-lite0,efficientnet-lite1,efficientnet-lite2"
COLUMNS = ["%", "networks", "R@1", "MAP@R", "gain in R@1, 95%", "in MAP@R, 95%", "regret"]
WIDTHS = (1280, 1280, 1280)


def rows(path: Path, names: list[str], *, mirror: bool) -> list[list[str]]:
    """Return the scores of networks and of all their combinations on each split of a collection."""
    pictures = open_data(path)
    found = {name: features_by(name, pictures, mirror=mirror) for name in names}
    work = [
        multiplications(for_inference(build_embedder(build_backbone(n))).backbone) for n in names
    ]
    return compared(pictures, found, work)


def compared(pictures: Collection, found: Mapping[str, Tensor], work: list[int]) -> list[list[str]]:
    """Return the scores of all combinations of features on each split, and which folds choose.

    found: name → features (N, F). work: what a picture costs each of them.
    """
    names, features, labels = [*found], [*found.values()], torch.from_numpy(pictures.labels)
    table = []
    for seed, train in enumerate(halves(pictures, 3)):
        tasks = [task(pictures.name, x, labels, train) for x in features]
        y = tasks[0].y
        tried = try_networks([t.x for t in tasks], y, class_folds(y))
        best = pick(tried, work)
        scores = {
            chosen: scored([tasks[i] for i in chosen])
            for size in range(1, len(names) + 1)
            for chosen in combinations(range(len(names)), size)
        }
        most = max(map(total, scores.values()))
        for chosen, theirs in scores.items():
            mark = " ← chosen" if chosen == best else ""
            name = " + ".join(names[i].removeprefix("efficientnet-") for i in chosen) + mark
            regret = f"{100 * (most - total(theirs)):.2f}"
            table.append([f"{pictures.name} {seed}", name, *cells(theirs, scores[0,]), regret])
    return table


def scored(tasks: list[Task]) -> QueryScores:
    """Fit the head to the networks' features side by side, as training does, and score it."""
    t = tasks[0]
    x, test = joined([each.x for each in tasks]), joined([each.test_x for each in tasks])
    return query_scores(fitted(x, t.y).embed(test), t.test_y)


def total(scores: QueryScores) -> float:
    """Return Recall@1 + MAP@R."""
    return 2 * float(scores.objective.mean())


def cells(scores: QueryScores, first: QueryScores) -> list[str]:
    """Return both scores in percent and what they gain over those of the first network."""
    cells = [f"{100 * float(s.mean()):.2f}" for s in (scores.recall, scores.map_at_r)]
    for ours, theirs in ((scores.recall, first.recall), (scores.map_at_r, first.map_at_r)):
        mean, low, high = paired_difference(ours, theirs, scores.labels)
        cells.append(f"{100 * mean:+.2f} ({100 * low:+.2f} to {100 * high:+.2f})")
    return cells


def timed() -> list[list[str]]:
    """Return the time of the choice on 10,000 items, and of the fit to all networks after it."""
    random = torch.Generator().manual_seed(0)
    labels = torch.arange(500).repeat_interleave(20)
    features = []
    for width in WIDTHS:
        means = torch.randn(500, width, generator=random)
        features.append((means[labels] + 3 * torch.randn(10_000, width, generator=random)).relu())
    wall, spent = time.perf_counter(), time.process_time()
    tried = try_networks(features, labels, class_folds(labels))
    choice = [time.perf_counter() - wall, time.process_time() - spent]
    wall, spent = time.perf_counter(), time.process_time()
    fitted(joined(features), labels)
    fit = [time.perf_counter() - wall, time.process_time() - spent]
    return [
        [f"choice among {len(tried)}", *(f"{s:.1f}" for s in choice)],
        [f"head of all side by side, {sum(WIDTHS):,}", *(f"{s:.1f}" for s in fit)],
    ]


def main() -> None:
    """Read the command line and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", nargs="*", type=Path, metavar="FOLDER")
    parser.add_argument("--networks", default=NETWORKS)
    parser.add_argument("--no-mirror", action="store_true", help="without mirror images")
    parser.add_argument("--time", action="store_true")
    asked = parser.parse_args()
    if asked.time:
        console.table("10,000 items", ["", "seconds", "CPU s"], timed())
    names = asked.networks.split(",")
    for path in asked.data:
        console.table("unseen classes", COLUMNS, rows(path, names, mirror=not asked.no_mirror))


if __name__ == "__main__":
    main()
