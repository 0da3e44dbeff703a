"""`nofuss doctor`: what the data contain, what is wrong with them, and what to run next."""

import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import numpy as np
from cyclopts import Parameter

from nofuss.commands import console
from nofuss.config import Options
from nofuss.errors import command
from nofuss.progress import Progress, silent, working

if TYPE_CHECKING:  # imported where they are needed, so that --help does not load torch
    from torch import Tensor

    from nofuss.data.collection import Collection
    from nofuss.data.readers.folder import Labelling

log = logging.getLogger("nofuss")

_SHOWN = 10  # findings of a kind on the screen; --json has all


def main(
    data: Annotated[Path, Parameter(name="DATA")],
    /,
    *,
    run: Annotated[Path | None, Parameter(metavar="RUN")] = None,
    class_level: Annotated[
        int | None, Parameter(metavar="N", show_default="the innermost folder")
    ] = None,
    label_pattern: Annotated[
        str | None, Parameter(metavar="REGEX", show_default="the folder")
    ] = None,
    json: bool = False,
) -> None:
    """Find problems in data: unreadable files, copies, doubtful labels. Changes nothing.

    Args:
        data: Any layout that `nofuss train` reads.
        run: A run directory; its model is used to find labels that the nearest neighbours
            contradict.
        class_level: Which level of nested folders is the class, as for `nofuss train`.
        label_pattern: A regular expression that finds the class in a path, as for `nofuss train`.
        json: Print everything that was found as JSON.
    """
    from nofuss.data.open import open_data
    from nofuss.data.readers.folder import check_used, labelling_of

    labelling = labelling_of(Options(class_level=class_level, label_pattern=label_pattern))
    # Bad rows are listed, not refused.
    collection = open_data(data, labelling=labelling, check_values=False)
    check_used(collection, labelling)
    log.info(collection.describe())
    found = diagnose(collection, run=run, progress=console.progress)
    found.suggestion += suggest(collection, data, labelling)
    if json:
        console.print_json(asdict(found))
    else:
        _show(found)


# Diagnosis


@dataclass(frozen=True)
class Group:
    """Items that are copies of each other, or look the same."""

    items: list[str]
    classes: list[str]
    """More than one: at least one of the labels is wrong."""


@dataclass(frozen=True)
class Doubt:
    """A label that the neighbours contradict."""

    item: str
    label: str
    neighbours_say: str
    fraction: float
    """Of the nearest neighbours, those that carry the other label."""


@dataclass
class Diagnosis:
    """Everything that was found; `asdict` is what --json prints."""

    description: str
    items: int
    classes: int
    per_class: dict[str, float] = field(default_factory=dict)
    """min, median, max."""
    notes: list[str] = field(default_factory=list)
    skipped: list[tuple[str, str]] = field(default_factory=list)
    """Name and reason of each file that is not read at all."""
    unusable: list[dict[str, str]] = field(default_factory=list)
    duplicates: list[Group] = field(default_factory=list)
    near_duplicates: list[Group] = field(default_factory=list)
    doubtful_labels: list[Doubt] | None = None
    """None if no run was given."""
    suggestion: str = ""


def diagnose(
    collection: "Collection", *, run: Path | None = None, progress: Progress = silent
) -> Diagnosis:
    """Count items, scan files, find duplicates, and (with a run) compare labels with neighbours."""
    from nofuss.data.readers.arrays import is_finite
    from nofuss.data.scan import Problem, find_duplicates, scan_pictures

    diagnosis = Diagnosis(collection.describe(), len(collection), collection.num_classes)
    diagnosis.notes += collection.notes
    diagnosis.skipped += collection.skipped
    if collection.has_classes:
        sizes = np.bincount(collection.labels, minlength=collection.num_classes)
        steps = {"min": sizes.min(), "median": np.median(sizes), "max": sizes.max()}
        diagnosis.per_class = {name: float(size) for name, size in steps.items()}
        if single := int((sizes == 1).sum()):
            diagnosis.notes.append(f"{single:,} classes have one item, which has no match to find")
    unusable = scan_pictures(collection, progress=progress).unreadable
    if collection.vectors is not None:
        bad = np.flatnonzero(~is_finite(collection.vectors)).tolist()
        unusable = [Problem(i, collection.names[i], "NaN or infinity", "") for i in bad]
        if unusable:
            diagnosis.suggestion = "drop or fix the rows that can't be used, then "
    is_usable = ~np.isin(np.arange(len(collection)), [p.item for p in unusable])
    usable = np.flatnonzero(is_usable)
    diagnosis.unusable = [
        {"item": p.name, "reason": p.reason, "detail": p.detail} for p in unusable
    ]
    exact, near = find_duplicates(collection, progress=progress)
    # Copies of a row that can't be used can't be used either, and are listed above.
    diagnosis.duplicates = [_group(collection, rows) for rows in exact if is_usable[rows[0]]]
    diagnosis.near_duplicates = [_group(collection, rows) for rows in near]
    if run is not None and collection.has_classes and len(usable):
        from nofuss.model.encoder import load

        subset = collection.subset(usable)
        with working(progress, "opening the run"):
            encoder = load(run)
        vectors = encoder.embed_collection(subset, progress=progress)
        with working(progress, "finding the neighbours of all items"):
            diagnosis.doubtful_labels = doubts_of(vectors, subset)
    return diagnosis


