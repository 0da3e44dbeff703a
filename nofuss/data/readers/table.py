"""CSVs: `path,label[,split]`, or triplets `anchor,positive,negative`, or pairs `a,b,same`.

Paths are relative to the CSV. Further columns beside labels (price, shop, …) are kept for filters
and results, see columns.py. A triplet says that anchor is closer to positive than to negative, a
pair that two items are alike (1) or not (0). Rows are counted as a spreadsheet shows them: the
header is row 1.
"""

import csv
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, TextIO

import numpy as np
from numpy.typing import NDArray

from nofuss.data.collection import (
    GALLERY,
    QUERY,
    TEST,
    TRAIN,
    Collection,
    compact_labels,
    first_five,
    printable,
    to_bytes,
)
from nofuss.data.columns import clean, read_column
from nofuss.data.readers.folder import few
from nofuss.data.triplets import Comparisons
from nofuss.errors import DataError
from nofuss.files import check_regular

TRIPLET_COLUMNS = ("anchor", "positive", "negative")
PAIR_COLUMNS = ("a", "b", "same")
SAME = dict.fromkeys(("1", "true", "yes"), 1) | dict.fromkeys(("0", "false", "no"), 0)
LONGEST_LINE = 2**20
LONGEST_LABEL = 2**12
MOST_COLUMNS = 1000
SPLITS = {"train": TRAIN, "training": TRAIN, "test": TEST, "testing": TEST, "eval": TEST}
SPLITS |= {"query": QUERY, "gallery": GALLERY}


def open_table(path: Path) -> Collection:
    """Open the pictures that a CSV lists, labelled by its `label` column."""
    paths: list[Path] = []
    labels: list[str] = []
    split: list[str] = []
    further: dict[str, list[str]] = {}
    complaints: list[str] = []
    repeated: list[str] = []
    seen: dict[tuple[str, str], str] = {}
    rows = read_rows(path, required=("path", "label"), optional=("split",), further=True)
    for number, row in rows:
        try:
            picture, label = row["path"], row["label"].strip()
            if not picture or not label:
                raise ValueError(f"no {'label' if picture else 'path'}")
            if "split" in row and row["split"].strip().lower() not in SPLITS:
                raise ValueError(f"split {row['split']!r} is none of train, test, query, gallery")
            file = existing(path.parent, picture)
            side = SPLITS[row["split"].strip().lower()] if "split" in row else ""
            before = seen.setdefault((os.path.normpath(file), side), label)
            if before != label:
                raise ValueError(f"{printable(picture)} again, with another label")
            if len(seen) == len(paths):
                repeated.append(f"row {number}")
                continue
            paths.append(file)
            labels.append(label)
            split.append(side)
            for name in row.keys() - {"path", "label", "split"}:
                further.setdefault(name, []).append(row[name])
        except ValueError as error:
            complaints.append(f"row {number}: {error}")
    name = printable(path.name)
    if complaints:
        raise DataError(f"{name} has rows that can't be used: {first_five(complaints)}")
    if not paths:
        raise DataError(f"{name} has a header but no rows; expected path,label[,split]")
    order, names = by_number_or_name(labels)
    return Collection(
        name=path.stem,
        layout=f"CSV manifest {name}",
        paths=paths,
        root=path.parent,
        labels=order,
        class_names=tuple(printable(n) for n in names),
        split=np.array(split) if all(split) else None,
        notes=(f"{len(repeated):,} rows repeat a picture: {few(repeated)}",) if repeated else (),
        columns={
            clean(column): values
            for column, cells in sorted(further.items())
            if (values := read_column(cells)) is not None
        },
    )


class Row(NamedTuple):
    """One record of a CSV: its number in a spreadsheet, and its cells by column."""

    number: int
    cells: dict[str, str]


