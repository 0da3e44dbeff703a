"""What data contain, what is wrong with them, and what to run next: `nofuss doctor`."""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from nofuss.data.arrays import check_vectors, is_finite
from nofuss.data.collection import Collection
from nofuss.data.decode import PictureError, decode
from nofuss.data.detect import open_data
from nofuss.data.duplicates import Look, exact_copies, look_at, near_duplicates, row_digests
from nofuss.data.labelling import BY_FOLDER, Labelling, check_used
from nofuss.data.scan import CONFLICT, DUPLICATE, scan_pictures
from nofuss.errors import DataError, command
from nofuss.evaluate.expected import seconds_of_pair
from nofuss.model.encoder import load
from nofuss.report import findings
from nofuss.terminal import console

_SHOWN = 10  # findings of a kind on the screen; --json has all
_BAR = 40
LOOK_PRODUCTS, NEIGHBOUR_PRODUCTS = 3.0, 1.5
"""Time of comparing the looks of all pairs of pictures, and of finding all neighbours, in that of
the matrix product of all pairs."""


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
    passed_over: list[tuple[str, str]] = field(default_factory=list)
    """Name and reason of each file that is not read at all."""
    unusable: list[dict[str, str]] = field(default_factory=list)
    duplicates: list[Group] = field(default_factory=list)
    near_duplicates: list[Group] = field(default_factory=list)
    doubtful_labels: list[Doubt] | None = None
    """None if no run was given."""
    suggestion: str = ""


def diagnose_data(data: Path, *, labelling: Labelling, run: Path | None, as_json: bool) -> None:
    """Print what is in the data, what is wrong with them, and what to run next."""
    # Bad rows are listed, not refused.
    collection = open_data(data, labelling=labelling, check_values=False)
    check_used(collection, labelling)
    if not as_json:
        console.say(collection.describe())
    diagnosis = diagnose(collection, data=data, labelling=labelling, run=run, quiet=as_json)
    if as_json:
        console.print_json(asdict(diagnosis))
    else:
        _print(diagnosis)


def diagnose(
    collection: Collection,
    *,
    data: Path,
    labelling: Labelling = BY_FOLDER,
    run: Path | None = None,
    quiet: bool = False,
) -> Diagnosis:
    """Count items, scan files, find copies, and (with a run) compare labels with neighbours."""
    diagnosis = Diagnosis(collection.describe(), len(collection), collection.num_classes)
    diagnosis.notes += collection.notes
    diagnosis.passed_over += collection.passed_over
    if collection.labels is not None:
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
        with console.progress("checking files", len(collection), quiet=quiet) as progress:
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
        groups = _look_alikes(collection, usable, quiet=quiet)
        exact = {frozenset(rows) for rows in copies}
        diagnosis.near_duplicates = [
            _group(collection, rows) for rows in groups if frozenset(rows) not in exact
        ]
    if run is not None and collection.labels is not None:
        subset = collection.subset(usable)
        encoder = load(run)
        with console.progress("embedding", len(subset), quiet=quiet) as progress:
            vectors = encoder.embed_collection(subset, progress=progress)
        of_pair = NEIGHBOUR_PRODUCTS * seconds_of_pair(encoder.dim)
        _announce("finding the neighbours of all items", of_pair, subset.names, quiet)
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
    assert collection.labels is not None
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
    if collection.labels is None:
        return train
    if int((np.bincount(collection.labels) > 1).sum()) < 2:
        return "add pictures: training needs at least two classes with two items each"
    if collection.split is None and collection.num_classes < 4:
        return f"{train} --test-fraction 0"  # too few classes to reserve some for testing
    return train


def _look_alikes(
    collection: Collection, usable: NDArray[np.int64], *, quiet: bool
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
    with (
        console.progress("comparing pictures", len(usable), quiet=quiet) as progress,
        ThreadPoolExecutor(os.cpu_count()) as pool,
    ):
        for i, seen in zip(usable.tolist(), pool.map(look, usable.tolist()), strict=True):
            if seen is not None:
                looks[i] = seen
            progress(len(looks))
    if not looks:
        return []
    rows = list(looks)
    _announce("comparing the looks of all pairs", LOOK_PRODUCTS * seconds_of_pair(64), rows, quiet)
    bits = np.stack([looks[i][0] for i in rows])
    thumbnails = np.stack([looks[i][1] for i in rows])
    return [[rows[i] for i in group] for group in near_duplicates(bits, thumbnails)]


def _announce(what: str, of_pair: float, items: Sequence[object], quiet: bool) -> None:
    """Say how long work on all pairs of items takes, if it is long."""
    seconds = of_pair * float(len(items)) ** 2
    if seconds >= console.LONG and not quiet:
        console.say(f"{what}, {len(items):,} items, takes about {console.duration(seconds)}")


def _group(collection: Collection, rows: Sequence[int]) -> Group:
    classes: list[str] = []
    if collection.labels is not None:
        classes = sorted({collection.class_names[collection.labels[i]] for i in rows})
    return Group([collection.names[i] for i in rows], classes)


def _print(diagnosis: Diagnosis) -> None:
    """Print the findings, most of them in one line each."""
    if diagnosis.per_class:
        low, middle, high = (diagnosis.per_class[name] for name in ("min", "median", "max"))
        console.say(f"items a class: {low:,.0f} to {high:,.0f}, median {middle:,.1f}")
        most = max(count for _, count in diagnosis.histogram)
        width = max(len(step) for step, _ in diagnosis.histogram)
        for step, count in diagnosis.histogram:
            bar = "█" * -(-_BAR * count // most)
            console.say(f"  {step:>{width}} items  {bar} {count:,} classes")
    for note in diagnosis.notes:
        console.warn(note)
    unusable = [
        f"{u['item']}: {u['reason']}" + (f" ({u['detail']})" if u["detail"] else "")
        for u in diagnosis.unusable
    ]
    _list("can't be used", unusable)
    for kind, groups in (
        ("copies", diagnosis.duplicates),
        ("look alike", diagnosis.near_duplicates),
    ):
        conflicts = [g for g in groups if len(g.classes) > 1]
        _list(f"{kind}, but labelled differently", [_line(g) for g in conflicts])
        _list(f"{kind}, of one class", [_line(g) for g in groups if len(g.classes) <= 1])
    if diagnosis.doubtful_labels == []:
        console.say("doubtful labels: none; no label is contradicted by its nearest neighbours")
    elif diagnosis.doubtful_labels is not None:
        _list(
            "doubtful labels: the nearest neighbours say otherwise",
            [
                f"{d.item}: {d.label}, neighbours say {d.neighbours_say} ({d.share:.0%})"
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
