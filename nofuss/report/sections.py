"""The sections of the report: scores, choice, training, neighbours, suspects, map, data, settings.

Each function returns the values that the macro of the same name in report.html shows, or None
where the run has nothing to show there. All of it is plain data but for the drawings.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nofuss.config import read_as
from nofuss.data.collection import Collection
from nofuss.data.decode import data_uri, encoded, shrunk_item
from nofuss.evaluate.findings import DoubtfulLabel, Neighbours, confusions, project
from nofuss.evaluate.protocol import compared, describe_gain, headline, score_title
from nofuss.files import csv_text
from nofuss.model.backbones import LICENCES
from nofuss.proxies.bounds import proxy_bounds
from nofuss.ranking.rerank import Rerank
from nofuss.report import figures
from nofuss.run.choice import Choice, Networks
from nofuss.run.proxies import RunEmbeddings, sample_by_class

Section = dict[str, Any]
Rows = NDArray[np.int64]
Groups = Sequence[Sequence[int]]
"""Rows of the data that are duplicates of each other."""

NEIGHBOURS = 8
"""Neighbours that are shown beside a query."""
FIRST = {"Random queries": 3, "Worst": 2}
"""Queries that the report opens with; the others fold open."""
CARDS = 12
"""Suspects of a kind that the page shows; suspects.csv lists all."""
SIDE = 112
"""Longest side of a thumbnail; more than the page shows, for dense screens."""
ON_MAP = 500
"""Items of each split on the map: t-SNE takes seconds then."""
_CAPTIONS = {
    "recall@1": "Recall@1 in %, with 95% intervals over classes",
    "ordered": "Comparisons in the right order in %, with 95% intervals over linked groups",
}
"""The score that is drawn, the first that a run has → the words below it."""
_CURVES = {"loss": "Loss", "held_out_recall@1": "Recall@1 on held-out training classes"}
_SPLIT = {"train": "trained on", "val": "validation", "test": "test"}


# What was learned


def scores(stored: dict[str, Any], preset: object) -> Section | None:
    """Compare the run with what needs no training."""
    main = next((name for name in _CAPTIONS if name in stored), None)
    if main is None:
        return None
    name, gain, by_class = stored.get("method", "this run"), stored.get("gain"), main == "recall@1"
    reranked = {f"{name}, re-ranked": stored["reranked"]} if "reranked" in stored else {}
    methods = {name: stored} | reranked | stored.get("baselines", {})
    points = [
        (name, of[main], of.get(f"{main}_interval")) for name, of in methods.items() if main in of
    ]
    return {
        "sentence": re.split(r"(\d+ of 100)", headline(stored, preset), maxsplit=1),
        "interval": stored.get(f"{main}_interval"),
        "gain": gain and describe_gain(gain),
        "over": gain and gain["over"],
        "verdict": gain and _verdict(gain),
        "compared": None if by_class else compared(stored),
        "queries": stored["queries"] if by_class else None,
        "classes": stored["classes"] if by_class else None,
        "folds": folds if type(folds := stored.get("folds")) is int else 0,
        "methods": list(methods),
        "rows": _score_rows(methods),
        "chart": figures.score_chart(points, _CAPTIONS[main]),
        "caption": _CAPTIONS[main],
        "protocol": stored.get("protocol", ""),
    }


def _verdict(gain: dict[str, Any]) -> str:
    """Return whether learning was worth it, by the 95% intervals of all paired differences."""
    differences = [gain[name] for name in ("recall@1", "map@r", "ordered") if name in gain]
    low = min(difference[1] for difference in differences)
    high = max(difference[2] for difference in differences)
    if low == high == 0:  # the untrained features were kept
        return "made no difference"
    if low >= 0 and any(difference[1] > 0 for difference in differences):
        return "paid off"
    if high <= 0 and any(difference[2] < 0 for difference in differences):
        return "made it worse"
    return "made little difference"


def _score_rows(methods: Mapping[str, Mapping[str, Any]]) -> list[Section]:
    """Return a row for each score with a cell for each method; the highest is marked as best."""
    first, rows = next(iter(methods.values())), []
    for key in [name for name, value in first.items() if isinstance(value, float)]:
        best = max(of[key] for of in methods.values() if key in of)
        cells = [
            {
                "value": of.get(key),
                "interval": of.get(f"{key}_interval"),
                "best": of.get(key) == best,
            }
            for of in methods.values()
        ]
        rows.append({"name": score_title(key), "cells": cells})
    return rows


def choices(stored: dict[str, Any], extra: Mapping[str, Any]) -> Section | None:
    """Tell what held-out training classes decided: networks, head, whether search re-ranks."""
    head, several, rules = stored.get("choice", {}), stored.get("networks"), list[str]()
    networks = read_as(Networks, several) if several else None
    chosen = read_as(Choice, head) if head.get("scores") else None
    if networks:
        rules.append(networks.describe())
    if chosen:
        rules.append(chosen.reason())
    if rerank := extra.get("rerank"):
        rules.append(read_as(Rerank, rerank).describe())
    return {"rules": rules, "chosen": chosen, "networks": networks} if rules else None


def training(metrics: list[dict[str, Any]]) -> Section | None:
    """Draw the loss and Recall@1 on held-out training classes, epoch by epoch."""
    charts = []
    for key, title in _CURVES.items():
        values = [float(v) for row in metrics if np.isfinite(v := row.get(key, np.nan))]
        if values:
            percent = key != "loss"
            last = f"{100 * values[-1]:.1f}" if percent else f"{values[-1]:.3g}"
            points = [(epoch, value, None, None) for epoch, value in enumerate(values, start=1)]
            charts.append(
                figures.line_chart([(last, points)], title=title, x_label="epoch", percent=percent)
            )
    return {"charts": charts} if charts else None


# Items and their neighbours


class Items:
    """The items that a section is about: positions in the embeddings → rows of the data."""

    def __init__(self, collection: Collection, rows: Rows) -> None:
        self.collection, self.rows = collection, rows
        self.labels: Rows = collection.labels[rows]

    def name(self, position: int) -> str:
        """Return the item's name."""
        return self.collection.names[int(self.rows[position])]

    def file(self, position: int) -> str:
        """Return the last part of the item's name."""
        return self.name(position).rpartition("/")[2]

    def label(self, position: int) -> str:
        """Return the name of the item's class; empty where it has none."""
        label = self.labels[position]
        return "" if label < 0 else self.collection.class_names[label]

    def thumbnail(self, position: int) -> Section:
        """Return the item's picture as the macro `image` shows it; no `src` if it can't be read."""
        image = shrunk_item(self.collection, int(self.rows[position]), side=SIDE)
        return {
            "src": None if image is None else data_uri(*encoded(image)),
            "label": self.label(position),
            "title": f"{self.label(position)} · {self.name(position)}",
            "pixelated": image is not None and max(image.size) <= 64,
        }

    def thumbnails(self, *positions: int) -> list[Section]:
        """Return the pictures of several items; none where the items are vectors."""
        return [self.thumbnail(p) for p in positions] if self.collection.has_pictures else []


