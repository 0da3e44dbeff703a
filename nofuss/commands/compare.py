"""`nofuss compare`: whether one run finds more than another, on the same items, with intervals."""

import io
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from torch import Tensor
from tyro.conf import Positional, arg

from nofuss.commands import DeviceName, check_new_png
from nofuss.config import TrainConfig, to_json
from nofuss.data.collection import Collection
from nofuss.data.usable import open_usable
from nofuss.errors import DataError, RunError, UsageError
from nofuss.evaluate.intervals import SeededDifference, paired_difference, t_interval
from nofuss.evaluate.queries import PerQuery, per_query
from nofuss.evaluate.side_by_side import scorable
from nofuss.files.atomic import write_file
from nofuss.model.encoder import load
from nofuss.run.directory import Run, check_same_data, open_run
from nofuss.run.embeddings import load_embeddings
from nofuss.terminal import console

SCORES = {"recall@1": "Recall@1", "map@r": "MAP@R"}


@dataclass(frozen=True)
class Method:
    """Runs with equal settings but for the seed, and the scores of their queries."""

    name: str
    runs: list[str]
    queries: list[PerQuery]

    def scores(self, score: str) -> list[Tensor]:
        """Return the score of each query, (Q,), for each run."""
        return [each.recall1 if score == "recall@1" else each.map_at_r for each in self.queries]


def main(
    runs: Annotated[tuple[Path, ...], Positional, arg(metavar="RUN")],
    *,
    data: Annotated[
        Path | None,
        arg(metavar="DATA", help_behavior_hint="(default: the test classes of the runs)"),
    ] = None,
    seed: int = 0,
    json: bool = False,
    figure: Annotated[Path | None, arg(metavar="FILE.png", help_behavior_hint="")] = None,
    device: DeviceName = "auto",
) -> None:
    """Compare runs on the same items: differences to the first run, with 95% intervals.

    Runs whose settings differ in the seed alone are one method; its scores are averaged. A
    difference counts only if its intervals over classes and, where there are seeds, over seeds
    exclude zero.

    Args:
        runs: Two or more run directories of `nofuss train`.
        data: Compare on all of these data instead, in any layout that `nofuss train` reads.
        seed: Seed for the bootstrap over classes.
        json: Print the comparison as JSON instead of a table.
        figure: Also draw the differences with their intervals. Never overwritten.
        device: Where to compute, as for `nofuss train`.
    """
    if len(runs) < 2:
        raise UsageError(f"got {len(runs)} run; give two or more to compare")
    if figure is not None:
        check_new_png("--figure", figure)
    opened = [open_run(path) for path in runs]
    groups = _same_but_for_the_seed(opened)
    if len(groups) < 2:
        raise UsageError("the runs differ in their seed alone, so there is nothing to compare")
    if data is None:
        queries, what = _on_test_classes(opened), "their test classes"
    else:
        queries, what = _on_data(runs, data, device, quiet=json), str(data)
    methods = [
        Method(name, [str(runs[i]) for i in rows], [queries[i] for i in rows])
        for name, rows in groups.items()
    ]
    found = _compare(methods, seed=seed)
    if json:
        console.answer({"data": what, "queries": len(queries[0].rows), "methods": found})
    else:
        _show(found, what, queries[0])
    if figure is not None:
        write_file(figure, _drawn(found))
        if not json:
            console.say(f"differences as a picture: {figure}")


def _on_test_classes(runs: Sequence[Run]) -> list[PerQuery]:
    """Score the embeddings that the runs kept of their test classes, which must be the same."""
    kept = []
    for run in runs:
        found = load_embeddings(run.path)
        if found is None or found.seen or not len(found.test):
            raise RunError(f"{run.path} has no test classes of its own; add --data DATA")
        kept.append(found)
        same = found.fingerprint == kept[0].fingerprint
        if not same or not np.array_equal(found.test_rows, kept[0].test_rows):
            raise RunError(
                f"{run.path} was tested on other items than {runs[0].path}; train with the same "
                "data and --test-share, or add --data DATA"
            )
    collection, _ = open_usable(
        runs[0].config.data, corrections=runs[0].corrections, say=lambda _: None
    )
    cure = "restore them, or add --data DATA"
    check_same_data(runs[0].path, collection.fingerprint(), cure=cure)
    labels = np.asarray(collection.labels)[kept[0].test_rows]
    return [per_query(found.test, labels) for found in kept]


def _on_data(paths: Sequence[Path], data: Path, device: str, *, quiet: bool) -> list[PerQuery]:
    say = console.aside if quiet else console.say
    collection, _ = open_usable(data, say=say)
    if collection.labels is None or not scorable(collection.labels):
        raise DataError(
            f"{collection.name} can't be scored: two classes are needed, one with two items"
        )
    return [_queries_of(path, collection, device, quiet=quiet) for path in paths]


def _queries_of(path: Path, collection: Collection, device: str, *, quiet: bool) -> PerQuery:
    encoder, label = load(path, device=device), f"embedding with {path.name}"
    with console.progress(label, len(collection), quiet=quiet) as progress:
        vectors = encoder.embed_collection(collection, progress=progress)
    assert collection.labels is not None
    return per_query(vectors, collection.labels)


