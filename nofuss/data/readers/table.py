"""CSVs: `path,label[,split]`, or triplets `anchor,positive,negative`, or pairs `a,b,same`.

Paths are relative to the CSV. Further columns beside labels (price, shop, …) are kept for filters
and results, see columns.py. A triplet says that anchor is closer to positive than to negative, a
pair that two items are alike (1) or not (0). Rows are counted as a spreadsheet shows them: the
header is row 1.
"""

import csv
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nofuss.data.collection import (
    GALLERY,
    QUERY,
    Collection,
    compact_labels,
    first_five,
    printable,
    reading,
    refuse,
    to_bytes,
)
from nofuss.data.columns import clean, read_column
from nofuss.data.readers.folder import SPLIT_WORDS
from nofuss.data.triplets import Comparisons
from nofuss.errors import DataError
from nofuss.files import check_regular

TRIPLET_COLUMNS = ("anchor", "positive", "negative")
PAIR_COLUMNS = ("a", "b", "same")
SAME = dict.fromkeys(("1", "true", "yes"), 1) | dict.fromkeys(("0", "false", "no"), 0)
SPLITS = SPLIT_WORDS | {"query": QUERY, "gallery": GALLERY}
"""Words in a column `split`."""


class Row(NamedTuple):
    """One record of a CSV: its number in a spreadsheet, and its cells by column."""

    number: int
    cells: dict[str, str]


@contextmanager
def _opened(path: Path) -> Iterator[tuple[list[str], Any]]:
    """Yield the names of the columns, in lower case, and a reader of the other records.

    Bytes that are not UTF-8 survive as surrogates, since file names may hold them.
    """
    with reading(path, "CSV"):
        check_regular(path)
        with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as text:
            first = text.readline()
            text.seek(0)
            reader = csv.reader(text, delimiter=max(",;\t", key=first.count), strict=True)
            yield [cell.strip().lower() for cell in next(reader, [])], reader


def read_rows(path: Path, *columns: str) -> Iterator[Row]:
    """Yield the records of a CSV that has these columns, and others; skip blank lines."""
    name = path.name
    with _opened(path) as (found, reader):
        if not any(found):
            raise DataError(f"{name} is empty; expected the columns {','.join(columns)}")
        if missing := [column for column in columns if column not in found]:
            raise DataError(
                f"{name} has the columns {', '.join(found)}; "
                f"{' and '.join(missing)} missing, expected {','.join(columns)}"
            )
        if twice := [column for column in found if column and found.count(column) > 1]:
            raise DataError(f"{name} has the column {twice[0]} twice; rename one")
        where = {c: i for i, c in enumerate(found) if c}
        for number, record in enumerate(reader, start=2):
            if any(cell.strip() for cell in record[len(found) :]):
                raise DataError(
                    f"{name} has {len(record)} cells in row {number} and {len(found)} columns; "
                    f"quote cells that hold a {reader.dialect.delimiter!r}"
                )
            if any(cell.strip() for cell in record):
                yield Row(number, {c: "".join(record[i : i + 1]) for c, i in where.items()})


def open_table(path: Path) -> Collection:
    """Open the pictures of a CSV: with labels, or with triplets or pairs beside them."""
    with _opened(path) as (columns, _):
        pass
    if "anchor" in columns:
        return _open_triplets(path)
    return _open_pairs(path) if {*PAIR_COLUMNS} <= {*columns} else _open_labelled(path)


def _use(path: Path, columns: tuple[str, ...], use: Callable[[Row], Any]) -> None:
    """Hand each row to `use`; list those for which it raises ValueError in one DataError."""
    complaints, number = list[str](), 0
    for row in read_rows(path, *columns):
        number = row.number
        try:
            if missing := [column for column in columns if not row.cells[column].strip()]:
                raise ValueError(f"no {missing[0]}")
            use(row)
        except ValueError as error:
            complaints.append(f"row {number}: {error}")
    refuse(path, complaints)
    if not number:
        raise DataError(f"{path.name} has a header but no rows; expected {','.join(columns)}")


