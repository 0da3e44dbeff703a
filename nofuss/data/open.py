"""Open whatever the user names: as a `Collection`, or checked, without what can't be read."""

import logging
import os
import unicodedata
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from nofuss.config import Options, Settings, is_named_data
from nofuss.data.collection import Collection, first_five
from nofuss.data.corrections import corrected
from nofuss.data.decode import SUFFIXES, decode
from nofuss.data.readers.arrays import open_arrays
from nofuss.data.readers.benchmarks import layout_of
from nofuss.data.readers.folder import (
    BY_FOLDER,
    SPLIT_WORDS,
    Labelling,
    check_used,
    find_pictures,
    labelling_of,
    named,
    open_folder,
)
from nofuss.data.readers.glyphs import open_glyphs
from nofuss.data.readers.han import open_han
from nofuss.data.readers.shards import (
    is_saved_dataset,
    open_parquet,
    open_saved_dataset,
    open_shards,
)
from nofuss.data.readers.table import open_table
from nofuss.data.scan import ScanReport, scan_pictures
from nofuss.data.triplets import NO_LABEL, Comparisons, Rows
from nofuss.errors import DataError, UsageError
from nofuss.progress import Progress, silent, working

log = logging.getLogger("nofuss")
LARGE = 96
"""Side up to which `TrainingData.side` is exact."""
TEST_FRACTION = 0.2
"""Of the groups, and so about of the triplets or pairs, held out for the scores by default."""
ACCEPTED = (
    "a folder of class folders, a CSV with path,label or anchor,positive,negative or a,b,same, an "
    ".npz or .safetensors file, WebDataset shards (.tar), Parquet, a Hugging Face dataset on disk, "
    "the folder of CUB-200-2011, Cars196 or Stanford Online Products, or the word han"
)


def open_data(
    path: str | Path | None,
    *,
    labelling: Labelling = BY_FOLDER,
    unlabelled: bool = False,
    check_values: bool = True,
) -> Collection:
    """Recognise the data at `path` and open it; None is the built-in set of characters.

    The word "han", where there is no such file, is the set of `han.py`.

    labelling: how classes are read from the paths of pictures, where these have no labels.
    unlabelled: keep pictures outside class folders, see `open_folder`.
    check_values: refuse vectors with NaN or infinity; False returns them as they are.
    """
    if path is None:
        return open_glyphs()
    if is_named_data(Path(path)):
        return open_han()
    path = Path(os.path.expanduser(path))
    if os.path.isdir(path):  # unlike path.is_dir(), no error on names too long
        opened = _open_directory(path.absolute(), labelling, unlabelled)
    elif os.path.isfile(path):
        opened = _open_file(path.absolute(), labelling, check_values)
    else:
        raise DataError(f"{path} does not exist; expected {ACCEPTED}")
    return replace(opened, remarks=opened.remarks + spelled_alike(opened.class_names))


def spelled_alike(names: Sequence[str]) -> tuple[str, ...]:
    """Return a note if names of classes differ only in how Unicode composes their letters."""
    forms = Counter(unicodedata.normalize("NFC", name) for name in names)
    if twice := [name for name, count in forms.items() if count > 1]:
        return (
            f"{len(twice):,} names of classes are spelled in two ways that look the same (Unicode "
            f"NFC and NFD) and count as two classes: {first_five(twice)}",
        )
    return ()


def _open_file(path: Path, labelling: Labelling, check_values: bool) -> Collection:
    match path.suffix.lower():
        case ".tar":
            return open_shards([path], path.parent, labelling)
        case ".csv" | ".tsv":
            return open_table(path)
        case ".npz" | ".safetensors":
            return open_arrays(path, check_values=check_values)
        case ".parquet":
            return open_parquet([path], path.parent)
        case suffix if suffix in SUFFIXES:
            raise DataError(f"{path} is one picture; expected {ACCEPTED}")
        case _ if ".tar." in path.name or path.suffix == ".tgz":
            raise DataError(f"{path} is compressed; unpack it to a .tar")
    raise DataError(f"can't recognise {path}; expected {ACCEPTED}")


def _open_directory(folder: Path, labelling: Labelling, unlabelled: bool) -> Collection:
    if layout := layout_of(folder):
        return layout(folder)
    if shards := _inside(folder, ".tar"):
        opened = open_shards(shards, folder, labelling)
        beside = [(picture, "pictures beside shards") for picture in find_pictures(folder)]
        return replace(opened, skipped=opened.skipped + named(beside, folder))
    if is_saved_dataset(folder):
        return open_saved_dataset(folder)
    tables = _inside(folder, ".parquet")
    if tables:
        return open_parquet(tables, folder)
    return open_folder(folder, labelling, unlabelled=unlabelled)


def _inside(folder: Path, suffix: str) -> list[Path]:
    """Return the files with this suffix in a folder, its data/, train/ or test/, in order."""
    parts = [f for f in folder.glob("*/") if f.name.lower() in ("data", *SPLIT_WORDS)]
    found = [file for each in (folder, *parts) for file in each.glob("*")]
    return sorted(
        file
        for file in found
        if file.suffix.lower() == suffix and not file.name.startswith(".") and file.is_file()
    )


def open_usable(
    data: Path | Collection | None,
    *,
    labelling: Labelling = BY_FOLDER,
    corrections: Path | None = None,
    progress: Progress = silent,
) -> Collection:
    """Open and scan data; return the items that can be read.

    corrections: a file of labels that replace those of the data, see corrections.py.
    """
    collection = open_corrected(
        data, labelling=labelling, corrections=corrections, progress=progress
    )
    report = scan_pictures(collection, progress=progress)
    say_problems(report)
    return readable(collection, report)