def neighbours(items: Items, nearest: Neighbours, *, seed: int, tested: bool) -> Section | None:
    """Show queries with their nearest pictures; `tested` are those of classes never seen."""
    if not items.collection.has_pictures:
        return None
    groups = retrieval_grid(items, nearest, seed=seed)
    counts = [FIRST.get(group["title"], 0) for group in groups]
    return {
        "tested": tested,
        "first": [g | {"rows": g["rows"][:n]} for g, n in zip(groups, counts, strict=True)],
        "more": [g | {"rows": g["rows"][n:]} for g, n in zip(groups, counts, strict=True)],
    }


def retrieval_grid(items: Items, nearest: Neighbours, *, seed: int = 0) -> list[Section]:
    """Return the chosen queries with their neighbours, grouped by why they were chosen."""
    return [
        {"title": title, "rows": [_grid_row(items, nearest, int(row)) for row in rows]}
        for title, rows in choose_queries(nearest, items.labels, seed=seed).items()
        if len(rows)
    ]


def _grid_row(items: Items, nearest: Neighbours, row: int) -> Section:
    query = int(nearest.queries[row])
    found = zip(nearest.items[row, :NEIGHBOURS], nearest.distances[row, :NEIGHBOURS], strict=True)
    hits = [
        {
            "picture": items.thumbnail(int(item)),
            "distance": float(distance),
            "right": bool(items.labels[item] == items.labels[query]),
        }
        for item, distance in found
    ]
    return {"query": items.thumbnail(query), "hits": hits}


