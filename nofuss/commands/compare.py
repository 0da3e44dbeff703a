"""`nofuss compare`: whether one run finds more than another, on the same items, with intervals."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from nofuss.commands import DeviceName, console
from nofuss.config import Settings, to_json
from nofuss.errors import RunError, UsageError
from nofuss.progress import Progress, silent

if TYPE_CHECKING:  # functions import what they need, so that --help does not load torch
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from nofuss.evaluate.protocol import PerQuery
    from nofuss.run.directory import Run

    BySeed = dict[int, Tensor]  # the scores of a method's queries, (Q,), for each seed

TESTED = ("test", "query", "gallery")
"""The sides of the items that scores are of."""
SCORES = ("recall@1", "map@r")


def main(
    *runs: Annotated[Path, Parameter(name="RUN", required=True)],
    data: Annotated[
        Path | None,
        Parameter(metavar="DATA", show_default="the test classes of the runs"),
    ] = None,
    json: bool = False,
    device: DeviceName = "auto",
) -> None:
    """Compare runs on the same items: differences from the first run, with 95% intervals.

    Runs whose settings differ only in the seed count as one method: their scores are averaged, and
    seeds that two methods share are paired. A difference counts only if its interval over classes
    and, where methods share two seeds or more, that over seeds exclude zero; otherwise the methods
    are indistinguishable.

    Args:
        runs: Two or more run directories of `nofuss train`.
        data: Compare on these data instead, in any layout that `nofuss train` reads.
        json: Print the comparison as JSON instead of a table.
        device: Where to compute, as for `nofuss train`.
    """
    if len(runs) < 2:
        raise UsageError(f"got {len(runs)} run; give two or more to compare")
    found = compare_runs(runs, data=data, device=device, progress=console.progress)
    if json:
        console.print_json(found)
        return
    _show(found)


def _show(found: dict[str, Any]) -> None:
    """Print a table for each score, with a row for each method."""
    from nofuss.evaluate.protocol import score_title

    console.sentence(
        f"{found['data']}: {found['queries']:,} queries of {found['classes']:,} classes; "
        "differences from the first row, with 95% intervals over classes and over seeds"
    )
    first, *others = found["methods"]
    unpaired = [m["name"] for m in others if not m["recall@1"]["difference"]["over_seeds"]]
    for score in SCORES:
        header = [score_title(score), "%", "difference", "over classes", "over seeds", "verdict"]
        rows = [[_name(first), f"{100 * first[score]['mean']:.2f}", "", "", "", ""]]
        for method in others:
            gap = method[score]["difference"]
            rows.append(
                [
                    _name(method),
                    f"{100 * method[score]['mean']:.2f}",
                    f"{100 * gap['mean']:+.2f}",
                    _points(gap["over_classes"]),
                    _points(gap["over_seeds"]),
                    gap["verdict"],
                ]
            )
        if len(unpaired) == len(others):
            header, *rows = ([*row[:4], row[5]] for row in (header, *rows))
        console.table("", header, rows)
    if unpaired:
        console.sentence(
            f"The verdict on {', '.join(unpaired)} does not account for the seed; that needs two "
            "or more seeds that both methods were trained with."
        )


def _name(method: dict[str, Any]) -> str:
    seeds = len(method["runs"])
    return f"{method['name']} ({seeds} seeds)" if seeds > 1 else str(method["name"])


def _points(ends: Sequence[float] | None) -> str:
    return "" if ends is None else f"{100 * ends[0]:+.2f} to {100 * ends[1]:+.2f}"


def compare_runs(
    runs: Sequence[Path],
    *,
    data: Path | None,
    device: str,
    progress: Progress = silent,
) -> dict[str, Any]:
    """Return the differences from the first run, with 95% intervals."""
    import numpy as np
    import torch

    from nofuss.run.directory import Run

    opened = [Run.open(path) for path in runs]
    groups = _same_but_for_the_seed(opened)
    if len(groups) < 2:
        raise UsageError("the runs differ in their seed alone, so there is nothing to compare")
    largest = None
    if data is None:
        queries, what, largest = _on_own_classes(opened)
    else:
        queries, what = _on_data(opened, data, device, progress), str(data)
    labels = queries[0].labels
    methods: list[dict[str, Any]] = []
    first: dict[str, BySeed] = {}
    for name, rows in groups.items():
        method: dict[str, Any] = {"name": name, "runs": [str(runs[i]) for i in rows]}
        for score in SCORES:
            ours = {opened[i].config.seed: _scores(queries[i], score) for i in rows}
            method[score] = {"mean": float(torch.stack([*ours.values()]).mean())}
            if methods:
                gap = _difference(ours, first[score], labels, largest=largest)
                method[score]["difference"] = gap
            else:
                first[score] = ours
        methods.append(method)
    counts = {"queries": len(queries[0].rows), "classes": len(np.unique(labels))}
    return {"data": what, **counts, "methods": methods}


def _scores(queries: PerQuery, score: str) -> Tensor:
    """Return the score of each query, (Q,)."""
    return queries.recall1 if score == "recall@1" else queries.map_at_r


def _on_own_classes(runs: Sequence[Run]) -> tuple[list[PerQuery], str, float | None]:
    """Score the runs on classes that they have not learned from, which must be the same.

    The last value is the largest difference of a query, where it can't be seen from the scores:
    those of folds are means of classes.
    """
    import numpy as np
    import torch

    from nofuss.evaluate.protocol import per_query
    from nofuss.search import Index
    from nofuss.training.score import queries_and_gallery

    items = [
        [item for item in Index.load(run.index).items(vectors=True) if item.split in TESTED]
        for run in runs
    ]
    what = [[(i.label, i.split, i.digest) for i in own] for own in items]
    for run, same in zip(runs, what, strict=True):
        if same != what[0]:
            raise RunError(
                f"{run.path} was tested on other items than {runs[0].path}; train with the same "
                "data and --test-fraction, or add --data DATA"
            )
    if not what[0]:
        return _by_folds(runs), "every class, by models that have not seen it", 1.0
    classes = [label for label, _, _ in what[0] if label is not None]
    if len(classes) < len(what[0]):
        raise RunError(
            f"the items of {runs[0].path} have no labels, so runs can't be compared by Recall@1; "
            "add --data DATA with labels, or see `nofuss evaluate` of each"
        )
    labels = np.unique(classes, return_inverse=True)[1]
    splits, queries = np.array([split for _, split, _ in what[0]]), []
    for own in items:
        vectors = torch.stack([item.vector for item in own if item.vector is not None])
        asked, asked_labels, options = queries_and_gallery(vectors, labels, splits)
        queries.append(per_query(asked, asked_labels, **options))
    return queries, "their test classes", None


def _by_folds(runs: Sequence[Run]) -> list[PerQuery]:
    """Read what the folds of each run found, class by class; the folds must be the same."""
    from nofuss.evaluate.protocol import from_class_sums
    from nofuss.report import read_optional_json

    sums = []
    for run in runs:
        stored = read_optional_json(run.path / "choice.json")
        found, scores = stored.get("by_class"), stored.get("scores")
        if not isinstance(found, dict) or not isinstance(scores, dict):
            raise RunError(f"{run.path} kept no scores of its folds; train it again, or add --data")
        folds = scores.get("folds")
        sums.append((found, folds))
        if folds != sums[0][1] or found["queries"] != sums[0][0]["queries"]:
            raise RunError(
                f"{run.path} was scored by other folds than {runs[0].path}; train both on the "
                "same data, or add --data DATA"
            )
    return [from_class_sums(found) for found, _ in sums]


def _on_data(runs: Sequence[Run], data: Path, device: str, progress: Progress) -> list[PerQuery]:
    """Score the runs on all of other data."""
    from nofuss.commands.scoring import check_scorable, warn_of_known
    from nofuss.data.open import open_usable
    from nofuss.data.readers.folder import labelling_of
    from nofuss.evaluate.protocol import per_query
    from nofuss.model.encoder import load
    from nofuss.training.score import among_themselves

    labellings = [labelling_of(run.config) for run in runs]
    if data.is_dir() and any(labelling != labellings[0] for labelling in labellings):
        raise RunError("the runs take classes from other parts of a path; compare those that agree")
    collection = open_usable(data, labelling=labellings[0], progress=progress)
    check_scorable(collection)
    found = []
    for run in runs:
        encoder = load(run.path, device=device)
        warn_of_known(encoder, collection)
        vectors = encoder.embed_collection(collection, progress=progress)
        queries, labels, options = among_themselves(vectors, collection)
        found.append(per_query(queries, labels, **options))
    return found


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
    words_of = []
    for settings in settings_of:
        shown = [key for key in differing if settings[key] is not None][:3]
        words_of.append(", ".join(f"{key} {settings[key]}" for key in shown))
    names = [
        words if len(rows) > 1 and words and words_of.count(words) == 1 else str(runs[rows[0]].path)
        for rows, words in zip(rows_of, words_of, strict=True)
    ]
    return dict(zip(names, rows_of, strict=True))


def _settings(config: Settings) -> dict[str, Any]:
    """Return what makes a method: all settings but the seed, and where and how it ran."""
    aside = ("seed", "out", "device", "num_workers", "tensorboard")
    return {name: value for name, value in to_json(config).items() if name not in aside}


def _difference(
    ours: BySeed, theirs: BySeed, labels: NDArray[np.generic], *, largest: float | None
) -> dict[str, Any]:
    """Compare the trainings of common seeds, if there are two or more; else all."""
    import torch

    from nofuss.evaluate.intervals import SeededDifference, paired_difference, t_interval

    common = sorted(ours.keys() & theirs.keys())
    over_seeds = t_interval([float((ours[s] - theirs[s]).mean()) for s in common])
    a, b = (
        torch.stack([scores[s] for s in (common if over_seeds else scores)]).mean(0)
        for scores in (ours, theirs)
    )
    gap = paired_difference(a, b, labels, largest=largest)
    found = SeededDifference(gap.mean, over_seeds, (gap.low, gap.high))
    return asdict(found) | {"paired_seeds": common, "verdict": found.verdict}