def open_corrected(
    data: Path | Collection | None,
    *,
    labelling: Labelling = BY_FOLDER,
    corrections: Path | None = None,
    progress: Progress = silent,
) -> Collection:
    """Open data, with items that may turn out to be unreadable; see `open_usable`."""
    if not isinstance(data, Collection):
        with working(progress, "opening the data"):
            data = open_data(data, labelling=labelling)
    log.info(data.describe())
    for note in data.notes:
        log.warning(note)
    return data if corrections is None else corrected(data, corrections)


def say_problems(report: ScanReport) -> None:
    """Say what is wrong with which items."""
    if report.problems:
        bad = [f"{p.name} ({p.reason})" for p in report.unreadable]
        left_out = f"; {len(bad):,} left out: {first_five(bad)}" if bad else ""
        log.warning(f"{report.summary()}{left_out}")


def readable(collection: Collection, report: ScanReport) -> Collection:
    """Return the items that can be read; the collection itself if all can."""
    rows = report.readable
    if len(rows) == len(collection):
        return collection
    if not len(rows):
        raise DataError(f"{collection.name} has no picture that can be read: {report.summary()}")
    usable = collection.subset(rows)
    if usable.comparisons is not None and not len(usable.comparisons):
        kind = usable.comparisons.kind.removesuffix("s")
        raise DataError(f"{collection.name} has no {kind} without an unreadable picture")
    return usable


@dataclass(frozen=True, eq=False)
class TrainingData:
    """What training learns from and is scored by: from here on labels exist, or none is needed."""

    collection: Collection
    """Labelled by classes or by groups of linked items; without any label where training takes its
    triplets as they are."""
    comparisons: Comparisons | None
    """Triplets or pairs that held-out items are scored by."""
    groups: Rows | None
    """The group of each item, −1 for none, where there are no classes: whole groups are held out.
    Where triplets contradict all grouping, none has one."""
    fingerprint: str
    """Of the data as they were opened."""
    notes: tuple[str, ...] = ()
    """How data without labels are learned from, for the user."""

    @cached_property
    def side(self) -> int | None:
        """The short side of the pictures: of the arrays, or the median of some files."""
        collection = self.collection
        if collection.images is not None:
            return int(min(collection.images.shape[1:3]))
        sides = []
        for path in collection.paths[:: max(1, len(collection.paths) // 20)]:
            with suppress(DataError):
                sides.append(min(decode(path, at_least=LARGE).size))
        return int(np.median(sides)) if sides else None


def open_training_data(
    source: Path | Collection | None,
    config: Options | Settings,
    *,
    corrections: Path | None = None,
    progress: Progress = silent,
) -> TrainingData:
    """Open and scan what a run was trained on, to score it or to search in it."""
    labelling = labelling_of(config)
    opened = open_usable(source, labelling=labelling, corrections=corrections, progress=progress)
    check_used(opened, labelling)
    return training_data(opened, config)


def training_data(opened: Collection, config: Options | Settings) -> TrainingData:
    """Return how training learns from a collection; make labels of what is linked.

    config: as asked or resolved; both give the same.
    """
    fingerprint, comparisons = opened.fingerprint(), opened.comparisons
    if opened.has_classes:
        return TrainingData(opened, comparisons, None, fingerprint)
    if comparisons is None:
        raise DataError(
            f"{opened.name} has neither labels nor triplets to learn from; "
            "add an array `labels` (or `triplets`, or `pairs`)"
        )
    kind, linked = comparisons.kind, comparisons.links(len(opened))
    doubt = comparisons.doubt(linked)
    is_bare = _takes_bare_triplets(opened, config, doubt)
    if doubt is not None:  # single triplets are held out
        fraction = TEST_FRACTION if config.test_fraction is None else config.test_fraction
        is_scored = comparisons.drawn(fraction, config.seed or 0)
        opened = replace(opened, comparisons=comparisons[~is_scored])
        comparisons = comparisons[is_scored]
        linked = linked._replace(groups=np.full(len(opened), NO_LABEL, dtype=np.int64))
    notes = []
    if config.test_fraction is None:
        notes.append(
            f"{TEST_FRACTION:.0%} of the {kind} are held out for the scores; --test-fraction 0 "
            "learns from all"
        )
    if is_bare:
        because = "" if doubt is None else f" ({doubt})"
        notes.append(f"no labels: training takes the triplets as they are{because}")
    else:
        names = tuple(f"group {i + 1}" for i in range(int(linked.groups.max()) + 1))
        opened = replace(opened, labels=linked.groups, class_names=names, by_links=True)
        notes.append(
            f"no labels: {len(names):,} groups of items that the {kind} link are treated as classes"
        )
        if linked.dropped:
            notes.append(
                f"some {kind} contradict each other; {linked.dropped:,} links that no others "
                "confirm are left out"
            )
    return TrainingData(opened, comparisons, linked.groups, fingerprint, tuple(notes))


def _takes_bare_triplets(opened: Collection, config: Options | Settings, doubt: str | None) -> bool:
    """Return whether training takes triplets as they are, since that is asked for or all it can."""
    assert opened.comparisons is not None
    has_pairs = opened.comparisons.kind == "pairs"
    # Section 4.1: without labels, p(x) is the closest proxy.
    by_paper = config.preset == "paper" and config.assignment is None
    if config.assignment == "dynamic" or by_paper:
        if has_pairs:
            raise UsageError(
                f"dynamic assignment learns from triplets, and {opened.name} has pairs; use "
                "--assignment balanced"
            )
        return True
    if doubt is not None and (has_pairs or config.assignment == "balanced"):
        cure = "correct them" if has_pairs else "correct them, or use --assignment dynamic"
        raise DataError(f"{opened.name} can't be trained on groups: {doubt}; {cure}")
    return doubt is not None