def read_rows(
    path: Path, *, required: tuple[str, ...], optional: tuple[str, ...], further: bool = False
) -> Iterator[Row]:
    """Yield the records of a CSV that has the required columns; skip blank lines.

    `further` also yields the columns that are neither required nor optional.

    Bytes that are not UTF-8 survive as surrogates, since file names may hold them.
    """
    name, wanted = printable(path.name), ",".join(required) + "".join(f"[,{o}]" for o in optional)
    reader = None
    try:
        with _opened(path) as file:
            first = next(_lines(file), "")
            if not first.strip():
                raise DataError(f"{name} is empty; expected the columns {wanted}")
            delimiter = max(",;\t", key=first.count)
            file.seek(0)
            reader = csv.reader(_lines(file), delimiter=delimiter, strict=True)
            columns = [cell.strip().lower() for cell in next(reader)]
            if len(columns) > MOST_COLUMNS:
                raise DataError(f"{name} has {len(columns):,} columns; at most {MOST_COLUMNS:,}")
            if missing := [column for column in required if column not in columns]:
                raise DataError(
                    f"{name} has the columns {printable(', '.join(columns))}; "
                    f"{' and '.join(missing)} missing, expected {wanted}"
                )
            if twice := [c for c in columns if c and columns.count(c) > 1]:
                raise DataError(f"{name} has the column {printable(twice[0])} twice; rename one")
            wanted_columns = {*required, *optional, *(filter(None, columns) if further else ())}
            where = {c: columns.index(c) for c in columns if c in wanted_columns}
            for number, record in enumerate(reader, start=2):
                if any(cell.strip() for cell in record[len(columns) :]):
                    raise DataError(
                        f"{name} has {len(record)} cells in row {number} and {len(columns)} "
                        f"columns; quote cells that hold a {delimiter!r}"
                    )
                if any(cell.strip() for cell in record):
                    yield Row(
                        number, {c: record[i] if i < len(record) else "" for c, i in where.items()}
                    )
    except csv.Error as error:
        line = 1 if reader is None else reader.line_num
        raise DataError(f"{name} is not a readable CSV: {error} (line {line})") from error
    except OSError as error:
        raise DataError(f"can't read {name}: {error.strerror}") from error


def header(path: Path) -> list[str]:
    """Return the column names of a CSV in lower case; empty if there are none."""
    try:
        with _opened(path) as file:
            first = next(_lines(file), "")
    except csv.Error as error:
        raise DataError(f"{printable(path)} is not a readable CSV: {error} (line 1)") from error
    except OSError as error:
        raise DataError(f"can't read {printable(path)}: {error.strerror}") from error
    return [cell.strip().strip('"').lower() for cell in first.split(max(",;\t", key=first.count))]


def _opened(path: Path) -> TextIO:
    check_regular(path)
    return path.open(encoding="utf-8-sig", errors="surrogateescape", newline="")


def _lines(file: TextIO) -> Iterator[str]:
    """Yield the lines of a text file; csv.Error for one that is too long for a table."""
    while line := file.readline(LONGEST_LINE):
        if len(line) == LONGEST_LINE:
            raise csv.Error(f"a line of more than {LONGEST_LINE:,} characters")
        yield line


def existing(folder: Path, name: str) -> Path:
    """Return the regular file `name` in `folder`; ValueError if there is none."""
    file, shown_name = folder / name, printable(name.replace("\0", "�"))
    try:
        check_regular(file)
    except FileNotFoundError:
        raise ValueError(f"no file {shown_name}") from None
    except (OSError, ValueError) as error:  # ValueError: a null byte
        reason = getattr(error, "strerror", None)
        raise ValueError(f"{shown_name}: {reason}" if reason else f"no file {shown_name}") from None
    return file


