"""Corrected labels: a CSV `item,label,corrected` that is applied to data without changing them.

The page of `nofuss serve` writes such a file as doubtful labels are judged, RUN/corrections.csv;
`nofuss train --corrections FILE` applies it. `item` is a picture's path, absolute or relative to
the data, or the row of an array ("row 17", "data.npz#17"); `label` is what the data say, and where
`corrected` says the same, somebody has looked and found it right.
"""

import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import NamedTuple

import numpy as np

from nofuss.data.collection import Collection, first_five, printable, relative
from nofuss.data.readers.table import read_rows
from nofuss.errors import DataError
from nofuss.files import csv_cell, csv_text, write_file

log = logging.getLogger("nofuss")
FILE = "corrections.csv"
SHOWN = 5
COLUMNS = ("item", "label", "corrected")


class Correction(NamedTuple):
    """What somebody says of a label."""

    item: str
    label: str
    corrected: str


def read_corrections(file: Path) -> list[Correction]:
    """Read a CSV of corrections; DataError for anything else."""
    rows = read_rows(file, required=COLUMNS, optional=())
    return [Correction(*(csv_cell(row.cells[column]) for column in COLUMNS)) for row in rows]


def write_corrections(file: Path, corrections: Sequence[Correction]) -> None:
    """Replace the CSV as a whole."""
    content = csv_text([COLUMNS, *corrections])
    try:
        write_file(file, content.encode("utf-8", "surrogateescape"))  # a name's bytes, as they are
    except UnicodeEncodeError:
        write_file(file, content)


def corrected(collection: Collection, file: Path) -> Collection:
    """Return the collection with the labels of a CSV; count what does not fit, and refuse typos."""
    if not collection.has_classes:
        raise DataError(f"{collection.name} has no labels, so {file.name} can't correct any")
    codes = {name: code for code, name in enumerate(collection.class_names)}
    labels, rows = collection.labels.copy(), _rows(collection)
    split = None if collection.split is None else collection.split.copy()
    side_of_class = (
        {} if split is None else dict(zip(collection.labels.tolist(), split, strict=True))
    )
    unknown, changed, applied, typos = 0, 0, 0, list[str]()
    for item, was, now in read_corrections(file):
        row = rows(item)
        if now not in codes:
            # Of those that are shown: each takes a comparison with every class.
            near = get_close_matches(now, codes, n=1) if len(typos) < SHOWN else []
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            typos.append(f"{printable(now)!r}{hint}")
        elif row is None:
            unknown += 1
        elif collection.class_names[collection.labels[row]] not in (was, now):
            changed += 1
        elif labels[row] != codes[now]:
            labels[row] = codes[now]
            applied += 1
            if split is not None:  # a class must not end up in both train and test
                split[row] = side_of_class[codes[now]]
    if typos:
        raise DataError(
            f"{printable(file.name)} names classes that are not in {collection.name}: "
            f"{first_five(typos)}; correct the names, or create the classes"
        )
    log.info(f"{applied:,} labels corrected by {printable(file.name)}")
    if unknown:
        log.warning(f"{unknown:,} corrections are of items that are not in the data; left out")
    if changed:
        log.warning(f"{changed:,} corrections are of items with another label now; left out")
    if not applied:
        return collection
    changed_labels = replace(collection, labels=labels, split=split)
    return changed_labels.subset(np.arange(len(collection)))  # a class may have lost its last item


def _rows(collection: Collection) -> Callable[[str], int | None]:
    """Return a function from the name of an item to its row, None where there is no such item."""
    if collection.kind != "pictures":

        def row_of(item: str) -> int | None:
            found = re.fullmatch(r"(?:row |.*#)([0-9]{1,12})", item, re.DOTALL)
            row = int(found[1]) if found else len(collection)
            return row if row < len(collection) else None

        return row_of
    named = {str(relative(path, collection.root)): row for row, path in enumerate(collection.paths)}
    named |= {str(path.absolute()): row for row, path in enumerate(collection.paths)}
    return named.get
