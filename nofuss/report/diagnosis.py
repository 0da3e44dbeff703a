"""What data contain, what is wrong with them, and what to run next: `nofuss doctor`."""

import logging
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from nofuss.data.collection import Collection
from nofuss.data.decode import PictureError, decode
from nofuss.data.duplicates import Look, exact_copies, look_at, near_duplicates, row_digests
from nofuss.data.open import open_data
from nofuss.data.readers.arrays import check_vectors, is_finite
from nofuss.data.readers.folder import BY_FOLDER, Labelling, check_used
from nofuss.data.scan import CONFLICT, DUPLICATE, scan_pictures
from nofuss.data.triplets import NO_LABEL
from nofuss.errors import DataError, command
from nofuss.model.encoder import load
from nofuss.progress import Progress, silent, working
from nofuss.report import findings

log = logging.getLogger("nofuss")


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
    share: float
    """Share of the nearest neighbours that carry the other label."""


@dataclass
class Diagnosis:
    """Everything that was found; `asdict` is what --json prints."""

    description: str
    items: int
    classes: int
    per_class: dict[str, float] = field(default_factory=dict)
    """min, median, max."""
    histogram: list[tuple[str, int]] = field(default_factory=list)
    """Items a class, in doubling steps → number of classes."""
    notes: list[str] = field(default_factory=list)
    skipped: list[tuple[str, str]] = field(default_factory=list)
    """Name and reason of each file that is not read at all."""
    unusable: list[dict[str, str]] = field(default_factory=list)
    duplicates: list[Group] = field(default_factory=list)
    near_duplicates: list[Group] = field(default_factory=list)
    doubtful_labels: list[Doubt] | None = None
    """None if no run was given."""
    suggestion: str = ""


def diagnose_data(
    data: Path, *, labelling: Labelling, run: Path | None, progress: Progress = silent
) -> Diagnosis:
    """Return what is in the data, what is wrong with them, and what to run next."""
    # Bad rows are listed, not refused.
    collection = open_data(data, labelling=labelling, check_values=False)
    check_used(collection, labelling)
    log.info(collection.describe())
    return diagnose(collection, data=data, labelling=labelling, run=run, progress=progress)


def diagnose(
    collection: Collection,
    *,
    data: Path,
    labelling: Labelling = BY_FOLDER,
    run: Path | None = None,
    progress: Progress = silent,
) -> Diagnosis:
    """Count items, scan files, find copies, and (with a run) compare labels with neighbours."""
    diagnosis = Diagnosis(collection.describe(), len(collection), collection.num_classes)
    diagnosis.notes += collection.notes
    diagnosis.skipped += collection.skipped
    if collection.has_classes:
        sizes = np.bincount(collection.labels, minlength=collection.num_classes)
        diagnosis.per_class = {
            "min": float(sizes.min()),
            "median": float(np.median(sizes)),
            "max": float(sizes.max()),
        }
        diagnosis.histogram = histogram(sizes)
        if single := int((sizes == 1).sum()):
            diagnosis.notes.append(f"{single:,} classes have one item, which has no match to find")
    usable = np.arange(len(collection))
    if collection.kind == "pictures":
        report = scan_pictures(collection, progress=progress)
        unreadable = [p for p in report.problems if p.reason not in (DUPLICATE, CONFLICT)]
        diagnosis.unusable = [
            {"item": p.name, "reason": p.reason, "detail": p.detail} for p in unreadable
        ]
        usable = report.readable
        copies = [list(rows) for rows in report.copies]
    elif collection.array is not None:
        if collection.kind == "vectors":
            usable = _check_rows(collection, diagnosis)
        digests = row_digests(collection.array[i] for i in usable)
        copies = [usable[rows].tolist() for rows in exact_copies(digests)]
    else:
        copies = []
    diagnosis.duplicates = [_group(collection, rows) for rows in copies]
    if collection.kind in ("pictures", "images"):
        groups = _look_alikes(collection, usable, progress)
        exact = {frozenset(rows) for rows in copies}
        diagnosis.near_duplicates = [
            _group(collection, rows) for rows in groups if frozenset(rows) not in exact
        ]
    if run is not None and collection.has_classes:
        subset = collection.subset(usable)
        with working(progress, "opening the run"):
            encoder = load(run)
        vectors = encoder.embed_collection(subset, progress=progress)
        with working(progress, "finding the neighbours of all items"):
            diagnosis.doubtful_labels = doubts_of(vectors, subset)
    diagnosis.suggestion += suggest(collection, data, labelling)
    return diagnosis