def by_number_or_name(labels: list[str]) -> tuple[np.ndarray, list[str]]:
    """Return compact labels, sorted by number if all are numbers: "10" comes after "9".

    With leading zeros they are names: "007" is not "7".
    """
    if all(label.isascii() and label.isdigit() and len(label) < 19 for label in labels) and all(
        label == "0" or label[0] != "0" for label in labels
    ):
        compact, values = compact_labels([int(label) for label in labels])
        return compact, [str(v) for v in values]
    longest = max(labels, key=len, default="")
    if len(longest) > LONGEST_LABEL:
        raise DataError(
            f"the label {printable(longest[:20])}… has {len(longest):,} characters; expected at "
            f"most {LONGEST_LABEL:,}"
        )
    # Not an array of bytes, in which every label is as long as the longest.
    raw = [to_bytes(label) for label in labels]
    names = sorted(set(raw))
    place = {name: i for i, name in enumerate(names)}
    return np.array([place[each] for each in raw], np.int64), [os.fsdecode(n) for n in names]


def open_triplets(path: Path) -> Collection:
    """Open the pictures that a CSV of triplets names, and the triplets as their indices."""
    place: dict[Path, int] = {}
    triplets: list[list[int]] = []
    complaints: list[str] = []
    for number, row in read_rows(path, required=TRIPLET_COLUMNS, optional=()):
        try:
            if missing := [column for column in TRIPLET_COLUMNS if not row[column]]:
                raise ValueError(f"no {missing[0]}")
            files = [existing(path.parent, row[column]) for column in TRIPLET_COLUMNS]
            if files[2] in files[:2]:
                raise ValueError("the negative is also the anchor or the positive")
            triplets.append([place.setdefault(file, len(place)) for file in files])
        except ValueError as error:
            complaints.append(f"row {number}: {error}")
    _check(path, complaints, triplets, TRIPLET_COLUMNS)
    return Collection(
        name=path.stem,
        layout=f"CSV of triplets {printable(path.name)}",
        paths=list(place),
        root=path.parent,
        comparisons=Comparisons("triplets", np.array(triplets, dtype=np.int64)),
    )


def open_pairs(path: Path) -> Collection:
    """Open the pictures that a CSV of pairs names, and the pairs as their indices."""
    place: dict[Path, int] = {}
    found: dict[tuple[int, int], tuple[int, int]] = {}  # two items → same, and the row's number
    complaints: list[str] = []
    for number, row in read_rows(path, required=PAIR_COLUMNS, optional=()):
        try:
            if missing := [column for column in PAIR_COLUMNS if not row[column].strip()]:
                raise ValueError(f"no {missing[0]}")
            if (word := row["same"].strip().lower()) not in SAME:
                raise ValueError(f"same is {printable(row['same'])!r}, expected 1 or 0")
            files = [existing(path.parent, row[column]) for column in ("a", "b")]
            if files[0] == files[1]:
                raise ValueError("a and b are one picture")
            first, second = sorted(place.setdefault(file, len(place)) for file in files)
            same, where = found.setdefault((first, second), (SAME[word], number))
            if same != SAME[word]:
                raise ValueError(f"the same two pictures as in row {where}, with another same")
        except ValueError as error:
            complaints.append(f"row {number}: {error}")
    pairs = [[*items, same] for items, (same, _) in found.items()]
    _check(path, complaints, pairs, PAIR_COLUMNS)
    return Collection(
        name=path.stem,
        layout=f"CSV of pairs {printable(path.name)}",
        paths=list(place),
        root=path.parent,
        comparisons=Comparisons(
            "pairs", check_pairs(np.array(pairs, dtype=np.int64), printable(path.name))
        ),
    )


def check_pairs(pairs: NDArray[np.int64], name: str) -> NDArray[np.int64]:
    """Return pairs (M, 3) that have both alike and different ones among them."""
    for value, word in ((1, "alike"), (0, "different")):
        if not (pairs[:, 2] == value).any():
            raise DataError(
                f"{name} has no pair that is {word} (same = {value}); learning needs both: add some"
            )
    return pairs


def _check(
    path: Path, complaints: list[str], rows: list[list[int]], columns: tuple[str, ...]
) -> None:
    """Refuse a table with rows that can't be used, or without any."""
    name = printable(path.name)
    if complaints:
        raise DataError(f"{name} has rows that can't be used: {first_five(complaints)}")
    if not rows:
        raise DataError(f"{name} has a header but no rows; expected {','.join(columns)}")