def _same_but_for_the_seed(runs: Sequence[Run]) -> dict[str, list[int]]:
    """Group the runs by settings without the seed; return the rows of each group by its name.

    Runs of the same settings and seed are not one method: something else differs. A group of
    several is named by the settings that set it apart from the others.
    """
    groups: defaultdict[tuple[str, int], list[int]] = defaultdict(list)
    seen: Counter[tuple[str, int]] = Counter()
    for i, run in enumerate(runs):
        key = str(sorted(_settings(run.config).items()))
        groups[key, seen[key, run.config.seed]].append(i)
        seen[key, run.config.seed] += 1
    rows_of = list(groups.values())
    settings_of = [_settings(runs[rows[0]].config) for rows in rows_of]
    differing = [key for key in settings_of[0] if len({str(s[key]) for s in settings_of}) > 1]
    names = {}
    for rows, settings in zip(rows_of, settings_of, strict=True):
        shown = [key for key in differing if settings[key] is not None][:3]
        words = ", ".join(f"{key} {settings[key]}" for key in shown)
        names[words if len(rows) > 1 and words else str(runs[rows[0]].path)] = rows
    return names


def _settings(config: TrainConfig) -> dict[str, Any]:
    """Return what makes a method: all settings but the seed, and where and how it ran."""
    usual = TrainConfig()
    aside = ("seed", "out", "resume", "force", "device", "workers", "checkpoint_seconds")
    same = {name: getattr(usual, name) for name in (*aside, "keep_memory")}
    return to_json(replace(config, **same))


def _compare(methods: Sequence[Method], *, seed: int) -> list[dict[str, Any]]:
    """Score every method, and its difference to the first."""
    first, found = methods[0], []
    for method in methods:
        row: dict[str, Any] = {"name": method.name, "runs": method.runs}
        for score in SCORES:
            ours = method.scores(score)
            row[score] = {"mean": float(torch.stack(ours).mean())}
            if method is not first:
                row[score]["difference"] = _difference(method, first, score, seed)
        found.append(row)
    return found


def _difference(method: Method, first: Method, score: str, seed: int) -> dict[str, Any]:
    ours, theirs = method.scores(score), first.scores(score)
    labels = method.queries[0].labels
    gap = paired_difference(torch.stack(ours).mean(0), torch.stack(theirs).mean(0), labels, seed)
    over_seeds = None
    if len(ours) == len(theirs) > 1:
        gaps = [float(a.mean() - b.mean()) for a, b in zip(ours, theirs, strict=True)]
        over_seeds = t_interval(gaps)
    found = SeededDifference(gap.mean, over_seeds, (gap.low, gap.high))
    return asdict(found) | {"verdict": found.verdict}


def _show(found: Sequence[dict[str, Any]], what: str, queries: PerQuery) -> None:
    """A row a method."""
    rows = []
    for row in found:
        cells = [
            f"{row['name']}" + (f" ({len(row['runs'])} seeds)" if len(row["runs"]) > 1 else "")
        ]
        for score in SCORES:
            gap = row[score].get("difference")
            cells.append(f"{100 * row[score]['mean']:.2f}")
            cells.append("" if gap is None else _words(gap))
        rows.append(cells)
    header = [""]
    for label in SCORES.values():
        header += [label, "difference to the first, 95%"]
    classes = len(np.unique(queries.labels))
    console.table(f"{what}: {len(queries.rows):,} queries of {classes:,} classes", header, rows)


def _words(gap: dict[str, Any]) -> str:
    low, high = (100 * end for end in gap["over_classes"])
    words = f"{100 * gap['mean']:+.2f} ({low:+.2f} to {high:+.2f} over classes"
    if gap["over_seeds"]:
        low, high = (100 * end for end in gap["over_seeds"])
        words += f"; {low:+.2f} to {high:+.2f} over seeds"
    return f"{words}): {gap['verdict']}"


def _drawn(found: Sequence[dict[str, Any]]) -> bytes:
    """Draw the differences to the first method with their intervals over classes, as PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 1.2 + 0.5 * len(found)), layout="constrained")
    others = found[1:]
    for axes, (score, label) in zip(
        figure.subplots(1, 2, sharey=True), SCORES.items(), strict=True
    ):
        gaps = [row[score]["difference"] for row in others]
        means = [100 * gap["mean"] for gap in gaps]
        ends = np.array([gap["over_classes"] for gap in gaps]).T * 100  # (2, methods)
        places = np.arange(len(others))[::-1]
        widths = np.abs(ends - np.array(means))
        axes.errorbar(means, places, xerr=widths, fmt="o", capsize=3, color="#1f5fa8")
        axes.axvline(0, color="0.6", linewidth=1)
        axes.set_yticks(places, [row["name"] for row in others])
        axes.set_ylim(-0.5, len(others) - 0.5)
        axes.set_xlabel(f"{label}, points")
    figure.suptitle(f"difference to {found[0]['name']}, 95% over classes", fontsize="medium")
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=150)
    return buffer.getvalue()