def _check_rows(collection: Collection, diagnosis: Diagnosis) -> NDArray[np.int64]:
    """Return the rows of finite vectors; note what training refuses, and suggest to fix it."""
    assert collection.array is not None
    finite = is_finite(collection.array)
    diagnosis.unusable = [
        {"item": collection.names[i], "reason": "NaN or infinity", "detail": ""}
        for i in np.flatnonzero(~finite)
    ]
    try:
        check_vectors(collection.array[finite], name=collection.name)
    except DataError as error:
        diagnosis.notes.append(str(error))
        diagnosis.suggestion += "scale the values, then "
    if diagnosis.unusable:
        diagnosis.suggestion += "drop or fix the rows that can't be used, then "
    return np.flatnonzero(finite)


def histogram(sizes: NDArray[np.int64]) -> list[tuple[str, int]]:
    """Count the classes with 1, 2–3, 4–7, … items, from the smallest step in use to the largest."""
    steps = np.floor(np.log2(np.maximum(sizes, 1))).astype(int)
    return [
        (str(2**s) if s == 0 else f"{2**s:,}–{2 ** (s + 1) - 1:,}", int((steps == s).sum()))
        for s in range(int(steps.min()), int(steps.max()) + 1)
    ]


def doubts_of(vectors: Tensor, collection: Collection) -> list[Doubt]:
    """Return the labels that a run's report would doubt, over all items; the clearest first."""
    neighbours = findings.neighbours(vectors.numpy(), queries=len(vectors))
    names = collection.class_names
    return [
        Doubt(collection.names[d.item], names[d.label], names[d.suggested], d.votes)
        for d in findings.doubtful_labels(neighbours, collection.labels, most=len(vectors))
    ]


def suggest(collection: Collection, data: Path, labelling: Labelling) -> str:
    """Return the command to run next."""
    flags = [
        (f"--{name.replace('_', '-')}", str(value))
        for name, value in labelling._asdict().items()
        if value is not None
    ]
    train = command("nofuss", "train", data, *(word for flag in flags for word in flag))
    if not collection.has_classes:
        return train
    if int((np.bincount(collection.labels) > 1).sum()) < 2:
        return "add pictures: training needs at least two classes with two items each"
    return train


def _look_alikes(
    collection: Collection, usable: NDArray[np.int64], progress: Progress
) -> list[list[int]]:
    """Return groups of items that look the same, without unreadable ones."""

    def look(i: int) -> Look | None:
        try:
            if collection.array is not None:
                return look_at(Image.fromarray(np.asarray(collection.array[i])))
            return look_at(decode(collection.paths[i], at_least=32))
        except PictureError:  # changed since the scan
            return None

    looks: dict[int, Look] = {}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for done, (i, seen) in enumerate(
            zip(usable.tolist(), pool.map(look, usable.tolist()), strict=True)
        ):
            progress("looking at pictures", done, len(usable))
            if seen is not None:
                looks[i] = seen
    progress("looking at pictures", len(usable), len(usable))
    if not looks:
        return []
    rows = list(looks)
    bits = np.stack([looks[i][0] for i in rows])
    thumbnails = np.stack([looks[i][1] for i in rows])
    with working(progress, "comparing all pairs of pictures"):
        groups = near_duplicates(bits, thumbnails)
    return [[rows[i] for i in group] for group in groups]


def _group(collection: Collection, rows: Sequence[int]) -> Group:
    labels = {int(collection.labels[i]) for i in rows} - {NO_LABEL}
    classes = sorted(collection.class_names[label] for label in labels)
    return Group([collection.names[i] for i in rows], classes)