def choose_queries(nearest: Neighbours, labels: Rows, *, seed: int = 0) -> dict[str, Rows]:
    """Return rows of `nearest` to show: some at random, the best, the worst; one of a class."""
    own = labels[nearest.queries]
    right = labels[nearest.items[:, :NEIGHBOURS]] == own[:, None]  # (Q, K)
    positives = np.bincount(labels)[own] - 1
    order = np.random.default_rng(seed).permutation(len(own))
    order = order[positives[order] > 0]
    # Early hits count more, relative to the best score that the class's size allows. Equal scores
    # are ordered by distance: close neighbours make the better good example, and the more
    # surprising bad one.
    weight = 1 / np.arange(1, right.shape[1] + 1)
    possible = np.where(np.arange(right.shape[1]) < positives[:, None], weight, 0).sum(1)
    score = (right * weight).sum(1) / np.maximum(possible, 1e-9)
    distance = nearest.distances[:, :NEIGHBOURS].mean(1)
    best = order[np.lexsort((distance[order], -score[order]))]
    worst = order[np.lexsort((distance[order], score[order]))]
    return {
        "Random queries": _distinct(order, own, 6),
        "Best": _distinct(best, own, 4),
        "Worst": _distinct(worst, own, 6),
    }


def _distinct(order: Rows, labels: Rows, most: int) -> Rows:
    """Return the first rows of `order`, one of each class."""
    _, first = np.unique(labels[order], return_index=True)
    return order[np.sort(first)][:most]


def confused(items: Items, nearest: Neighbours) -> Section | None:
    """Show the classes whose items are each other's nearest neighbours."""
    names = items.collection.class_names
    pairs = [
        {
            "pictures": items.thumbnails(*confusion.example),
            "first": names[confusion.first],
            "second": names[confusion.second],
            "queries": confusion.queries,
            "fraction": confusion.fraction,
        }
        for confusion in confusions(nearest, items.labels)
    ]
    return {"pairs": pairs} if pairs else None


def suspects(items: Items, doubts: Sequence[DoubtfulLabel], duplicates: Groups) -> Section:
    """Show doubtful labels among the items, and duplicates in all of the data."""
    names, everything = items.collection.class_names, _everything(items.collection)
    return {
        "mislabelled_count": len(doubts),
        "mislabelled": [
            {
                "pictures": items.thumbnails(doubt.item, doubt.nearest),
                "label": names[doubt.label],
                "suggested": names[doubt.suggested],
                "file": items.file(doubt.item),
                "votes": doubt.votes,
            }
            for doubt in doubts[:CARDS]
        ],
        "duplicates_count": len(duplicates),
        "duplicates": [
            {
                "pictures": everything.thumbnails(*group[:2]),
                "labels": sorted({everything.label(row) for row in group}),
                "files": [everything.file(row) for row in group[:2]],
                "more": len(group) - 2,
            }
            for group in duplicates[:CARDS]
        ],
    }


def suspects_csv(items: Items, doubts: Sequence[DoubtfulLabel], duplicates: Groups) -> str:
    """Return all suspects as CSV; of duplicates no distance is known."""
    everything = _everything(items.collection)
    rows = [("kind", "item", "label", "other_item", "other_label", "distance")]
    for d in doubts:
        other = items.name(d.nearest), items.label(d.nearest), f"{d.distance:.4f}"
        rows.append(("label", items.name(d.item), items.label(d.item), *other))
    for first, *others in duplicates:
        pair = everything.name(first), everything.label(first)
        rows += [
            ("duplicate", *pair, everything.name(row), everything.label(row), "") for row in others
        ]
    return csv_text(rows)


