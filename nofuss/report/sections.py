"""The report's sections on the run itself: scores, training, map, bounds, data, settings.

Each function returns the values that the macro of the same name in report.html shows, or None
where the run has nothing to show there.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from nofuss.data.collection import Collection, Labels
from nofuss.proxies.bounds import proxy_bounds
from nofuss.ranking.open_set import OpenSet
from nofuss.ranking.rerank import Rerank
from nofuss.report import figures
from nofuss.report.projection import project
from nofuss.run.choice import Choice
from nofuss.run.embeddings import RunEmbeddings, sample_by_class

Section = dict[str, Any]
ON_MAP = 500
"""Items of each side on the map: t-SNE takes seconds then."""
_SCORES = {"map@r": "MAP@R", "r_precision": "R-precision", "nmi": "NMI", "ami": "AMI"}
_SCORES |= {"ordered": "in the right order"}
_CAPTIONS = {
    "recall@1": "Recall@1 with 95% intervals over classes",
    "ordered": "Comparisons in the right order, with 95% intervals over groups of linked items",
}
"""The score that is drawn, the first that a run has → the words below it."""
_SPLIT = {"train": "trained on", "val": "validation", "test": "test"}


def scores(stored: dict[str, Any]) -> Section | None:
    """Compare the run with what needs no training."""
    main = next((name for name in _CAPTIONS if name in stored), None)
    if main is None:
        return None
    name = stored.get("method", "this run")
    reranked = {f"{name}, re-ranked": stored["reranked"]} if "reranked" in stored else {}
    methods = {name: stored} | reranked | stored.get("baselines", {})
    points = [
        (name, of[main], of.get(f"{main}_interval")) for name, of in methods.items() if main in of
    ]
    return {
        "methods": list(methods),
        "rows": _score_rows(methods),
        "chart": figures.score_chart(points),
        "caption": _CAPTIONS[main],
        "protocol": stored.get("protocol", ""),
    }


def _score_rows(methods: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a row for each score with a cell for each method; the highest is marked as best."""
    first = next(iter(methods.values()))
    recalls = [k for k in first if k.startswith("recall@") and not k.endswith("_interval")]
    rows = []
    for key in [*recalls, *(k for k in _SCORES if k in first)]:
        best = max(of[key] for of in methods.values() if of.get(key) is not None)
        cells = [
            {
                "value": of.get(key),
                "interval": of.get(f"{key}_interval"),
                "best": of.get(key) == best,
            }
            for of in methods.values()
        ]
        rows.append({"name": _SCORES.get(key, key.replace("recall", "Recall")), "cells": cells})
    return rows


def choice(stored: dict[str, Any]) -> Section | None:
    """Tell what was kept of the features, and why."""
    if not stored.get("scores"):
        return None
    chosen = Choice.from_dict(stored)
    return {
        "reason": chosen.reason(),
        "classes": chosen.classes,
        "folds": chosen.folds,
    }


def search(extra: Mapping[str, Any]) -> Section | None:
    """Tell how the run searches: whether it re-ranks, and how it recognises unknown classes."""
    kinds = (("rerank", Rerank), ("open_set", OpenSet))
    lines = [kind.from_dict(extra[name]).describe() for name, kind in kinds if extra.get(name)]
    return {"lines": lines} if lines else None


def training(metrics: list[dict[str, Any]]) -> Section | None:
    """Draw the loss and Recall@1 on held-out training classes, epoch by epoch."""
    charts = []
    losses = [row["loss"] for row in metrics if np.isfinite(row.get("loss", np.nan))]
    if losses:
        charts.append(figures.curve(losses, title="Loss"))
    recall = [r for row in metrics if np.isfinite(r := row.get("held_out_recall@1", np.nan))]
    if recall:
        title = "Recall@1 on held-out training classes"
        charts.append(figures.curve(recall, title=title, percent=True))
    return {"charts": charts} if charts else None


def embedding_map(collection: Collection, kept: RunEmbeddings, *, seed: int) -> Section | None:
    """Draw both sides on one plane, twice: training items with proxies, and test items."""
    labels = _classes(collection)
    chosen = [
        sample_by_class(labels[rows], items=ON_MAP, per_class=25, seed=seed)
        for rows in (kept.sample_rows, kept.test_rows[:0] if kept.seen else kept.test_rows)
    ]
    seen, new = chosen
    items = len(seen) + len(new)
    if items < 3:
        return None
    used = np.unique(kept.assignment[seen]) if len(kept.proxies) else np.empty(0, np.int64)
    vectors = [kept.sample[seen], kept.test[new], kept.proxies[used]]
    places = project(np.concatenate(vectors), seed=seed)
    classes = labels[np.r_[kept.sample_rows[seen], kept.test_rows[new]]]
    # A proxy has the class of any item that is assigned to it.
    first = [classes[: len(seen)][kept.assignment[seen] == p][0] for p in used]
    proxy_classes = np.array(first, dtype=np.int64)
    is_training, names = np.arange(items) < len(seen), collection.class_names
    panels = [
        figures.map_panel(
            places[:items],
            is_training,
            classes,
            names,
            title="Training classes and their proxies ★" if len(used) else "Training classes",
            stars=places[items:],
            star_labels=proxy_classes,
        )
    ]
    if len(new) and not kept.seen:
        title = "Test classes, never seen"
        panels.append(figures.map_panel(places[:items], ~is_training, classes, names, title=title))
    return {"panels": panels, "shown": items, "proxies": len(used)}


def _classes(collection: Collection) -> Labels:
    """Return the class of each item; −1 for all where labels are groups, which have no names."""
    return collection.labels if collection.has_classes else np.full_like(collection.labels, -1)


def bounds(collection: Collection, kept: RunEmbeddings) -> Section | None:
    """Evaluate ε and the paper's inequalities on the training sample."""
    if not len(kept.proxies) or not collection.has_classes:
        return None
    labels = collection.labels[kept.sample_rows]
    sizes = np.unique(labels, return_counts=True)[1]
    if len(sizes) < 2 or sizes.max() < 2:
        return None
    # scale = 2·N_x·N_p; the propositions need N_x·N_p ≥ 1. Free norms are rescaled to the unit
    # sphere, as in the paper.
    norm = 1.0 if kept.scale is None else max(1.0, float(np.sqrt(kept.scale / 2)))
    evaluated = proxy_bounds(
        kept.sample,
        labels,
        kept.proxies,
        kept.assignment,
        norm_x=norm,
        norm_p=norm,
        max_triplets=200_000,
    )
    return {"bounds": evaluated, "shown": len(labels), "classes": len(sizes)}


def data(collection: Collection, stored: dict[str, Any]) -> Section:
    """Describe the data and its sides."""
    classes, sizes = stored.get("classes", {}), None
    if collection.has_classes:
        sizes = figures.class_sizes(np.bincount(collection.known_labels()))
    return {
        "description": stored.get("description", ""),
        "kind": "groups" if stored.get("by_links") else "classes",
        "sides": [
            {"name": _SPLIT.get(side, side), "size": size, "classes": len(classes.get(side, ()))}
            for side, size in stored.get("items", {}).items()
        ],
        "notes": collection.notes,
        "class_sizes": sizes,
    }


def settings(config: dict[str, Any], environment: dict[str, Any]) -> Section:
    """List what is needed to train the run again."""
    machine = {k: v for k, v in environment.items() if k not in ("command", "versions")}
    return {
        "command": environment.get("command", ""),
        "config": config,
        "environment": machine | environment.get("versions", {}),
    }
