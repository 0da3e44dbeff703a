"""Re-ranking and the open-set decision on the test classes of runs, and what a query costs.

    nofuss train FOLDER --test-fraction 0.5 --seed S --out RUN
    python -m benchmarks.ranking RUN …

What a run does was decided on folds of its training classes (marked *); here it is scored once on
the test classes, beside what was not chosen. Every query is outside of what it searches.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median

import numpy as np
from torch import Tensor

from benchmarks.marks import unseen
from nofuss.commands import console
from nofuss.model.embedder import build_embedder
from nofuss.model.encoder import Encoder, load
from nofuss.ranking.open_set import RULES, OpenSet, calibrate
from nofuss.ranking.rerank import CANDIDATES, Rerank, reranked_scores, summary
from nofuss.search import Index
from nofuss.search.search import search


def show(path: Path) -> None:
    """Print the tables of a run."""
    extra, (vectors, classes) = load(path).extra, unseen(path)
    labels = classes.numpy()
    rerank = Rerank.from_dict(extra["rerank"])
    open_set = OpenSet.from_dict(extra["open_set"])
    show_ranking(f"{path}: the order", vectors, labels, rerank)
    show_open_set(f"{path}: open set", vectors, labels, open_set)
    show_cost(f"{path}: a query", vectors, labels, rerank, open_set)


def show_ranking(title: str, vectors: Tensor, labels: np.ndarray, chosen: Rerank) -> None:
    """Print scores of every candidate, with gains over the order by distance."""
    plain, *others = reranked_scores(vectors, labels, (None, *CANDIDATES))
    names = ("recall@1", "recall@8", "map@r")
    means = [*plain.hits[:, [0, 3]].mean(0).tolist(), float(plain.map_at_r.mean())]
    rows = [["by distance", *_percent(means), ""]]
    for weighting, scores in zip(CANDIDATES, others, strict=True):
        found = summary(scores, plain)
        mark = "*" if weighting == chosen.weighting else ""
        gain = ", ".join(
            f"{100 * mean:+.2f} ({100 * low:+.2f} to {100 * high:+.2f})"
            for mean, low, high in (found["gain"][name] for name in ("recall@1", "map@r"))
        )
        name = f"{mark}{weighting.neighbours} neighbours, power {weighting.power:g}"
        rows.append([name, *_percent([found[n] for n in names]), gain])
    console.table(title, ["%", "Recall@1", "Recall@8", "MAP@R", "Recall@1 and MAP@R, 95%"], rows)


def show_open_set(title: str, vectors: Tensor, labels: np.ndarray, chosen: OpenSet) -> None:
    """Print AUROC and the fraction of unknown items that is rejected by every rule."""
    rows = []
    for rule in RULES:
        found = calibrate(vectors, labels, replace(chosen, rule=rule))
        if found is not None:
            mark = "*" if rule == chosen.rule else ""
            figures = [found.auroc, 100 * found.rejected, 100 * found.false_rejections]
            rows.append([mark + rule, *(f"{value:.2f}" for value in figures)])
    console.table(title, ["", "AUROC", "rejected, %", "false rejections, %"], rows)


def show_cost(
    title: str, vectors: Tensor, labels: np.ndarray, rerank: Rerank, open_set: OpenSet
) -> None:
    """Print the median processor time of single queries."""
    names = [str(i) for i in range(len(vectors))]
    index = Index.build(vectors, names=names, labels=[str(label) for label in labels])
    index.about = index.about._replace(relatives=None, open_set=open_set)
    embedder = build_embedder(
        "identity", dim=vectors.shape[1], channels=vectors.shape[1], weights=None
    )
    encoder = Encoder(embedder, extra={"rerank": rerank.as_dict()})
    kinds: dict[str, Callable[[Tensor], object]] = {
        "the 10 nearest": lambda query: index.search(query[None], 10),
        "judged": lambda query: search(index, encoder, query, 10, rerank=False),
        "re-ranked and judged": lambda query: search(index, encoder, query, 10),
    }
    rows = []
    for name, work in kinds.items():
        seconds = []
        for query in vectors[:: max(1, len(vectors) // 100)]:
            began = time.process_time()
            work(query)
            seconds.append(time.process_time() - began)
        rows.append([name, f"{1000 * median(seconds):.2f}"])
    console.table(
        f"{title} among {len(vectors):,} × {vectors.shape[1]}", ["", "ms of a core"], rows
    )


def _percent(values: list[float]) -> list[str]:
    return [f"{100 * value:.2f}" for value in values]


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN")
    for path in parser.parse_args().runs:
        show(path)


if __name__ == "__main__":
    main()
