"""Corrected labels, applied to data without changing them.

`nofuss train --corrections FILE` takes a CSV `item,label,corrected` that somebody wrote by hand, or
the feedback.jsonl of a run, where the page of `nofuss serve` appends what people say of labels
(search/feedback.py). `item` is a picture's path, absolute or relative to the data, or the row of an
array ("row 17", "data.npz#17"); `label` is what the data say, and where `corrected` says the same,
somebody has looked and found it right.
"""

import logging
import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from nofuss.data.collection import TRAIN, Collection, first_five, relative
from nofuss.data.readers.table import read_rows
from nofuss.errors import DataError
from nofuss.files import csv_cell, read_lines

log = logging.getLogger("nofuss")
SHOWN = 5
COLUMNS = ("item", "label", "corrected")


class Correction(NamedTuple):
    """What somebody says of a label."""

    item: str
    label: str
    corrected: str | None
    """None takes back what was said before."""

    @classmethod
    def from_json(cls, stored: Any) -> "Correction | None":
        """Return a line of feedback.jsonl; None where it says something else."""
        if not isinstance(stored, dict) or not stored.keys() >= {*COLUMNS}:
            return None
        said = cls(*(stored[column] for column in COLUMNS))
        is_valid = type(said.item) is type(said.label) is str
        return said if is_valid and isinstance(said.corrected, str | None) else None


def read_corrections(file: Path) -> list[Correction]:
    """Read a CSV of corrections, or those in force in a file of feedback.

    DataError for a file that is neither.
    """
    lines = []
    with suppress(OSError):  # the reader of tables says what is wrong
        lines = read_lines(file)
    if any(isinstance(line, dict) for line in lines):
        said = map(Correction.from_json, lines)
        return list(in_force(each for each in said if each is not None).values())
    rows = read_rows(file, *COLUMNS)
    return [Correction(*(csv_cell(row.cells[column]) for column in COLUMNS)) for row in rows]


def in_force(corrections: Iterable[Correction]) -> dict[str, Correction]:
    """Return item → what was said last; nothing of what was taken back."""
    last = {said.item: said for said in corrections}
    return {item: said for item, said in last.items() if said.corrected is not None}


def corrected(collection: Collection, file: Path) -> Collection:
    """Return the collection with corrected labels; count what does not fit, and refuse typos."""
    if not collection.has_classes:
        raise DataError(f"{collection.name} has no labels, so {file.name} can't correct any")
    codes = {name: code for code, name in enumerate(collection.class_names)}
    names = (*collection.class_names, "")  # NO_LABEL is −1
    labels, rows = collection.labels.copy(), _rows(collection)
    split = None if collection.split is None else collection.split.copy()
    sides = [] if split is None else [*zip(labels.tolist(), split.tolist(), strict=True)]
    side_of, taken = dict(sides), {(label, side == TRAIN) for label, side in sides}
    unknown, changed, applied, typos = 0, 0, 0, list[str]()
    for item, was, now in read_corrections(file):
        row = rows(item)
        assert now is not None, "not among what was read"
        if row is None:  # of a run's feedback, some may be about pictures that were added to it
            unknown += 1
        elif now not in codes:
            # Of those that are shown: each takes a comparison with every class.
            near = get_close_matches(now, codes, n=1) if len(typos) < SHOWN else []
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            typos.append(f"{now!r}{hint}")
        elif names[collection.labels[row]] not in (was, now):
            changed += 1
        elif labels[row] != codes[now]:
            applied += 1
            labels[row] = codes[now]
            # A class must not end up in both train and test; a query stays one.
            if split is not None and (codes[now], split[row] == TRAIN) not in taken:
                split[row] = side_of[codes[now]]
    if typos:
        raise DataError(
            f"{file.name} names classes that are not in {collection.name}: "
            f"{first_five(typos)}; correct the names, or create the classes"
        )
    log.info(f"{applied:,} labels corrected by {file.name}")
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
    named = {str(relative(path, collection.root)): row for row, path in enumerate(collection.paths)}
    named |= {str(path.absolute()): row for row, path in enumerate(collection.paths)}

    def row_of_array(item: str) -> int | None:
        found = re.fullmatch(r"(?:row |.*#)([0-9]{1,12})", item, re.DOTALL)
        return int(found[1]) if found and int(found[1]) < len(collection) else None

    return named.get if named else row_of_array
