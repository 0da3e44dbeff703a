"""The report's sections on the run itself: scores, training, map, bounds, data, settings."""

from typing import Any
from xml.etree.ElementTree import Element

import numpy as np

from nofuss.data.collection import Collection
from nofuss.proxies.bounds import proxy_bounds
from nofuss.report import figures
from nofuss.report import score_tables as tables
from nofuss.report.charts import line_chart
from nofuss.report.html import Child, tag
from nofuss.report.projection import project
from nofuss.run.choice import NOTHING, Choice
from nofuss.run.embeddings import RunEmbeddings, sample_by_class

ON_MAP = 500
"""Items of each side on the map: t-SNE takes seconds then."""


def section(title: str, *content: Child) -> Element:
    """A heading that can be linked to, and what is below it."""
    return tag("section", tag("h2", title), content, id=title.lower().replace(" ", "-"))


def soft(words: str) -> Element:
    """A paragraph of explanation."""
    return tag("p", words, class_="soft")


def scores(found: dict[str, Any]) -> Element | None:
    """The run beside what needed no training."""
    if "recall@1" not in found:
        return None
    methods = {found.get("method", "this run"): found} | found.get("baselines", {})
    chart = [
        (name, of["recall@1"], of.get("recall@1_interval"))
        for name, of in methods.items()
        if "recall@1" in of
    ]
    caption = tag("figcaption", "Recall@1 with 95% intervals over classes")
    return section(
        "Scores on unseen classes",
        tag(
            "div",
            tables.score_table(methods),
            tag("figure", figures.score_chart(chart), caption),
            class_="pair",
        ),
        soft(found.get("protocol", "")),
    )


def choice(found: dict[str, Any]) -> Element | None:
    """What was kept, and how training went on held-out classes."""
    if not found.get("scores"):
        return None
    chosen = Choice.from_dict(found)
    untrained = chosen.scores[NOTHING]
    charts = [
        line_chart(
            [("this run", [(point[0], point[i], None, None) for point in chosen.curve])],
            title=f"{label} on held-out training classes",
            x_label="epoch; 0 is the closed form",
            levels=[("untrained features", untrained[name])],
        )
        for i, (name, label) in enumerate((("recall@1", "Recall@1"), ("map@r", "MAP@R")), start=1)
        if len(chosen.curve) > 1
    ]
    words = (
        f"Each of {chosen.classes:,} training classes was held out in one of {chosen.folds} folds; "
        "its settings come from the other folds alone, and none of its models has seen it."
    )
    return section(
        "Choice",
        tag("p", chosen.reason()[0].upper() + chosen.reason()[1:] + "."),
        tag("div", [tag("figure", chart) for chart in charts], class_="pair") if charts else None,
        soft(words),
    )


def curves(metrics: list[dict[str, Any]]) -> Element | None:
    """Loss and Recall@1 on held-out training classes, epoch by epoch."""
    charts = []
    losses = [row["loss"] for row in metrics if np.isfinite(row.get("loss", np.nan))]
    if losses:
        charts.append(figures.curve(losses, title="Loss"))
    recall = [r for row in metrics if np.isfinite(r := row.get("held_out_recall@1", np.nan))]
    if recall:
        title = "Recall@1 on held-out training classes"
        charts.append(figures.curve(recall, title=title, percent=True))
    if not charts:
        return None
    return section(
        "Training", tag("div", [tag("figure", chart) for chart in charts], class_="pair")
    )


