"""A CSV of triplets, `anchor,positive,negative`: supervision without any label.

The paper's dynamic assignment needs no more than this: (x, y, z) with x closer to y than to z.
Paths are relative to the CSV.
"""

from pathlib import Path

import numpy as np

from nofuss.data.collection import Collection, first_five, printable
from nofuss.data.table import existing, read_rows
from nofuss.errors import DataError

COLUMNS = ("anchor", "positive", "negative")


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
    name = printable(path.name)
    if complaints:
        raise DataError(f"{name} has rows that can't be used: {first_five(complaints)}")
    if not triplets:
        raise DataError(f"{name} has a header but no rows; expected {','.join(COLUMNS)}")
    return Collection(
        name=path.stem,
        layout=f"CSV of triplets {name}",
        kind="pictures",
        paths=list(place),
        root=path.parent,
        triplets=np.array(triplets, dtype=np.int64),
    )