def _open_labelled(path: Path) -> Collection:
    paths, labels, split = list[Path](), list[str](), list[str]()
    further, repeated = dict[str, list[str]](), list[str]()
    seen: dict[tuple[str, str], str] = {}

    def use(row: Row) -> None:
        cells = dict(row.cells)
        picture, label = cells.pop("path"), cells.pop("label").strip()
        word = cells.pop("split", "").strip().lower()
        if "split" in row.cells and word not in SPLITS:
            raise ValueError(f"split {word!r} is none of train, test, query, gallery")
        file, side = existing(path.parent, picture), SPLITS.get(word, "")
        key = (os.path.normpath(file), side)
        if key in seen:
            if seen[key] != label:
                raise ValueError(f"{picture} again, with another label")
            repeated.append(f"row {row.number}")
            return
        seen[key] = label
        paths.append(file)
        labels.append(label)
        split.append(side)
        for name, cell in cells.items():
            further.setdefault(name, []).append(cell)

    _use(path, ("path", "label"), use)
    order, names = by_number_or_name(labels)
    remark = f"{len(repeated):,} rows repeat a picture: {first_five(repeated)}"
    return Collection(
        name=path.stem,
        layout=f"CSV manifest {printable(path.name)}",
        paths=paths,
        root=path.parent,
        labels=order,
        class_names=tuple(printable(n) for n in names),
        split=np.array(split) if all(split) else None,
        remarks=(remark,) if repeated else (),
        columns={
            clean(column): values
            for column, cells in sorted(further.items())
            if (values := read_column(cells)) is not None
        },
    )


def _open_triplets(path: Path) -> Collection:
    place, triplets = dict[Path, int](), list[list[int]]()

    def use(row: Row) -> None:
        files = [existing(path.parent, row.cells[column]) for column in TRIPLET_COLUMNS]
        if files[2] in files[:2]:
            raise ValueError("the negative is also the anchor or the positive")
        triplets.append([place.setdefault(file, len(place)) for file in files])

    _use(path, TRIPLET_COLUMNS, use)
    return _compared(path, place, Comparisons("triplets", np.array(triplets, dtype=np.int64)))


def _open_pairs(path: Path) -> Collection:
    place = dict[Path, int]()
    found: dict[tuple[int, ...], tuple[int, int]] = {}  # two items → same, and the row's number

    def use(row: Row) -> None:
        if (word := row.cells["same"].strip().lower()) not in SAME:
            raise ValueError(f"same is {row.cells['same']!r}, expected 1 or 0")
        files = [existing(path.parent, row.cells[column]) for column in ("a", "b")]
        if files[0] == files[1]:
            raise ValueError("a and b are one picture")
        items = tuple(sorted(place.setdefault(file, len(place)) for file in files))
        same, where = found.setdefault(items, (SAME[word], row.number))
        if same != SAME[word]:
            raise ValueError(f"the same two pictures as in row {where}, with another same")

    _use(path, PAIR_COLUMNS, use)
    pairs = np.array([[*items, same] for items, (same, _) in found.items()], dtype=np.int64)
    check_pairs(pairs, path.name)
    return _compared(path, place, Comparisons("pairs", pairs))


def _compared(path: Path, place: dict[Path, int], comparisons: Comparisons) -> Collection:
    return Collection(
        name=path.stem,
        layout=f"CSV of {comparisons.kind} {printable(path.name)}",
        paths=list(place),
        root=path.parent,
        comparisons=comparisons,
    )


def check_pairs(pairs: NDArray[np.int64], name: str) -> None:
    """Refuse pairs (M, 3) that do not have both alike and different ones among them."""
    for value, word in ((1, "alike"), (0, "different")):
        if not (pairs[:, 2] == value).any():
            raise DataError(
                f"{name} has no pair that is {word} (same = {value}); learning needs both: add some"
            )


def existing(folder: Path, name: str) -> Path:
    """Return the regular file `name` in `folder`; ValueError if there is none."""
    try:
        check_regular(folder / name)
    except (FileNotFoundError, ValueError):  # ValueError: a null byte
        raise ValueError(f"no file {name}") from None
    except OSError as error:
        raise ValueError(f"{name}: {error.strerror}") from None
    return folder / name


def by_number_or_name(labels: list[str]) -> tuple[NDArray[np.int64], list[str]]:
    """Return compact labels, sorted by number if all are numbers: "10" comes after "9".

    With leading zeros they are names: "007" is not "7".
    """
    numbers = [int(label) for label in labels if re.fullmatch("0|[1-9][0-9]{0,17}", label)]
    if len(numbers) == len(labels):
        compact, values = compact_labels(numbers)
        return compact, [str(value) for value in values]
    # Not an array of bytes, in which every label is as long as the longest.
    raw = [to_bytes(label) for label in labels]
    names = sorted(set(raw))
    place = {name: i for i, name in enumerate(names)}
    return np.array([place[each] for each in raw], np.int64), [os.fsdecode(n) for n in names]