def embedding_map(collection: Collection, kept: RunEmbeddings, *, seed: int) -> Element | None:
    """Both sides on one plane, shown twice: training items with proxies, and test items."""
    labels = collection.labels
    chosen = [
        sample_by_class(
            None if labels is None else labels[rows],
            len(rows),
            items=ON_MAP,
            per_class=25,
            seed=seed,
        )
        for rows in (kept.sample_rows, kept.test_rows[:0] if kept.seen else kept.test_rows)
    ]
    seen, new = chosen
    items = len(seen) + len(new)
    if items < 3:
        return None
    used = np.unique(kept.assignment[seen]) if len(kept.proxies) else np.empty(0, np.int64)
    vectors = [kept.sample[seen], kept.test[new], kept.proxies[used]]
    places = project(np.concatenate(vectors), seed=seed)
    classes, star_classes = np.full(items, -1), np.full(len(used), -1)
    if labels is not None:
        classes = labels[np.r_[kept.sample_rows[seen], kept.test_rows[new]]]
        own = [classes[: len(seen)][kept.assignment[seen] == p][0] for p in used]
        star_classes = np.array(own, dtype=np.int64)
    left, names = np.arange(items) < len(seen), collection.class_names
    panels = [
        figures.map_panel(
            places[:items],
            left,
            classes,
            names,
            title="Training classes and their proxies ★" if len(used) else "Training classes",
            stars=places[items:],
            star_labels=star_classes,
        )
    ]
    if len(new) and not kept.seen:
        title = "Test classes, never seen"
        panels.append(figures.map_panel(places[:items], ~left, classes, names, title=title))
    words = (
        f"{items:,} items and {len(used):,} proxies by t-SNE: neighbours stay neighbours, "
        "distances mean little. Both panels are the same map; some of the classes are named."
    )
    return section(
        "Map", soft(words), tag("div", [tag("figure", panel) for panel in panels], class_="pair")
    )


def bounds(collection: Collection, kept: RunEmbeddings) -> Element | None:
    """ε and the paper's inequalities on the training sample."""
    if not len(kept.proxies) or collection.labels is None:
        return None
    labels = collection.labels[kept.sample_rows]
    sizes = np.unique(labels, return_counts=True)[1]
    if len(sizes) < 2 or sizes.max() < 2:
        return None
    # The propositions need N_x·N_p ≥ 1; ε itself does not depend on the norms.
    norm = 3.0 if kept.scale is None else max(1.0, float(np.sqrt(kept.scale / 2)))
    found = proxy_bounds(
        kept.sample,
        labels,
        kept.proxies,
        kept.assignment,
        norm_x=norm,
        norm_p=norm,
        max_triplets=200_000,
    )
    epsilon = (
        f"ε = max |x − p(x)|² is {found.epsilon:.3f} over {len(labels):,} training items of "
        f"{len(sizes):,} classes; its mean is {found.epsilon_mean:.3f}, and 95% lie below "
        f"{found.epsilon_95:.3f}."
    )
    words = (
        "How well a loss over proxies bounds the loss over instances, on the unit sphere. The "
        "constants are corrected: the paper prints 2√(2ε) for Proposition 4.1, where its proof "
        "gives 2√ε, and 2√ε for Proposition 4.2, where it gives 4√ε."
    )
    return section("Bounds", tag("p", epsilon), tables.bound_table(found), soft(words))


def data(collection: Collection, described: dict[str, Any]) -> Element:
    """What went in."""
    sizes = None
    if collection.labels is not None:
        caption = tag("figcaption", "Classes by their number of items, all sides")
        sizes = tag("figure", figures.class_sizes(np.bincount(collection.labels)), caption)
    sides = tables.side_table(described.get("items", {}), described.get("classes", {}))
    notes = [tag("p", note) for note in collection.notes]
    return section(
        "Data",
        tag("p", described.get("description", "")),
        tag("div", tag("div", sides, notes), sizes, class_="pair"),
    )


def settings(config: dict[str, Any], environment: dict[str, Any]) -> Element:
    """How to do it again."""
    machine = {k: v for k, v in environment.items() if k not in ("command", "versions")}
    return section(
        "Settings",
        tag("pre", tag("code", environment.get("command", ""))),
        tables.settings(config),
        tag("h3", "Environment"),
        tables.settings(machine | environment.get("versions", {})),
    )