def doubts_of(vectors: "Tensor", collection: "Collection") -> list[Doubt]:
    """Return the labels that a run's report would doubt, over all items; the clearest first."""
    from nofuss.evaluate.findings import doubtful_labels
    from nofuss.ranking.neighbours import neighbours

    nearest = neighbours(vectors.numpy(), queries=len(vectors))
    names = collection.class_names
    return [
        Doubt(collection.names[d.item], names[d.label], names[d.suggested], d.votes)
        for d in doubtful_labels(nearest, collection.labels, most=len(vectors))
    ]


def suggest(collection: "Collection", data: Path, labelling: "Labelling") -> str:
    """Return the command to run next."""
    if collection.has_classes and int((np.bincount(collection.labels) > 1).sum()) < 2:
        return "add items: training needs at least two classes with two items each"
    if not collection.has_classes and collection.comparisons is None:
        return "add labels, triplets or pairs: training learns from one of them"
    given = {name: value for name, value in labelling._asdict().items() if value is not None}
    flags = [word for name in given for word in (f"--{name.replace('_', '-')}", given[name])]
    return command("nofuss", "train", data, *flags)


def _group(collection: "Collection", rows: Sequence[int]) -> Group:
    labels = {int(collection.labels[i]) for i in rows if collection.labels[i] >= 0}
    classes = sorted(collection.class_names[label] for label in labels)
    return Group([collection.names[i] for i in rows], classes)


# Words


def _show(diagnosis: Diagnosis) -> None:
    """Print the findings, most of them in one line each."""
    if diagnosis.per_class:
        low, middle, high = (diagnosis.per_class[name] for name in ("min", "median", "max"))
        console.say(f"items per class: {low:,.0f} to {high:,.0f}, median {middle:,.1f}")
    for note in diagnosis.notes:
        console.say(f"note: {note}")
    unusable = [
        f"{u['item']}: {u['reason']}" + (f" ({u['detail']})" if u["detail"] else "")
        for u in diagnosis.unusable
    ]
    _list("can't be used", unusable)
    for kind, groups in (
        ("exact copies", diagnosis.duplicates),
        ("near-duplicates", diagnosis.near_duplicates),
    ):
        conflicts = [g for g in groups if len(g.classes) > 1]
        _list(f"{kind} with different labels", [_line(g) for g in conflicts])
        _list(f"{kind} of one class", [_line(g) for g in groups if len(g.classes) <= 1])
    if diagnosis.doubtful_labels == []:
        console.say("doubtful labels: none; no label is contradicted by its nearest neighbours")
    elif diagnosis.doubtful_labels is not None:
        _list(
            "doubtful labels (most of the nearest neighbours have another)",
            [
                f"{d.item}: {d.label}, neighbours say {d.neighbours_say} ({d.fraction:.0%})"
                for d in diagnosis.doubtful_labels
            ],
        )
    console.say(f"next: {diagnosis.suggestion}")


def _list(title: str, lines: Sequence[str]) -> None:
    if not lines:
        return
    console.say(f"{title}: {len(lines):,}")
    for line in lines[:_SHOWN]:
        console.say(f"  {line}")
    if len(lines) > _SHOWN:
        console.say("  … all with --json")


def _line(group: Group) -> str:
    names = " = ".join(group.items[:4]) + (" = …" if len(group.items) > 4 else "")
    return f"{names} ({', '.join(group.classes)})" if len(group.classes) > 1 else names
