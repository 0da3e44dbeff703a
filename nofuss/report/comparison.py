"""Whether one run finds more than another, on the same items, with intervals: `nofuss compare`."""

import io
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nofuss.config import TrainConfig, to_json
from nofuss.data.collection import Collection
from nofuss.data.labelling import labelling_of
from nofuss.data.usable import open_usable
from nofuss.errors import DataError, RunError, UsageError
from nofuss.evaluate.intervals import SeededDifference, paired_difference, t_interval
from nofuss.evaluate.queries import PerQuery, per_query
from nofuss.evaluate.side_by_side import are_class_sums, from_class_sums, scorable
from nofuss.files import write_file
from nofuss.model.encoder import load
from nofuss.progress import Progress, silent
from nofuss.report import read_optional_json
from nofuss.report.evaluation import warn_of_known
from nofuss.report.queries import among_themselves
from nofuss.run.directory import Run, check_same_data
from nofuss.run.embeddings import RunEmbeddings, load_embeddings

SCORES = {"recall@1": "Recall@1", "map@r": "MAP@R"}


@dataclass(frozen=True)
class Method:
    """Runs with equal settings but for the seed, and the scores of their queries."""

    name: str
    runs: list[str]
    seeds: list[int]
    queries: list[PerQuery]

    def scores(self, score: str) -> list[Tensor]:
        """Return the score of each query, (Q,), for each run."""
        return [each.recall1 if score == "recall@1" else each.map_at_r for each in self.queries]


def compare_runs(
    runs: Sequence[Path],
    *,
    data: Path | None,
    seed: int,
    figure: Path | None,
    device: str,
    progress: Progress = silent,
) -> dict[str, Any]:
    """Return the differences from the first run, with 95% intervals; draw them to `figure`."""
    opened = [Run.open(path) for path in runs]
    groups = _same_but_for_the_seed(opened)
    if len(groups) < 2:
        raise UsageError("the runs differ in their seed alone, so there is nothing to compare")
    if data is None:
        queries, what = _on_own_classes(opened, progress)
    else:
        queries, what = _on_data(runs, data, device, progress), str(data)
    methods = [
        Method(
            name,
            [str(runs[i]) for i in rows],
            [opened[i].config.seed for i in rows],
            [queries[i] for i in rows],
        )
        for name, rows in groups.items()
    ]
    found = _compare(methods, seed=seed)
    if figure is not None:
        write_file(figure, _drawn(found))
    classes = len(np.unique(queries[0].labels))
    return {"data": what, "queries": len(queries[0].rows), "classes": classes, "methods": found}


def _on_own_classes(runs: Sequence[Run], progress: Progress) -> tuple[list[PerQuery], str]:
    """Score the runs on classes that they have not learned from, which must be the same."""
    kept = [_kept(run) for run in runs]
    for run, found in zip(runs, kept, strict=True):
        same = (found.fingerprint, found.seen) == (kept[0].fingerprint, kept[0].seen)
        if not same or not np.array_equal(found.test_rows, kept[0].test_rows):
            raise RunError(
                f"{run.path} was tested on other items than {runs[0].path}; train with the same "
                "data and --test-fraction, or add --data DATA"
            )
    if kept[0].seen:
        return _by_folds(runs), "every class, by models that have not seen it"
    config = runs[0].config
    collection, _ = open_usable(
        runs[0].own_data,
        labelling=labelling_of(config),
        corrections=runs[0].corrections,
        progress=progress,
    )
    cure = "restore them, or add --data DATA"
    check_same_data(runs[0].path, collection.fingerprint(), cure=cure)
    if collection.labels is None:
        raise RunError(
            f"{collection.name} has no labels, so its runs can't be compared by Recall@1; add "
            "--data DATA with labels, or see `nofuss evaluate` of each"
        )
    test = collection.subset(kept[0].test_rows)
    return [_per_query(torch.from_numpy(of.test), test) for of in kept], "their test classes"


def _kept(run: Run) -> RunEmbeddings:
    found = load_embeddings(run.path)
    if found is None or not len(found.test):
        raise RunError(f"{run.path} has no test classes of its own; add --data DATA")
    return found


def _by_folds(runs: Sequence[Run]) -> list[PerQuery]:
    """Read what the folds of each run found, class by class; the folds must be the same."""
    sums = []
    for run in runs:
        stored = read_optional_json(run.path / "choice.json")
        found, scores = stored.get("by_class"), stored.get("scores")
        if not are_class_sums(found) or not isinstance(scores, dict):
            raise RunError(f"{run.path} kept no scores of its folds; train it again, or add --data")
        folds = scores.get("folds")
        sums.append((found, folds))
        if folds != sums[0][1] or found["queries"] != sums[0][0]["queries"]:
            raise RunError(
                f"{run.path} was scored by other folds than {runs[0].path}; train with the same "
                "--folds, or add --data DATA"
            )
    return [from_class_sums(found) for found, _ in sums]


