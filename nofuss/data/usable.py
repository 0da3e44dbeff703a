"""Data as training uses them: opened and scanned, without the pictures that can't be read."""

import logging
import os
from pathlib import Path

from nofuss.data.benchmarks import layout_of
from nofuss.data.collection import Collection
from nofuss.data.corrections import corrected
from nofuss.data.detect import open_data
from nofuss.data.folder import find_pictures
from nofuss.data.labelling import BY_FOLDER, Labelling, few
from nofuss.data.scan import CONFLICT, DUPLICATE, ScanReport, scan_pictures
from nofuss.errors import DataError
from nofuss.progress import Progress, silent, working

log = logging.getLogger("nofuss")


def open_usable(
    data: Path | Collection | None,
    *,
    labelling: Labelling = BY_FOLDER,
    corrections: Path | None = None,
    progress: Progress = silent,
) -> tuple[Collection, ScanReport]:
    """Open and scan data; return the readable items and what the scan found.

    corrections: a CSV of labels that replace those of the data, see corrections.py.
    """
    if not isinstance(data, Collection):
        with working(progress, "opening the data"):
            data = open_data(data, labelling=labelling)
    collection = data
    log.info(collection.describe())
    for note in collection.notes:
        log.warning(note)
    if corrections is not None:
        collection = corrected(collection, corrections)
    report = scan_pictures(collection, progress=progress)
    readable = report.readable
    if report.problems:
        left_out = [
            f"{p.name} ({p.reason})"
            for p in report.problems
            if p.reason not in (DUPLICATE, CONFLICT)
        ]
        named = f"; {len(left_out):,} left out: {few(left_out)}" if left_out else ""
        log.warning(f"{report.summary()}{named}")
    if len(readable) == len(collection):
        return collection, report
    if not len(readable):
        raise DataError(f"{collection.name} has no picture that can be read: {report.summary()}")
    usable = collection.subset(readable)
    for name, rows in (("triplet", usable.triplets), ("pair", usable.pairs)):
        if rows is not None and not len(rows):
            raise DataError(f"{collection.name} has no {name} without an unreadable picture")
    return usable, report


def check_supervision(collection: Collection) -> None:
    """Refuse data with neither labels nor triplets nor pairs."""
    if collection.labels is None and collection.triplets is None and collection.pairs is None:
        raise DataError(
            f"{collection.name} has neither labels nor triplets to learn from; "
            "add an array `labels` (or `triplets`, or `pairs`)"
        )


def open_any(path: Path | None, labelling: Labelling = BY_FOLDER) -> Collection:
    """Open any data, or a folder of pictures without classes, which has no labels then."""
    try:
        return open_data(path, labelling=labelling)
    except DataError as error:
        folder = path and Path(os.path.expanduser(path)).absolute()
        if folder is None or not folder.is_dir() or layout_of(folder):
            raise
        pictures = find_pictures(folder)
        if not pictures:
            raise
        return Collection(
            name=folder.name,
            layout="folder of pictures",
            kind="pictures",
            paths=pictures,
            root=folder,
            notes=() if labelling == BY_FOLDER else (f"without labels: {error}",),
        )
