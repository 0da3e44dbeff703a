"""A CSV of triplets, `anchor,positive,negative`, or of pairs, `a,b,same`: no label at all.

The paper's dynamic assignment needs no more than triplets: (x, y, z) with x closer to y than to z.
Pairs say of two items that they are alike (1) or not (0). Paths are relative to the CSV.
"""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from nofuss.data.collection import Collection, first_five, printable
from nofuss.data.table import existing, read_rows
from nofuss.errors import DataError

COLUMNS = ("anchor", "positive", "negative")
PAIR_COLUMNS = ("a", "b", "same")
SAME = dict.fromkeys(("1", "true", "yes"), 1) | dict.fromkeys(("0", "false", "no"), 0)


def open_triplets(path: Path) -> Collection:
    """Open the pictures that a CSV of triplets names, and the triplets as their indices."""
    place: dict[Path, int] = {}
    triplets: list[list[int]] = []
    complaints: list[str] = []
    for number, row in read_rows(path, required=COLUMNS, optional=()):
        try:
            if missing := [column for column in COLUMNS if not row[column]]:
                raise ValueError(f"no {missing[0]}")
            files = [existing(path.parent, row[column]) for column in COLUMNS]
            if files[2] in files[:2]:
                raise ValueError("the negative is also the anchor or the positive")
            triplets.append([place.setdefault(file, len(place)) for file in files])
        except ValueError as error:
            complaints.append(f"row {number}: {error}")
    _check(path, complaints, triplets, COLUMNS)
    return Collection(
        name=path.stem,
        layout=f"CSV of triplets {printable(path.name)}",
        kind="pictures",
        paths=list(place),
        root=path.parent,
        triplets=np.array(triplets, dtype=np.int64),
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
        kind="pictures",
        paths=list(place),
        root=path.parent,
        pairs=check_pairs(np.array(pairs, dtype=np.int64), printable(path.name)),
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