def _on_data(paths: Sequence[Path], data: Path, device: str, progress: Progress) -> list[PerQuery]:
    labellings = [labelling_of(Run.open(path).config) for path in paths]
    if data.is_dir() and any(labelling != labellings[0] for labelling in labellings):
        raise RunError("the runs take classes from other parts of a path; compare those that agree")
    collection, _ = open_usable(data, labelling=labellings[0], progress=progress)
    if collection.labels is None or not scorable(collection.labels):
        raise DataError(
            f"{collection.name} can't be scored: two classes are needed, one with two items"
        )
    return [_queries_of(path, collection, device, progress) for path in paths]


def _queries_of(path: Path, collection: Collection, device: str, progress: Progress) -> PerQuery:
    encoder = load(path, device=device)
    warn_of_known(encoder, collection)
    vectors = encoder.embed_collection(
        collection,
        progress=lambda what, done, total: progress(f"{what} with {path.name}", done, total),
    )
    return _per_query(vectors, collection)


def _per_query(vectors: Tensor, collection: Collection) -> PerQuery:
    queries, labels, options = among_themselves(vectors, collection)
    return per_query(queries, labels, **options)


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
    return {
        words if len(rows) > 1 and words and words_of.count(words) == 1 else _path(runs, rows): rows
        for rows, words in zip(rows_of, words_of, strict=True)
    }


def _path(runs: Sequence[Run], rows: Sequence[int]) -> str:
    """Return the path of the first of some runs, as a name."""
    return str(runs[rows[0]].path)


def _settings(config: TrainConfig) -> dict[str, Any]:
    """Return what makes a method: all settings but the seed, and where and how it ran."""
    usual = TrainConfig()
    aside = ("seed", "out", "resume", "device", "num_workers", "tensorboard")
    same = {name: getattr(usual, name) for name in aside}
    return to_json(replace(config, **same))


def _compare(methods: Sequence[Method], *, seed: int) -> list[dict[str, Any]]:
    """Score every method, and its difference from the first."""
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
    """Compare the trainings of common seeds, if there are two or more; else all."""
    ours, theirs = (dict(zip(m.seeds, m.scores(score), strict=True)) for m in (method, first))
    common = sorted(ours.keys() & theirs.keys())
    over_seeds = t_interval([float((ours[s] - theirs[s]).mean()) for s in common])
    a, b = (
        torch.stack([scores[s] for s in (common if over_seeds else scores)]).mean(0)
        for scores in (ours, theirs)
    )
    gap = paired_difference(a, b, method.queries[0].labels, seed)
    found = SeededDifference(gap.mean, over_seeds, (gap.low, gap.high))
    return asdict(found) | {"paired_seeds": common, "verdict": found.verdict}


def _drawn(found: Sequence[dict[str, Any]]) -> bytes:
    """Draw the differences from the first method with their intervals, as PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 1.6 + 0.5 * len(found)), layout="constrained")
    others = found[1:]
    places = np.arange(len(others))[::-1]
    both = figure.subplots(1, 2, sharey=True)
    for axes, (score, label) in zip(both, SCORES.items(), strict=True):
        gaps = [row[score]["difference"] for row in others]
        for over, colour, shift in (
            ("over_classes", "#1f5fa8", 0.08),
            ("over_seeds", "#c45a11", -0.08),
        ):
            known = [i for i, gap in enumerate(gaps) if gap[over]]
            if not known:
                continue
            means = np.array([100 * gaps[i]["mean"] for i in known])
            low, high = 100 * np.array([gaps[i][over] for i in known]).T
            widths = np.stack([means - low, high - means]).clip(0)
            at = places[known] + shift
            words = over.replace("_", " ")
            axes.errorbar(means, at, xerr=widths, fmt="o", capsize=3, color=colour, label=words)
        axes.axvline(0, color="0.6", linewidth=1)
        names = [row["name"] for row in others]
        axes.set_yticks(places, names, parse_math=False)  # a path may have dollars
        axes.set_ylim(-0.5, len(others) - 0.5)
        axes.set_xlabel(f"{label}, points")
    figure.legend(*both[0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    figure.suptitle(f"difference from {found[0]['name']}, 95%", fontsize="medium", parse_math=False)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=150)
    return buffer.getvalue()