def _everything(collection: Collection) -> Items:
    return Items(collection, np.arange(len(collection)))


# Embeddings, data and settings


def embedding_map(collection: Collection, shown: RunEmbeddings, *, seed: int) -> Section | None:
    """Draw training items with their proxies, and test items on the same plane."""
    proxies, labels = shown.proxies, collection.labels
    if not collection.has_classes:  # labels are groups, which have no names
        labels = np.full_like(labels, -1)
    seen, new = [
        sample_by_class(labels[rows], items=ON_MAP, per_class=25, seed=seed)
        for rows in (proxies.sample, shown.test_rows[:0] if shown.seen else shown.test_rows)
    ]
    items = len(seen) + len(new)
    if items < 3:
        return None
    used = np.unique(proxies.assignment[seen]) if len(proxies.proxies) else np.empty(0, np.int64)
    vectors = [shown.sample[seen], shown.test[new], proxies.proxies[used]]
    places = project(np.concatenate(vectors), seed=seed)
    classes = labels[np.r_[proxies.sample[seen], shown.test_rows[new]]]
    # A proxy has the class of any item that is assigned to it.
    first = [classes[: len(seen)][proxies.assignment[seen] == p][0] for p in used]
    is_training, names = np.arange(items) < len(seen), collection.class_names
    panels = [
        figures.map_panel(
            places[:items],
            is_training,
            classes,
            names,
            title="Training classes and their proxies ★" if len(used) else "Training classes",
            stars=places[items:],
            star_labels=np.array(first, dtype=np.int64),
        )
    ]
    if len(new):
        title = "Test classes, never seen"
        panels.append(figures.map_panel(places[:items], ~is_training, classes, names, title=title))
    return {"panels": panels, "shown": items, "proxies": len(used)}


def bounds(collection: Collection, shown: RunEmbeddings) -> Section | None:
    """Evaluate ε and the paper's inequalities on the training sample."""
    proxies = shown.proxies
    if not len(proxies.proxies) or not collection.has_classes:
        return None
    labels = collection.labels[proxies.sample]
    sizes = np.unique(labels, return_counts=True)[1]
    if len(sizes) < 2 or sizes.max() < 2:
        return None
    # scale = 2·N_x·N_p; the propositions need N_x·N_p ≥ 1. Free norms are rescaled to the unit
    # sphere, as in the paper.
    norm = 1.0 if proxies.scale is None else max(1.0, float(np.sqrt(proxies.scale / 2)))
    evaluated = proxy_bounds(
        shown.sample,
        labels,
        proxies.proxies,
        proxies.assignment,
        norm_x=norm,
        norm_p=norm,
        max_triplets=200_000,
    )
    return {"bounds": evaluated, "shown": len(labels), "classes": len(sizes)}


def data(collection: Collection, stored: dict[str, Any]) -> Section:
    """Describe the data and its split."""
    classes, sizes = stored.get("classes", {}), None
    if collection.has_classes:
        sizes = figures.size_chart(np.bincount(collection.known_labels()))
    return {
        "description": stored.get("description", ""),
        "kind": "groups" if stored.get("by_links") else "classes",
        "splits": [
            {"name": _SPLIT.get(name, name), "size": size, "classes": len(classes.get(name, ()))}
            for name, size in stored.get("items", {}).items()
        ],
        "notes": collection.notes,
        "class_sizes": sizes,
    }


def settings(
    config: dict[str, Any], environment: dict[str, Any], extra: Mapping[str, Any]
) -> Section:
    """List what is needed to train the run again, and the licences of the weights."""
    for name, words in extra.get(LICENCES, {}).items():
        config |= {f"licence of {name}": words}
    machine = {k: v for k, v in environment.items() if k not in ("command", "versions")}
    return {
        "command": environment.get("command", ""),
        "config": config,
        "environment": machine | environment.get("versions", {}),
    }
